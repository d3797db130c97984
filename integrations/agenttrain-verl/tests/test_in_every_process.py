"""What veRL loads in each of its processes."""

from __future__ import annotations

import os
import subprocess
import sys


def seen(code: str, **environment: str) -> str:
    """What a new process prints, as one of veRL's begins."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"} | environment,
    )
    return ran.stdout.strip()


REGISTERED = """
import sys, verl
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
from agenttrain_verl.in_every_process import took_effect
print(took_effect(), _ROLLOUT_REGISTRY["agenttrain", "async"], "agenttrain" in RolloutReplicaRegistry._registry,
      "agenttrain_verl.replica" in sys.modules, "agenttrain_verl.cpu.patches" in sys.modules)
"""


def test_importing_verl_registers_us_by_name() -> None:
    """On a GPU nothing is patched, and the replica is not imported before it is wanted."""
    assert seen(REGISTERED) == "None agenttrain_verl.weight_push.WeightPush True False False"


def test_on_the_cpu_the_patches_are_in() -> None:
    assert seen(REGISTERED, VERL_PLATFORM="cpu") == "None agenttrain_verl.weight_push.WeightPush True False True"


def test_what_verl_swallows_is_told_afterwards() -> None:
    """veRL goes on without a plugin that raises."""
    code = """
from agenttrain_verl import known
name = "verl.utils.model.load_valuehead_model"
known.KNOWN[name] = known.Known("0", "")
import verl, sys
try:
    from agenttrain_verl.in_every_process import took_effect
except Exception as error:
    print(type(error).__name__)
"""
    assert seen(code, VERL_PLATFORM="cpu") == "TrainerError"


def test_the_replica_is_found_by_name() -> None:
    code = """
import verl
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
print(RolloutReplicaRegistry.get("agenttrain").__name__, get_rollout_class("agenttrain").__name__)
"""
    assert seen(code, VERL_PLATFORM="cpu") == "EngineReplica WeightPush"
