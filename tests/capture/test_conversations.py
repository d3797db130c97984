"""A conversation that goes on is known by what its last answer left behind."""

from __future__ import annotations

from typing import Any

from agenttrain.capture.conversations import hashed, left_behind
from agenttrain.graph.messages import assistant_message, plain_messages
from agenttrain.records import InvalidCall, ModelCall, Reply

ASK: Any = {"role": "user", "content": "How many lamps?"}


def test_an_unreadable_call_without_a_name_is_known_when_the_graph_hands_it_back() -> None:
    """LangChain's message says None, and the plain one an empty name."""
    call = InvalidCall(id="call_1", name=None, arguments='{"item"', error="no JSON")
    left = left_behind(hashed(ModelCall(messages=(ASK,))), "", (), (call,))
    handed_back = plain_messages([assistant_message(Reply(call_id="a", text="", invalid_tool_calls=(call,)))])
    again = hashed(ModelCall(messages=(ASK, *handed_back, {"role": "tool", "content": "no", "tool_call_id": "call_1"})))
    assert again.known in left
