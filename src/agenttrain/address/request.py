"""The body of a request becomes a ModelCall, and how its answer is to be sent.

Nothing is ignored without a word: a parameter is followed, told in a header to have no effect, or refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agenttrain.address.parameters import ASKS_NOTHING, FOLLOWED, REFUSED, SAMPLING, WITHOUT_EFFECT
from agenttrain.address.refusal import Refusal
from agenttrain.address.wire_messages import read_messages, read_tools
from agenttrain.records import CallSite, ModelCall

_CHOICES: Final = ("auto", "none", "required")
_FORMATS: Final = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, read."""

    call: ModelCall
    stream: bool
    include_usage: bool
    """A last piece with the usage; of a stream."""
    without_effect: tuple[str, ...]
    """Parameters that were taken and are not followed, such as "top_p=0.9"."""


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        Refusal: it is none, or holds signs that are no text.
    """
    try:
        read = json.loads(body)
        if b"\\u" in body:
            json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        raise Refusal(f"The body can't be read as JSON: {error}. Send one JSON object.") from None
    if not isinstance(read, dict):
        raise Refusal(f"The body is a JSON {type(read).__name__}. Send one JSON object.")
    return read


def read_request(body: Mapping[str, Any]) -> Asked:
    """A body as a call of the policy.

    Raises:
        Refusal: what the policy can't do, or what can't be read.
    """
    _refuse(body)
    said = {name: value for name, value in body.items() if value is not None}
    tools = read_tools(said.get("tools"))
    unheard = tuple(f"{name}={said[name]}" for name, idle in WITHOUT_EFFECT.items() if said.get(name, idle) != idle)
    call = ModelCall(
        messages=read_messages(said.get("messages")),
        tools=tools,
        tool_choice=_tool_choice(said.get("tool_choice"), tools),
        response_format=_response_format(said.get("response_format")),
        max_tokens=_max_tokens(said),
        stop=_stop(said.get("stop", ())),
        parallel_tool_calls=_flag(said, "parallel_tool_calls"),
        temperature=_temperature(said.get("temperature")),
        unsupported=tuple(each for each in unheard if each.partition("=")[0] in SAMPLING),
        site=CallSite(model_class="openai", model_name=str(said.get("model", ""))),
        role_reason="it came to the address",
    )
    stream, options = bool(_flag(said, "stream")), said.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise Refusal("stream_options is no object. Send {include_usage: true}.", param="stream_options")
    usage = stream and bool(options.get("include_usage"))
    return Asked(call=call, stream=stream, include_usage=usage, without_effect=unheard)


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse what the policy can't do, and what nobody knows."""
    for name, value in body.items():
        if value is None or name in FOLLOWED or name in WITHOUT_EFFECT:
            continue
        if name not in REFUSED:
            near = difflib.get_close_matches(name, (*FOLLOWED, *WITHOUT_EFFECT), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            raise Refusal(f"{name} is no parameter of chat completions here. {hint}", param=name)
        if value != ASKS_NOTHING.get(name):
            raise Refusal(f"{name} is {_shown(value)}: {REFUSED[name]}.", param=name, code="unsupported_parameter")


def _tool_choice(choice: Any, tools: tuple[Mapping[str, Any], ...]) -> Any:
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice in _CHOICES:
        if choice == "required" and not names:
            raise Refusal("tool_choice is 'required', and there are no tools. Send tools.", param="tool_choice")
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise Refusal(
            f"tool_choice is {_shown(choice)}; it takes {', '.join(_CHOICES)} or "
            '{"type": "function", "function": {"name": …}}.',
            param="tool_choice",
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise Refusal(f"tool_choice names {name!r}, and the tools are: {known}.", param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _response_format(given: Any) -> Mapping[str, Any] | None:
    kind = given.get("type") if isinstance(given, Mapping) else given
    if given is None or kind == "text":
        return None
    if kind not in _FORMATS or not isinstance(given, Mapping):
        raise Refusal(f"response_format is {_shown(given)}; it takes {', '.join(_FORMATS)}.", param="response_format")
    if kind == "json_schema" and not isinstance(given.get("json_schema"), Mapping):
        raise Refusal("response_format has no json_schema. Send {name, schema}.", param="response_format")
    return dict(given)


def _max_tokens(said: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = said.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(f"{name} is {_shown(value)}; it takes a whole number from 1.", param=name)
        return value
    return None


def _stop(given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise Refusal(f"stop is {_shown(given)}; it takes a text or a list of texts.", param="stop")
    return tuple(texts)


def _temperature(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise Refusal(f"temperature is {_shown(value)}; it takes a number from 0.", param="temperature")
    return float(value)


def _flag(said: Mapping[str, Any], name: str) -> bool | None:
    value = said.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{name} is {_shown(value)}; it takes true or false.", param=name)
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"
