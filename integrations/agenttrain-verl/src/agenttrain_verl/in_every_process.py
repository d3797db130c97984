"""What veRL loads in each of its processes, through its entry-point group "verl.plugins".

It makes the replica and the adapter "agenttrain" known, by name alone, and on the CPU the platform and the patches.
veRL swallows what is raised here (`__init__.py`, 0.9.1): `took_effect` says afterwards whether it worked, and why not.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

NAME = "agenttrain"
REPLICA = ("agenttrain_verl.replica", "EngineReplica")
ADAPTER = "agenttrain_verl.weight_push.WeightPush"

_failure: str | None = "it was not loaded"


def took_effect() -> str | None:
    """None: it did. Else why not, for an error message."""
    return _failure


def install() -> None:
    """Make ourselves known to this process's veRL; safe twice.

    Raises:
        TrainerError: on the CPU, when veRL is another than the patches are made for.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from agenttrain_verl import cpu

        cpu.install()
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _replica)
    base._ROLLOUT_REGISTRY[NAME, "async"] = ADAPTER  # veRL has no register() for adapters (0.9.1)


def _replica() -> Any:
    from importlib import import_module

    module, name = REPLICA
    return getattr(import_module(module), name)


try:
    install()
    _failure = None
except Exception:
    _failure = traceback.format_exc()
    raise
