"""A reply that is one JSON object becomes a tool call, for templates that mark calls by nothing else.

Llama 3 writes `{"name": …, "parameters": {…}}` as the whole reply. Without ids that mark a call, only a whole reply can
be one: an object in the middle of a text stays text, and so does one without a name and arguments, which an agent may
have asked for as its answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agenttrain.protocols import Parsed
from agenttrain.records import InvalidCall, ParsedCall

Message = Mapping[str, Any]
PROBE: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Find.", "parameters": {"type": "object", "properties": {}}},
}
_CALL: Final[Message] = {"id": "call_00000000", "type": "function", "function": {"name": "look_up", "arguments": {}}}
_ARGUMENTS: Final = ("parameters", "arguments")
_BEGINS = re.compile(r'\{\s*"name"\s*:')


def writes_json_calls(write: Callable[[Sequence[Message], bool], str]) -> bool:
    """Whether a template writes a tool call as one JSON object that is the whole reply.

    Args:
        write: a conversation with the tool `PROBE`, with or without the generation prompt.
    """
    asked: Message = {"role": "user", "content": "a"}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    heard: Message = {"role": "tool", "content": "b", "tool_call_id": _CALL["id"], "name": "look_up"}
    try:
        opening, whole = write([asked], True), write([asked, said, heard], False)
        body, _ = json.JSONDecoder().raw_decode(whole, len(opening))
    except Exception:  # a template's own error, of any class, or no JSON
        return False
    return whole.startswith(opening) and _named(body) is not None


def with_json_call(parsed: Parsed, *, id: str) -> Parsed:
    """The reply with the call that its text is; the same reply where its text is none."""
    text = parsed.text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return parsed
    try:
        named = _named(json.loads(text))
    except (ValueError, RecursionError) as error:
        if not _BEGINS.match(text):
            return parsed
        invalid = InvalidCall(id=id, name=None, arguments=text, error=f"The tool call is no JSON: {error}.")
        return replace(parsed, text="", invalid_tool_calls=(invalid,))
    if named is None:
        return parsed
    name, arguments = named
    return replace(parsed, text="", tool_calls=(ParsedCall(id=id, name=name, arguments=arguments),))


def _named(body: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call. None: the object is no call."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return None
    arguments = next((body[key] for key in _ARGUMENTS if key in body), None)
    return (body["name"], arguments) if isinstance(arguments, dict) else None
