"""The learning rate that updates are made at, from what veRL tells of it: the one that comes after them.

veRL's engine steps its schedule with the last update of a call, and reports what it stands at then
(workers/engine/fsdp/transformer_impl.py, lr_scheduler_step, at 0.9.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine


def first_rate(optim: Any) -> float:
    """The rate of a run's first update.

    Args:
        optim: veRL's table of an FSDP actor's optimizer.
    """
    config = omega_conf_to_dataclass(optim)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)
    schedule = FSDPEngine._build_lr_scheduler(SimpleNamespace(optimizer_config=config, rank=-1), optimizer)
    return float(schedule.get_last_lr()[0])


def saved_rate(actor: Path) -> float:
    """The rate of the first update after a checkpoint.

    Args:
        actor: `global_step_N/actor`, of FSDP ranks.
    """
    state = torch.load(next(actor.glob("extra_state_world_size_*_rank_0.pt")), map_location="cpu", weights_only=False)
    return float(state["lr_scheduler"]["_last_lr"][0])


def rates(outputs: Sequence[Mapping[str, Any]], *, first: float) -> tuple[float, float]:
    """(the mean rate of a step's calls, the rate of the next).

    Args:
        outputs: what veRL told of each call, its "lr" among it.
        first: of the first call.
    """
    after = [_last(output["lr"]) for output in outputs]
    return math.fsum([first, *after[:-1]]) / len(after), after[-1]


def _last(told: Any) -> float:
    return float(told[-1] if isinstance(told, list) else told)
