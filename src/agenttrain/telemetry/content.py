"""Messages, and what tools got and gave, become attributes of spans: only where the user asks for them.

Source: OpenTelemetry semantic conventions for generative AI, the schemas of gen_ai.input.messages and
gen_ai.output.messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.telemetry import names


def captures_content(value: str | None) -> bool:
    """True when the value of `names.CAPTURE_CONTENT_VARIABLE` asks for content on spans."""
    return (value or "").strip().lower() in ("true", "1", "span_only", "span_and_event")


def input_messages(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A conversation in OpenAI's chat format as gen_ai.input.messages."""
    return {names.INPUT_MESSAGES: as_json([_message(message) for message in messages])}


def output_message(
    *, text: str, reasoning: str | None, tool_calls: Sequence[Mapping[str, Any]], finish_reason: str
) -> dict[str, str]:
    """One reply as gen_ai.output.messages.

    Args:
        tool_calls: {id, name, arguments} each.
    """
    parts = [{"type": "reasoning", "content": reasoning}] if reasoning else []
    parts += _text(text) + [{"type": "tool_call", **call} for call in tool_calls]
    reply = {"role": "assistant", "parts": parts, "finish_reason": finish_reason}
    return {names.OUTPUT_MESSAGES: as_json([reply])}


def as_json(value: Any) -> str:
    """A value as an attribute; what JSON can't hold is kept as its text."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, text = message["role"], message.get("content") or ""
    if role == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}
        return {"role": role, "parts": [part]}
    calls = [
        {"type": "tool_call", "id": call.get("id"), **call["function"]} for call in message.get("tool_calls") or ()
    ]
    return {"role": role, "parts": _text(text) + calls}


def _text(text: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "content": text}] if text else []
