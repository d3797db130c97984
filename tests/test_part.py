"""part.py: what a user writes of one verifier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agenttrain import Part
from agenttrain.errors import ConfigError
from agenttrain.part import part_of


def solved(task: Any, state: Any) -> float:
    return 1.0


def test_a_part_is_an_outcome_of_weight_1_where_nothing_else_is_said() -> None:
    part = Part(solved)
    assert (part.weight, part.kind, part.low, part.high, part.on_error, part.closed) == (
        1.0,
        "outcome",
        None,
        None,
        "fail",
        0.0,
    )
    assert [Part(solved, kind=kind).is_gate for kind in ("safety", "format", "outcome", "process", "cost")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (solved, Part(solved)),
        ((solved, 2), Part(solved, 2.0)),
        (Part(solved, -0.1, kind="cost"), Part(solved, -0.1, kind="cost")),
    ],
)
def test_a_function_a_pair_and_a_part_are_taken(given: Any, part: Part) -> None:
    assert part_of("tests", given) == part


def test_an_evaluator_that_only_has_evaluate_run_is_taken() -> None:
    """LangSmith's RunEvaluator need not be callable."""
    evaluator = SimpleNamespace(evaluate_run=lambda run, example=None: None)
    assert part_of("langsmith", evaluator).function is evaluator


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "bonus"},
            "Part(…) got kind='bonus'. Accepted: 'safety', 'format', 'outcome', 'process', 'cost'.",
        ),
        ({"on_error": "ignore"}, "Part(…) got on_error='ignore'. Accepted: 'fail', 'leave_out'."),
        (
            {"low": 2.0, "high": 1.0},
            "Part(solved, kind='outcome') has low=2 above high=1. Its score must lie between them: swap the two.",
        ),
        (
            {"kind": "safety", "closed": float("nan")},
            "Part(solved, kind='safety') has closed=nan, and a finite number is expected.",
        ),
        (
            {"weight": float("inf")},
            "Part(solved, kind='outcome') has weight=inf, and a finite number is expected.",
        ),
        ({"low": "0"}, "Part(solved, kind='outcome') has low='0', and a finite number is expected."),
        ({"high": True}, "Part(solved, kind='outcome') has high=True, and a finite number is expected."),
        (
            {"closed": -1.0},
            "Part(solved, kind='outcome') has closed=-1, and only a gate closes. Add kind='safety' or "
            "kind='format', or leave closed= out.",
        ),
        (
            {"kind": "safety", "on_error": "leave_out"},
            "Part(solved, kind='safety') has on_error='leave_out'. A gate that is left out when it fails lets "
            "everything through. Leave on_error= out: the rollout is an environment failure then, and is not trained.",
        ),
        (
            {"kind": "format", "weight": 0.5},
            "Part(solved, kind='format') has weight=0.5. A gate adds nothing to the score: say what a closed one "
            "gives, closed=…, and leave the weight out.",
        ),
        (
            {"kind": "format", "high": 1.0},
            "Part(solved, kind='format') has bounds. A gate is open at a score of 1 and closed below it: leave "
            "low= and high= out.",
        ),
    ],
)
def test_what_can_not_be_is_refused_where_it_is_written(settings: dict[str, Any], message: str) -> None:
    """One error each, with what to write."""
    with pytest.raises(ConfigError) as caught:
        Part(solved, **settings)
    assert str(caught.value) == message


def test_what_can_not_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Part\(…\) got 'solved', which can't be called\."):
        Part("solved")  # type: ignore[arg-type]


def test_a_name_that_is_kept_is_refused() -> None:
    """It would decide success."""
    with pytest.raises(ConfigError, match=r"'solved\.success' of @trainable .* Call it 'solved', or by another name\."):
        part_of("solved.success", (solved, 0.0))
