"""A renderer becomes admitted or refused: conversations on which a longer prompt must begin with a shorter one's ids.

What is compared are ids alone: the prompt before an assistant message, that message as the renderer writes it, the
bridge over the messages after it, and the whole rendered anew. A fault is a sentence that names the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agenttrain.protocols import Renderer
from agenttrain.records import Ids

AROUND: Final = 12
"""Ids shown on each side of a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation of the probe."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    optional: bool = False
    """A template may refuse its roles, or two calls in one reply; it is then left out."""


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find an order.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}},
        },
    },
)

CONVERSATIONS: Final = (
    Conversation(
        name="two questions",
        messages=(
            _says("user", "Hello."),
            _says("assistant", "Hello, what can I do?"),
            _says("user", "Nothing."),
            _says("assistant", "Good."),
            _says("user", "Good bye."),
        ),
    ),
    Conversation(
        name="a system message and two questions",
        messages=(
            _says("system", "Be brief."),
            _says("user", "Hello."),
            _says("assistant", "Yes?"),
            _says("user", "Nothing."),
        ),
        optional=True,
    ),
    Conversation(
        name="a tool call, its result and a follow-up",
        messages=(
            _says("system", "Be brief."),
            _says("user", "Where is A41?"),
            _says("assistant", "", tool_calls=[_call("call_00000001", "look_up", {"id": "A41"})]),
            _says("tool", '{"item": "lamp"}', tool_call_id="call_00000001", name="look_up"),
            _says("assistant", "It is a lamp."),
            _says("user", "And the sum of 2 and 3?"),
            _says("assistant", "I add them.", tool_calls=[_call("call_00000002", "add", {"b": 3, "a": 2})]),
            _says("tool", "5", tool_call_id="call_00000002", name="add"),
        ),
        tools=_TOOLS,
    ),
    Conversation(
        name="two tool calls in one reply",
        messages=(
            _says("system", "Be brief."),
            _says("user", "Where are A41 and B7?"),
            _says(
                "assistant",
                "",
                tool_calls=[
                    _call("call_00000003", "look_up", {"id": "A41"}),
                    _call("call_00000004", "look_up", {"id": "B7"}),
                ],
            ),
            _says("tool", "lamp", tool_call_id="call_00000003", name="look_up"),
            _says("tool", "grüße\n", tool_call_id="call_00000004", name="look_up"),
            _says("assistant", "A lamp and a greeting."),
            _says("user", "Thanks."),
        ),
        tools=_TOOLS,
        optional=True,
    ),
)


def bridge_fault(renderer: Renderer, conversations: Sequence[Conversation]) -> str | None:
    """What is wrong with a renderer's bridge. None: nothing."""
    for conversation in conversations:
        for k, message in enumerate(conversation.messages):
            if message["role"] == "assistant" and (fault := _fault_at(renderer, conversation, k)):
                return f"On {conversation.name!r} {fault}"
    return None


def suffix_fault(
    renderer: Renderer, encode: Callable[[str], Sequence[int]], conversations: Sequence[Conversation]
) -> str | None:
    """What is wrong with the bridge of a family that drops thinking from its history. None: nothing.

    Such a family never renders what was sampled anew, so only what the bridge adds is compared: it must be the end of
    the whole conversation.
    """
    for conversation in conversations:
        for k, message in enumerate(conversation.messages):
            if message["role"] == "assistant" and (fault := _suffix_fault_at(renderer, encode, conversation, k)):
                return f"On {conversation.name!r} {fault}"
    return None


def _suffix_fault_at(
    renderer: Renderer, encode: Callable[[str], Sequence[int]], conversation: Conversation, k: int
) -> str | None:
    new = _answers(conversation.messages[k + 1 :])
    if not new:
        return None
    prompt = renderer.render(conversation.messages[:k], conversation.tools)
    whole = renderer.render(conversation.messages[: k + 1 + len(new)], conversation.tools)
    thinks = renderer.decode(prompt).rstrip().endswith("<think>")
    close = next((id for id in renderer.stop_ids if id in whole), renderer.stop_ids[0])
    stored = (*prompt, *encode("</think>\n\nDone." if thinks else "Done."), close)
    bridged = renderer.extend(prompt, stored[len(prompt) :], new, conversation.tools)
    if bridged is None:
        return _unbridged(new)
    suffix = bridged[len(stored) :]
    if suffix and whole[-len(suffix) :] == suffix:
        return None
    return f"appending differs from rendering: {_difference(renderer, suffix, whole[-len(suffix) :])}"


def _unbridged(new: Sequence[Mapping[str, Any]]) -> str | None:
    """A renderer that follows its template's history may begin anew when the user speaks."""
    return None if new[-1]["role"] == "user" else "a tool's result can't be appended."


def rendering_fault(renderer: Renderer, other: Renderer, conversations: Sequence[Conversation]) -> str | None:
    """Where two renderers make different ids of one conversation. None: nowhere."""
    for conversation in conversations:
        ids = renderer.render(conversation.messages, conversation.tools)
        expected = other.render(conversation.messages, conversation.tools)
        if ids != expected:
            return f"On {conversation.name!r} the two differ: {_difference(renderer, ids, expected)}"
    return None


def _fault_at(renderer: Renderer, conversation: Conversation, k: int) -> str | None:
    """What is wrong where message k is the assistant's."""
    new = _answers(conversation.messages[k + 1 :])
    if not new:
        return None
    prompt = renderer.render(conversation.messages[:k], conversation.tools)
    whole = renderer.render(conversation.messages[: k + 1 + len(new)], conversation.tools)
    if whole[: len(prompt)] != prompt:
        return f"the prompt changes as the conversation grows: {_difference(renderer, whole, prompt)}"
    response = _until_stop(whole[len(prompt) :], renderer.stop_ids)
    bridged = renderer.extend(prompt, response, new, conversation.tools)
    if bridged is None:
        return _unbridged(new)
    return None if bridged == whole else f"appending differs from rendering: {_difference(renderer, bridged, whole)}"


def _answers(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The messages before the next assistant's."""
    end = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return tuple(messages[:end])


def _until_stop(ids: Ids, stop_ids: Ids) -> Ids:
    end = next((i for i, id in enumerate(ids) if id in stop_ids), len(ids))
    return ids[: end + 1]


def _difference(renderer: Renderer, seen: Ids, expected: Ids) -> str:
    n = min(len(seen), len(expected))
    at = next((i for i in range(n) if seen[i] != expected[i]), n)
    before = max(0, at - 4)
    shown, wanted = renderer.decode(seen[before : at + AROUND]), renderer.decode(expected[before : at + AROUND])
    return f"at id {at} it has {shown!r} instead of {wanted!r}."
