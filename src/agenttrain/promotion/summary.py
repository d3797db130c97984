"""The rollouts of one evaluation become the numbers that a report states about it.

Success is strict: every place, a task and a repeat, counts once, and a place without a reward counts as no success.
Only the last attempt of a place is looked at. None means that nothing was measured, never zero.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agenttrain.errors import TaskError
from agenttrain.part import GATES, Part
from agenttrain.promotion.compare import pass_at_k
from agenttrain.promotion.parts import gates_closed
from agenttrain.records import Rollout, Status, Task

MOST_SLICES = 20
"""A metadata key with more values than this is not sliced by."""
NO_REWARD: tuple[Status, ...] = ("environment_failure", "aborted", "incomplete")
"""Statuses of a place that gave no reward, counted as `environment_failures`."""
CUT: tuple[Status, ...] = ("truncated", "budget_exhausted")
"""Statuses of a rollout that ran out of something, counted as `unfinished`."""


def summarize(
    rollouts: Iterable[Rollout],
    tasks: Sequence[Task],
    repeats: int,
    *,
    temperature: float = 0.0,
    verifiers: Mapping[str, Part] | None = None,
) -> dict[str, Any]:
    """The keys of `baseline` and `trained` in report.json.

    Args:
        rollouts: those of one evaluation, in any order, retried attempts among them.
        tasks: the tasks that were evaluated.
        repeats: times each was to be run, at least 1.
        temperature: that it sampled at; 0 is greedy.
        verifiers: of the graph, which say what gates there are. None: no gate.

    Returns:
        `rollouts` counts the places that have one, `reward` is the mean over those with a reward, and `turns`,
        `tool_calls`, `invalid_tool_calls`, `tokens` and `seconds` are means per rollout. `gates_closed` and
        `safety_violations` count rollouts, and are None where no gate, or no safety gate, is declared. `pass_at_k` is
        there with more than one repeat.

    Raises:
        TaskError: no place at all, or a rollout of a task or repeat that was not evaluated.
    """
    if not tasks or repeats < 1:
        raise TaskError(f"An evaluation of {len(tasks)} tasks × {repeats} repeats has no rollout to count. Give both.")
    finished = last_attempts(rollouts)
    _check_places(finished, tasks, repeats)
    return {
        "temperature": temperature,
        "tasks": len(tasks),
        "rollouts": len(finished),
        "success": _success(finished, len(tasks) * repeats),
        "reward": _mean(rollout.reward.score for rollout in finished if rollout.reward is not None),
        "turns": _mean(rollout.n_turns for rollout in finished),
        "tool_calls": _mean(rollout.n_tool_calls for rollout in finished),
        "invalid_tool_calls": _mean(rollout.n_invalid_tool_calls for rollout in finished),
        "tokens": _mean(rollout.n_sampled_ids for rollout in finished),
        "seconds": _mean(rollout.seconds for rollout in finished),
        "gates_closed": gates_closed(finished, verifiers or {}, GATES),
        "safety_violations": gates_closed(finished, verifiers or {}, ("safety",)),
        "policy_failures": sum(rollout.status == "policy_failure" for rollout in finished),
        "unfinished": sum(rollout.status in CUT for rollout in finished),
        "environment_failures": sum(rollout.status in NO_REWARD for rollout in finished),
        **({"pass_at_k": mean_pass_at_k(finished, tasks, repeats)} if repeats > 1 else {}),
        "by_slice": by_slice(finished, tasks, repeats),
    }


def last_attempts(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollout that counts for each place: of the latest life of the run the last attempt and remake."""
    counted: dict[tuple[str, int], Rollout] = {}
    for rollout in rollouts:
        place = (rollout.task_id, rollout.sibling)
        if place not in counted or _order(rollout) >= _order(counted[place]):
            counted[place] = rollout
    return list(counted.values())


def by_slice(
    counted: Sequence[Rollout], tasks: Sequence[Task], repeats: int
) -> dict[str, dict[str, dict[str, float | int]]]:
    """Metadata key to its values to {tasks, success}, for keys with at most 20 values.

    A task without the key is in none of its slices. A value that is no text stands as JSON; one that holds others, such
    as a task's files, makes no slice.
    """
    return {
        key: {value: _slice(counted, ids, repeats) for value, ids in values.items()}
        for key, values in slices(tasks).items()
    }


def slices(tasks: Sequence[Task]) -> dict[str, dict[str, set[str]]]:
    """Metadata key to its values to the ids of their tasks, for keys with at most 20 values."""
    found: dict[str, dict[str, set[str]]] = {}
    for task in tasks:
        for key, value in task.metadata.items():
            if isinstance(value, Mapping | list):
                continue
            found.setdefault(key, {}).setdefault(_text(value), set()).add(task.id)
    return {key: values for key, values in found.items() if len(values) <= MOST_SLICES}


def mean_pass_at_k(counted: Sequence[Rollout], tasks: Sequence[Task], repeats: int) -> dict[str, float]:
    """k, as text, to the chance that one of k repeats of a task succeeds: the mean over tasks, each without bias."""
    n_successes = Counter(rollout.task_id for rollout in counted if rollout.success)
    return {
        str(k): math.fsum(pass_at_k(repeats, n_successes[task.id], k) for task in tasks) / len(tasks)
        for k in ks_of(repeats)
    }


def ks_of(repeats: int) -> list[int]:
    """The k of pass@k that so many repeats tell: 1, 2, 4, 8 … up to them. A single repeat tells none besides success.

    Example: ks_of(6) -> [1, 2, 4]; ks_of(1) -> []
    """
    return [2**n for n in range(repeats.bit_length())] if repeats > 1 else []


def _slice(counted: Sequence[Rollout], task_ids: set[str], repeats: int) -> dict[str, float | int]:
    inside = [rollout for rollout in counted if rollout.task_id in task_ids]
    return {"tasks": len(task_ids), "success": _success(inside, len(task_ids) * repeats)}


def _success(counted: Sequence[Rollout], n_places: int) -> float:
    """Successes over all places, run or not."""
    return sum(rollout.success for rollout in counted) / n_places


def _check_places(counted: Sequence[Rollout], tasks: Sequence[Task], repeats: int) -> None:
    """Refuse a rollout that would count though its place was not to be run."""
    task_ids = {task.id for task in tasks}
    for rollout in counted:
        if rollout.task_id not in task_ids or not 0 <= rollout.sibling < repeats:
            raise TaskError(
                f"Rollout {rollout.id} is of task {rollout.task_id!r}, repeat {rollout.sibling}; the "
                f"evaluation has {len(tasks)} tasks and repeats 0 to {repeats - 1}. "
                "Give the rollouts of one evaluation and the tasks it ran."
            )


def _order(rollout: Rollout) -> tuple[int, int, int]:
    return rollout.life, rollout.attempt, rollout.remake


def _mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    measured = list(values)
    return sum(measured) / len(measured) if measured else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
