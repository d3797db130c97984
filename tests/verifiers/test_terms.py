"""verifiers/terms.py: what a rollout used becomes a number."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.errors import ConfigError
from agenttrain.part import Part
from agenttrain.records import Role, Task, TurnView
from agenttrain.reward.score import score
from agenttrain.verifiers import invalid_tool_calls, seconds_used, tokens_used, turns_used


def turn(index: int, role: Role = "trained", **values: Any) -> TurnView:
    return TurnView(index=index, node=None, role=role, text="", n_tool_calls=0, stop_reason="stop", **values)


TURNS = (
    turn(0, n_tokens=10, n_invalid_tool_calls=1, started_at=100.0, ended_at=101.0),
    turn(1, "frozen", n_tokens=5, n_invalid_tool_calls=2, started_at=101.0, ended_at=103.0),
    turn(2, "auxiliary", n_tokens=0, n_invalid_tool_calls=9, started_at=103.0, ended_at=200.0),
    turn(3, n_tokens=15, started_at=103.0, ended_at=106.0),
)


@pytest.mark.parametrize(
    ("term", "value", "comment"),
    [
        (turns_used(limit=4), 0.75, "3 turns of 4"),
        (tokens_used(limit=20), 1.5, "30 tokens of 20"),
        (invalid_tool_calls(), 3.0, "3 invalid tool calls of 1"),
        (seconds_used(limit=12), 0.5, "6 seconds of 12"),
    ],
)
def test_a_term_is_what_was_used_over_its_limit(term: Any, value: float, comment: str) -> None:
    """Of the policy's calls, trained and frozen; the user's own models' don't count."""
    task = Task(id="t", input={})
    (part,) = score({"v": Part(term)}, task=task, state={}, timeout_s=5.0, views=lambda: TURNS).parts
    assert (part.score, part.comment) == (value, comment)


def test_where_the_policy_made_no_turn_the_users_own_models_count() -> None:
    """As under `eval --run as-is`, where every turn is auxiliary."""
    own = [turn(0, "auxiliary"), turn(1, "auxiliary", n_invalid_tool_calls=1)]
    assert turns_used(limit=4)(own) == {"score": 0.5, "comment": "2 turns of 4"}
    assert invalid_tool_calls(limit=2)(own)["score"] == 0.5


def test_without_a_turn_nothing_was_used() -> None:
    for term in (turns_used(limit=4), tokens_used(limit=4), invalid_tool_calls(), seconds_used(limit=4)):
        assert term([])["score"] == 0.0


def test_a_term_goes_by_its_name() -> None:
    assert [term(limit=1).__name__ for term in (turns_used, tokens_used, invalid_tool_calls, seconds_used)] == [
        "turns_used",
        "tokens_used",
        "invalid_tool_calls",
        "seconds_used",
    ]


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), True, "8"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"turns_used got limit=.* a finite number above 0 is expected\."):
        turns_used(limit=limit)
