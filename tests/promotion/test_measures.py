"""promotion/measures.py: what an evaluation measured of each task, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.part import Part
from agenttrain.promotion.measures import MEASURES, Evaluation, Measure, measured
from agenttrain.records import Reward, RewardPart, Rollout, Task


def rollout(task_id: str, repeat: int = 0, *, score: float | None = 0.5, **values: Any) -> Rollout:
    """Two turns, three tool calls, one of them invalid, 10 of 100 tokens sampled, four seconds."""
    given = {
        "n_turns": 2,
        "n_tool_calls": 3,
        "n_invalid_tool_calls": 1,
        "n_sampled_ids": 10,
        "n_prompt_ids": 90,
        "started_at": 100.0,
        "ended_at": 104.0,
        "status": "completed" if score is not None else "environment_failure",
        "reward": None if score is None else Reward(score=score, parts=()),
    }
    return Rollout(
        id=f"{task_id}-{repeat}",
        task_id=task_id,
        phase="eval",
        step=0,
        sibling=repeat,
        attempt=0,
        **{**given, **values},
    )


def evaluation(*rollouts: Rollout, repeats: int = 1, **values: Any) -> Evaluation:
    ids = dict.fromkeys(each.task_id for each in rollouts)
    given: dict[str, Any] = {"name": "run", "run_id": "run", "phase": "eval", "temperature": 0.0, "seed": 0}
    tasks = tuple(Task(id=id, input={}) for id in ids)
    return Evaluation(**{**given, "tasks": tasks, "repeats": repeats, "rollouts": rollouts, **values})


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        ("success", 0.0),
        ("reward", 0.5),
        ("cost", 10.0),
        ("tokens", 10.0),
        ("turns", 2.0),
        ("tool_calls", 3.0),
        ("invalid_tool_calls", 1.0),
        ("seconds", 4.0),
    ],
)
def test_each_measure_by_hand(measure: Measure, value: float) -> None:
    """Without prices a rollout costs its sampled tokens."""
    assert measured(evaluation(rollout("a")), measure) == {"a": [value]}


def test_a_place_that_failed_to_the_end_is_no_success_and_nothing_else() -> None:
    """b has no value of anything but success; the second repeat of a is missing in all the others."""
    seen = evaluation(rollout("a", success=True), rollout("a", 1, score=None), rollout("b", score=None), repeats=2)
    assert measured(seen, "success") == {"a": [1.0, 0.0], "b": [0.0, 0.0]}
    others: dict[Measure, Any] = {each: measured(seen, each) for each in MEASURES if each != "success"}
    assert {measure: set(values) for measure, values in others.items()} == {
        **{measure: {"a"} for measure in others},
        "safety_violations": set(),
    }
    assert others["turns"] == {"a": [2.0]}


PRICES = {
    "cost": {
        "sampled_token": 2.0,
        "prompt_token": 0.5,
        "own_sampled_token": 3.0,
        "own_prompt_token": 0.1,
        "tool_call": 7.0,
        "second": 0.25,
    }
}


@pytest.mark.parametrize(
    ("answered_by", "cost"),
    [("policy", 20 + 45 + 21 + 1), ("own models", 30 + 9 + 21 + 1), ("chat model", 30 + 9 + 21 + 1)],
)
def test_cost_goes_by_the_prices_of_who_answered(answered_by: str, cost: float) -> None:
    """10 sampled and 90 prompt tokens, three tool calls, four seconds."""
    seen = evaluation(rollout("a"), answered_by=answered_by, tables=PRICES)
    assert measured(seen, "cost") == {"a": [pytest.approx(cost)]}


def test_tokens_that_nobody_told_are_no_zero() -> None:
    """Neither tokens nor cost, though the other measures stand."""
    seen = evaluation(rollout("a", tokens_told=False), rollout("b"), answered_by="own models")
    assert [set(measured(seen, each)) for each in ("tokens", "cost", "turns")] == [{"b"}, {"b"}, {"a", "b"}]


def test_safety_violations_are_measured_where_a_safety_gate_is_declared_or_seen() -> None:
    """1 where one is closed, once a rollout; a closed format gate is none."""

    def gated(task_id: str, *parts: tuple[str, float]) -> Rollout:
        said = tuple(RewardPart(name=kind, kind=kind, score=score, weight=0.0) for kind, score in parts)  # type: ignore[arg-type]
        return rollout(task_id, reward=Reward(score=0.0, parts=said))

    seen = evaluation(gated("a", ("safety", 0.0), ("safety", 0.0)), gated("b", ("safety", 1.0), ("format", 0.0)))
    assert measured(seen, "safety_violations") == {"a": [1.0], "b": [0.0]}
    only_format = evaluation(gated("a", ("format", 0.0)))
    assert measured(only_format, "safety_violations") == {}
    declared = evaluation(rollout("a"), verifiers={"safe": Part(print, kind="safety")})
    assert measured(declared, "safety_violations") == {"a": [0.0]}
    assert measured(evaluation(rollout("a"), verifiers={"right": Part(print)}), "safety_violations") == {}
