"""What another model answered, as its turn tells it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.capture.auxiliary import MOST_SAID, answered_turn, said
from agenttrain.errors import CaptureError
from agenttrain.records import CallSite, InvalidCall, OwnAnswer, ParsedCall, Turn

BEGAN: dict[str, Any] = {"id": "r#0", "rollout_id": "r", "index": 0, "role_reason": "", "site": CallSite()}
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
ANSWER = OwnAnswer(
    text="Let me see.",
    tool_calls=(
        ParsedCall(id="1", name="price", arguments={"item": "pen"}),
        ParsedCall(id="2", name="price", arguments={}),
    ),
    invalid_tool_calls=(InvalidCall(id="3", name="price", arguments="{", error="no JSON"),),
    n_prompt_tokens=11,
    n_response_tokens=3,
    stop_reason="length",
)


def began(stands_for: Any = "trained") -> Turn:
    return Turn(**BEGAN, role="auxiliary", stands_for=stands_for)


def test_an_answer_in_the_policys_place() -> None:
    """A call that can't be read and one that doesn't fit its tool are invalid; what was said is kept."""
    turn = answered_turn(began(), None, ANSWER, [PRICE])
    assert (turn.n_tool_calls, turn.n_invalid_tool_calls, turn.parse_failed, turn.stop_reason) == (3, 2, True, "length")
    assert (turn.n_prompt_tokens, turn.n_response_tokens) == (11, 3)
    assert turn.said == (
        'Let me see.\n{"name": "price", "arguments": {"item": "pen"}}\n'
        '{"name": "price", "arguments": {}}\n{"name": "price", "arguments": "{"}'
    )


def test_of_other_auxiliary_calls_nothing_said_is_kept() -> None:
    turn = answered_turn(began(None), None, ANSWER, [PRICE])
    assert (turn.said, turn.n_response_tokens, turn.n_tool_calls) == ("", 3, 3)


def test_where_no_tool_is_known_every_call_fits() -> None:
    assert answered_turn(began(), None, ANSWER, []).n_invalid_tool_calls == 1


def test_a_call_that_failed_is_aborted() -> None:
    assert answered_turn(began(), OSError("gone"), None, []).stop_reason == "aborted"
    assert answered_turn(began(), OSError("gone"), OwnAnswer(text="it"), []).stop_reason == "aborted"
    left = answered_turn(began(), None, None, [])
    assert (left.stop_reason, left.n_response_tokens) == ("stop", None)


@given(st.text(), st.lists(st.dictionaries(st.text(), st.text() | st.integers())))
def test_what_is_kept_is_short(text: str, arguments: list[dict[str, Any]]) -> None:
    calls = tuple(ParsedCall(id="1", name="price", arguments=each) for each in arguments)
    assert len(said(OwnAnswer(text=text * 50, tool_calls=calls))) <= MOST_SAID


@pytest.mark.parametrize("told", [{"stands_for": "trained"}, {"n_prompt_tokens": 1}, {"n_response_tokens": 0}])
def test_only_an_auxiliary_turn_is_told_of_by_its_model(told: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="Turn r#0 is trained, and only an auxiliary one is told of by its model"):
        Turn(**BEGAN, role="trained", **told)
