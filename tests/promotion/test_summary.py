"""promotion/summary.py: the rollouts of one evaluation become the numbers of a report."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from agenttrain.errors import TaskError
from agenttrain.part import Part
from agenttrain.promotion.summary import ks_of, last_attempts, summarize
from agenttrain.records import Reward, RewardPart, Rollout, Status, Task


def rollout(
    task_id: str, repeat: int = 0, *, success: bool = False, score: float | None = 0.0, **values: Any
) -> Rollout:
    defaults: dict[str, Any] = {
        "phase": "baseline",
        "step": 0,
        "attempt": 0,
        "status": "completed",
        "n_turns": 2,
        "n_tool_calls": 1,
        "n_invalid_tool_calls": 0,
        "n_sampled_ids": 10,
        "started_at": 1.0,
        "ended_at": 3.0,
    }
    given = {**defaults, **values}
    return Rollout(
        id=f"{task_id}-{repeat}-{given['attempt']}",
        task_id=task_id,
        sibling=repeat,
        success=success,
        reward=None if score is None else Reward(score=score, parts=()),
        **given,
    )


def tasks(*metadata: dict[str, Any]) -> list[Task]:
    return [Task(id="abcdefghijklmnopqrstuvwxyz"[i], input={}, metadata=data) for i, data in enumerate(metadata)]


def test_the_keys_and_numbers_of_a_report() -> None:
    """Two tasks, two repeats; one place has failed for good, one was retried."""
    rollouts = [
        rollout("a", 0, success=True, score=1.0, n_turns=4, n_tool_calls=3, n_sampled_ids=40),
        rollout("a", 1, status="policy_failure", n_invalid_tool_calls=2),
        rollout("b", 0, status="environment_failure", score=None),
        rollout("b", 0, attempt=1, success=True, score=1.0),
        rollout("b", 1, attempt=2, status="environment_failure", score=None, ended_at=7.0),
    ]
    assert summarize(rollouts, tasks({"kind": "x"}, {"kind": "y"}), 2, temperature=0.5) == {
        "temperature": 0.5,
        "tasks": 2,
        "rollouts": 4,
        "success": 0.5,
        "reward": pytest.approx(2 / 3),
        "turns": 2.5,
        "tool_calls": 1.5,
        "invalid_tool_calls": 0.5,
        "tokens": 17.5,
        "seconds": 3.0,
        "gates_closed": None,
        "safety_violations": None,
        "policy_failures": 1,
        "unfinished": 0,
        "environment_failures": 1,
        "pass_at_k": {"1": 0.5, "2": 1.0},
        "by_slice": {"kind": {"x": {"tasks": 1, "success": 0.5}, "y": {"tasks": 1, "success": 0.5}}},
    }


def test_pass_at_k_is_the_mean_over_tasks_of_the_unbiased_estimate() -> None:
    """Of 4 repeats a succeeds once and b never: 1/4, 1/2 and 1 of a, halved. A single repeat tells nothing more."""
    rollouts = [rollout("a", n, success=n == 2) for n in range(4)]
    assert summarize(rollouts, tasks({}, {}), 4)["pass_at_k"] == {"1": 0.125, "2": 0.25, "4": 0.5}
    assert "pass_at_k" not in summarize(rollouts[:1], tasks({}, {}), 1)
    assert [ks_of(n) for n in (1, 2, 6, 8)] == [[], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_rollouts_that_ran_out_of_something_are_counted() -> None:
    cut = [rollout("a", status="budget_exhausted"), rollout("b", status="truncated"), rollout("c")]
    assert summarize(cut, tasks({}, {}, {}), 1)["unfinished"] == 2


def test_a_place_that_was_never_run_counts_as_no_success() -> None:
    summary = summarize([rollout("a", success=True, score=1.0)], tasks({}, {}), 2)
    assert (summary["success"], summary["rollouts"], summary["reward"]) == (0.25, 1, 1.0)


def test_nothing_measured_is_none_and_not_zero() -> None:
    """No rollout: no means; no reward: no mean reward. Success is strict all the same."""
    empty = summarize([], tasks({}), 1)
    assert (empty["success"], empty["reward"], empty["turns"], empty["seconds"]) == (0.0, None, None, None)
    broken = summarize([rollout("a", status="environment_failure", score=None)], tasks({}), 1)
    assert (broken["reward"], broken["turns"], broken["environment_failures"]) == (None, 2.0, 1)


@pytest.mark.parametrize("status", ["environment_failure", "aborted", "incomplete"])
def test_places_without_a_reward_are_stated(status: Status) -> None:
    assert summarize([rollout("a", status=status, score=None)], tasks({}), 1)["environment_failures"] == 1


def test_the_last_attempt_counts_in_any_order_of_arrival() -> None:
    """Of a resumed run that of the latest life, though its attempts begin at 0 again."""
    rollouts = [
        rollout("a", attempt=0),
        rollout("a", attempt=2, success=True),
        rollout("a", attempt=1),
        rollout("b", attempt=2, success=True),
        rollout("b", attempt=0, life=1),
    ]
    for seed in range(5):
        random.Random(seed).shuffle(rollouts)
        counted = {each.task_id: (each.life, each.attempt) for each in last_attempts(rollouts)}
        assert counted == {"a": (0, 2), "b": (1, 0)}


def test_slices_are_per_metadata_key_with_at_most_20_values() -> None:
    """21 values are too many; a value that is no text stands as JSON; none is made of files or lists."""
    rows = tasks(*({"n": i, "even": i % 2 == 0, "files": {}, "words": []} for i in range(20)), {"n": 20})
    summary = summarize([rollout("a", success=True, score=1.0)], rows, 1)
    assert summary["by_slice"] == {
        "even": {"true": {"tasks": 10, "success": 0.1}, "false": {"tasks": 10, "success": 0.0}}
    }


def test_rollouts_of_another_evaluation_are_refused() -> None:
    """They would push success past 1."""
    for stranger in (rollout("z"), rollout("a", 1)):
        with pytest.raises(TaskError, match="Give the rollouts of one evaluation"):
            summarize([stranger], tasks({}), 1)
    with pytest.raises(TaskError, match="no rollout to count"):
        summarize([], [], 1)


def gated(task_id: str, *closed: bool) -> Rollout:
    """A rollout with a safety and a format gate."""
    safety, form = (float(not each) for each in closed)
    parts = (
        RewardPart(name="safety", score=safety, weight=0.0, kind="safety"),
        RewardPart(name="format", score=form, weight=0.0, kind="format"),
    )
    return replace(rollout(task_id), reward=Reward(score=0.0, parts=parts))


def test_closed_gates_are_counted_where_they_are_declared() -> None:
    """A rollout once, whatever closed; None where no such gate is declared, and 0 where none was closed."""
    gates = {"safety": Part(print, kind="safety"), "format": Part(print, kind="format")}
    seen = [gated("a", True, True), gated("b", False, True), gated("c", False, False)]
    summary = summarize(seen, tasks({}, {}, {}), 1, verifiers=gates)
    assert (summary["gates_closed"], summary["safety_violations"]) == (2, 1)
    only_format = summarize(seen, tasks({}, {}, {}), 1, verifiers={"format": gates["format"]})
    assert (only_format["gates_closed"], only_format["safety_violations"]) == (2, None)
    assert summarize([], tasks({}), 1, verifiers=gates)["safety_violations"] == 0
