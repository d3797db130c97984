"""What each training step works on: its tasks and its learning rate, from the step alone, as after a resume."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agenttrain.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where in the shuffled tasks training stands."""

    epoch: int = 0
    offset: int = 0


def tasks_at(tasks: Sequence[Task], cursor: Cursor, n: int, seed: int) -> tuple[list[Task], Cursor]:
    """The tasks of one step, all different, and where the next step goes on.

    Each epoch is shuffled by (seed, epoch); what an epoch has left over when it can't fill a step is skipped.

    Example: 5 tasks and n = 2 make two steps an epoch; n = 8 takes all 5 in each step.
    """
    n = min(n, len(tasks))
    if cursor.offset + n > len(tasks):
        cursor = Cursor(epoch=cursor.epoch + 1)
    order = list(range(len(tasks)))
    random.Random(f"{seed}-{cursor.epoch}").shuffle(order)
    chosen = [tasks[i] for i in order[cursor.offset : cursor.offset + n]]
    return chosen, Cursor(epoch=cursor.epoch, offset=cursor.offset + n)


def learning_rate_at(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """Linear warm-up times linear decay.

    Args:
        step: from 1.
        steps: of the whole run.
        final: share of the peak that the decay would reach after the last step.

    Example: steps 10, peak 1, warmup 2, final 0.1: step 1 -> 0.5, step 2 -> 0.91, step 6 -> 0.55.
    """
    rise = min(1.0, step / warmup) if warmup else 1.0
    return peak * rise * (1.0 - (1.0 - final) * (step - 1) / steps)
