"""What a chat model said becomes an OwnAnswer, and its call a turn: text, tool calls, and the tokens that it told of.

Reads LangChain's own message, whatever the provider; what a provider does not tell stays None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage

from agenttrain.graph.messages import content_text, name_block
from agenttrain.protocols import Route
from agenttrain.records import InvalidCall, ModelCall, OwnAnswer, ParsedCall, StopReason

CUT = frozenset({"length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length"})
"""How providers say that an answer was cut at its length."""


@contextmanager
def recorded(route: Route, call: ModelCall) -> Iterator[list[BaseMessage]]:
    """Record a call that another model than the policy answers in the block; what it says goes into the list."""
    turn_id = route.auxiliary_began(call)
    said: list[BaseMessage] = []
    try:
        yield said
    except GeneratorExit:
        route.auxiliary_ended(turn_id, None, own_answer(said))
        raise
    except BaseException as error:
        route.auxiliary_ended(turn_id, error, own_answer(said))
        raise
    route.auxiliary_ended(turn_id, None, own_answer(said))


def own_answer(pieces: Sequence[BaseMessage]) -> OwnAnswer | None:
    """The answer that a message, or the chunks of a stream, add up to. None: nothing was said."""
    message = _whole(pieces)
    if message is None:
        return None
    usage: Mapping[str, Any] = message.usage_metadata or {}
    return OwnAnswer(
        text=content_text(message.content, "assistant", name_block),
        tool_calls=tuple(
            ParsedCall(id=call["id"] or "", name=call["name"], arguments=call["args"]) for call in message.tool_calls
        ),
        invalid_tool_calls=tuple(
            InvalidCall(
                id=call["id"] or "",
                name=call["name"],
                arguments=call["args"] or "",
                error=call["error"] or "unreadable",
            )
            for call in message.invalid_tool_calls
        ),
        n_prompt_tokens=usage.get("input_tokens"),
        n_response_tokens=usage.get("output_tokens"),
        stop_reason=_stop_reason(message),
    )


def _whole(pieces: Sequence[BaseMessage]) -> AIMessage | None:
    chunks = [piece for piece in pieces if isinstance(piece, AIMessageChunk)]
    if chunks:
        return reduce(add, chunks)
    return next((piece for piece in reversed(pieces) if isinstance(piece, AIMessage)), None)


def _stop_reason(message: AIMessage) -> StopReason:
    told = message.response_metadata
    incomplete = told.get("incomplete_details") or {}  # of OpenAI's responses
    reasons = {told.get("finish_reason"), told.get("stop_reason"), told.get("done_reason"), incomplete.get("reason")}
    return "length" if reasons & CUT else "stop"
