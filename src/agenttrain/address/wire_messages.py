"""Messages and tools as OpenAI's clients send them become those of a ModelCall.

Invariant: what a client sends back of a completion is the message that the policy's answer left behind, so that the
next prompt begins with the ids that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agenttrain.address.refusal import Refusal

Message = dict[str, Any]
_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""A request's role to the policy's: templates know no developer."""
_PARTS: Final[Mapping[str, str]] = {"text": "text", "refusal": "refusal"}
"""Type of a content part to where its text stands."""


def read_messages(given: Any) -> tuple[Message, ...]:
    """The messages of a call, a tool's name put back where the client leaves it out.

    Raises:
        Refusal: no list of messages, or one that holds more than text.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise Refusal("messages is no list of at least one message. Give the policy a question.", param="messages")
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(given)]
    names: dict[str, str] = {}
    for message in messages:
        names.update({call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())})
        if message["role"] == "tool" and names.get(message["tool_call_id"]):
            message.setdefault("name", names[message["tool_call_id"]])
    return tuple(messages)


def _message(given: Any, where: str) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise Refusal(f"{where}.role is {role!r}; it takes {', '.join(_ROLES)}.", param=where)
    if given.get("function_call") or given.get("audio"):
        raise Refusal(f"{where} holds a function_call or audio. Send tool_calls and text.", param=where)
    message: Message = {"role": _ROLES[role], "content": _text(given.get("content"), f"{where}.content")}
    if role == "tool":
        message["tool_call_id"] = _said(given.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant" and given.get("tool_calls"):
        calls = _listed(given["tool_calls"], f"{where}.tool_calls")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if given.get("name"):
        message["name"] = _said(given["name"], f"{where}.name")
    return message


def _text(content: Any, where: str) -> str:
    """Of a text, of parts of text, or of nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(_listed(content, where)))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(kind, str) or kind not in _PARTS:
        raise Refusal(
            f"{where} is a content part of type {kind!r}, and the policy reads text only. Send its text instead.",
            param=where,
        )
    return _said(part.get(_PARTS[kind]), f"{where}.{_PARTS[kind]}")


def _call(given: Any, where: str) -> Message:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise Refusal(f"{where} is no call of a function. Send {{id, type, function}}.", param=where)
    return {
        "id": _said(given.get("id") or "", f"{where}.id"),
        "type": "function",
        "function": {
            "name": _said(function.get("name") or "", f"{where}.function.name"),
            "arguments": _arguments(_said(function.get("arguments") or "", f"{where}.function.arguments")),
        },
    }


def _arguments(text: str) -> Any:
    """The object that a text is; the text itself where it can't be read, as the policy wrote it."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def read_tools(given: Any) -> tuple[Message, ...]:
    """Tools in OpenAI's function format.

    Raises:
        Refusal: a tool that is no function, or has no name.
    """
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(_listed(given or [], "tools")))


def _tool(tool: Any, where: str) -> Message:
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind != "function":
        raise Refusal(
            f"{where} is of type {kind!r}, and the policy calls functions of yours alone. Send a function that does "
            "the same.",
            param=where,
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise Refusal(f"{where}.function.name is {name!r}; each tool needs a name.", param=where)
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise Refusal(f"{where}.function.parameters is no JSON schema.", param=where)
    return dict(tool)


def _listed(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Refusal(f"{where} is {type(value).__name__}, and a list is needed.", param=where)
    return value


def _said(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refusal(f"{where} is {type(value).__name__}, and text is needed.", param=where)
    return value
