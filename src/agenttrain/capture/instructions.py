"""What a call asks of the form of its answer becomes a sentence of its prompt, and an answer is held against it.

Chat templates have no place for `tool_choice` and `response_format`; a provider's server decodes under constraints, and
a policy is told in words. The sentence stands at the end of the first system message, where it is the same in every
turn of a conversation, so that prefixes keep extending; where the template knows no system message it stands before the
first question. Invariant: a call that asks for nothing has the prompt it would have without this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from agenttrain.capture.tool_calls import fits_schema
from agenttrain.protocols import Parsed, Renderer
from agenttrain.records import ModelCall

Message = Mapping[str, Any]
Missed = Literal["", "tool_choice", "response_format"]


def instruction_of(call: ModelCall) -> str:
    """The sentences for what a call asks of its answer; empty when it asks for nothing.

    Example: tool_choice="required" -> "Call one of the tools."
    """
    return " ".join(filter(None, (_tool_sentence(call.tool_choice), _format_sentence(call))))


def told(renderer: Renderer, call: ModelCall) -> tuple[Message, ...]:
    """The messages of a call with its instruction where the template of the renderer has a place for it."""
    instruction = instruction_of(call)
    if not instruction:
        return call.messages
    first, *rest = call.messages
    if first["role"] == "system":
        return ({**first, "content": _joined(first["content"], instruction)}, *rest)
    if _takes_system(cast(Any, renderer)):
        return ({"role": "system", "content": instruction}, *call.messages)
    return _before_first_question(call.messages, instruction)


def missed(call: ModelCall, parsed: Parsed) -> Missed:
    """What a call asked for and the answer lacks; empty when it lacks nothing."""
    if not _is_chosen(call.tool_choice, parsed):
        return "tool_choice"
    if call.response_format and not parsed.tool_calls and not _is_in_form(call.response_format, parsed.text):
        return "response_format"
    return ""


def _tool_sentence(choice: Any) -> str:
    if choice in (None, "auto", "none"):
        return ""
    name = _chosen_name(choice)
    return f"Call the tool {name}." if name else "Call one of the tools."


def _format_sentence(call: ModelCall) -> str:
    asked = call.response_format
    if not asked:
        return ""
    opening = "Unless you call a tool, answer" if call.tools else "Answer"
    schema = _schema(asked)
    if schema is None:
        return f"{opening} with one JSON object and nothing else."
    text = json.dumps(schema, ensure_ascii=False)
    return f"{opening} with one JSON object of this schema and nothing else:\n{text}"


def _schema(asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema that was asked for. None: any object will do."""
    found = asked.get("json_schema")
    schema = found.get("schema") if isinstance(found, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def _chosen_name(choice: Any) -> str | None:
    return choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None


def _is_chosen(choice: Any, parsed: Parsed) -> bool:
    """Whether an answer holds the call that was asked for; True when none was."""
    if choice in (None, "auto", "none"):
        return True
    names, wanted = {call.name for call in parsed.tool_calls}, _chosen_name(choice)
    return wanted in names if wanted else bool(names)


def _is_in_form(asked: Mapping[str, Any], text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a policy may open more brackets than Python reads
        return False
    return isinstance(value, dict) and fits_schema(value, _schema(asked) or {})


def _joined(content: str, instruction: str) -> str:
    return f"{content}\n\n{instruction}" if content else instruction


def _before_first_question(messages: Sequence[Message], instruction: str) -> tuple[Message, ...]:
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return tuple(messages)
    question = {**messages[at], "content": f"{instruction}\n\n{messages[at]['content']}"}
    return (*messages[:at], question, *messages[at + 1 :])


@lru_cache(maxsize=16)
def _takes_system(renderer: Any) -> bool:
    """Whether the template knows a system message; some refuse it, some leave it out."""
    question = {"role": "user", "content": "a"}
    try:
        with_one = renderer.render([{"role": "system", "content": "Be brief."}, question], ())
        return bool(with_one != renderer.render([question], ()))
    except Exception:  # a template's own error, of any class
        return False
