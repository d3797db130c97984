"""LangChain messages, tools and call settings become the plain data of a ModelCall; a Reply becomes an AIMessage.

Invariant: what a Reply becomes reads back as the same plain message, streamed or not. Nothing given is mutated.
Knows nothing of rollouts, roles or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolCallChunk,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from agenttrain.errors import GraphError
from agenttrain.records import InvalidCall, Reply

Plain = dict[str, Any]
BlockText = Callable[[Mapping[str, Any], str], str]
"""(a content block that holds no text, role) -> the text to put in its place."""

_SILENT_BLOCKS = frozenset(
    {
        "tool_use",
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "function_call",
        "input_json_delta",
        "thinking",
        "redacted_thinking",
        "reasoning",
        "reasoning_content",
    }
)
"""Blocks of an assistant's content that are said elsewhere in the message, or were not said to the user."""
_MAX_TEXT_CHUNKS = 16
_NEUTRAL: Mapping[str, float] = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": 0}
"""Sampling settings that the policy doesn't follow, and the value that changes nothing; top_k has none."""
_MAX_TOKEN_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample")


def plain_messages(messages: Sequence[BaseMessage]) -> tuple[Plain, ...]:
    """Messages in OpenAI's chat format, content as text.

    Raises:
        GraphError: an image, sound or file, or a kind of message that no chat template knows.
    """
    return tuple(_plain_message(message, refuse_block) for message in messages)


def described_messages(messages: Sequence[BaseMessage]) -> tuple[Plain, ...]:
    """The same for a call that the policy doesn't answer: an image reads "[image]", and nothing is refused."""
    return tuple(_plain_message(message, name_block) for message in messages)


def refuse_block(block: Mapping[str, Any], role: str) -> str:
    raise GraphError(
        f"A {role} message holds a content block of type {block.get('type')!r}, and the policy reads text only. "
        "Send its text instead, or give this call to your own model with auxiliary=[…]."
    )


def name_block(block: Mapping[str, Any], _role: str) -> str:
    return f"[{block.get('type', 'block')}]"


def content_text(content: str | Sequence[str | Mapping[str, Any]], role: str, other: BlockText) -> str:
    """The text of a message's content, its blocks joined as LangChain's own `message.text` does."""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, role, other) for block in content)


def _block_text(block: str | Mapping[str, Any], role: str, other: BlockText) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in ("text", "input_text", "output_text"):
        return str(block.get("text") or "")
    if kind in _SILENT_BLOCKS:
        return ""
    if kind == "refusal":
        return str(block.get("refusal") or "")
    if kind == "json":
        return json.dumps(block.get("json"), ensure_ascii=False)
    return other(block, role)


def _plain_message(message: BaseMessage, other: BlockText) -> Plain:
    if isinstance(message, AIMessage):
        return _plain_assistant(message, other)
    if isinstance(message, ToolMessage):
        plain: Plain = {
            "role": "tool",
            "content": content_text(message.content, "tool", other),
            "tool_call_id": message.tool_call_id,
        }
    else:
        role = _role(message)
        plain = {"role": role, "content": content_text(message.content, role, other)}
    if message.name:
        plain["name"] = message.name
    return plain


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, FunctionMessage):
        return "function"
    if isinstance(message, ChatMessage):
        return message.role
    raise GraphError(
        f"A model call holds a {type(message).__name__}, and the policy reads system, user, assistant, tool, function "
        "and chat messages. Leave it out of the messages, or give this call to your own model with auxiliary=[…]."
    )


def _plain_assistant(message: AIMessage, other: BlockText) -> Plain:
    plain: Plain = {"role": "assistant", "content": content_text(message.content, "assistant", other)}
    calls = [_plain_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    calls += [_plain_broken_call(call) for call in message.invalid_tool_calls]
    if calls:
        plain["tool_calls"] = calls
    if message.name:
        plain["name"] = message.name
    return plain


def _plain_call(call_id: str | None, name: str, arguments: Any) -> Plain:
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _plain_broken_call(call: InvalidToolCall) -> Plain:
    return _plain_call(call["id"], call["name"] or "", _unquoted(call["args"] or ""))


def plain_tools(tools: Sequence[Any]) -> tuple[Plain, ...]:
    """Tools of any provider in OpenAI's function format.

    Raises:
        GraphError: a tool that runs on the provider's server, or one with no name and schema.
    """
    return tuple(_plain_tool(tool) for tool in tools)


def described_tools(tools: Sequence[Any]) -> tuple[Plain, ...]:
    """The same for a call that the policy doesn't answer. Empty where one can't be read so: not all are known then."""
    try:
        return plain_tools(tools)
    except GraphError:
        return ()


def _plain_tool(tool: Any) -> Plain:
    if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    if isinstance(tool, Mapping) and tool.get("type") == "custom":
        raise GraphError(_free_text_tool_text(tool))
    if _is_server_tool(tool):
        raise GraphError(_server_tool_text(tool))
    try:
        plain = dict(convert_to_openai_tool(tool))
    except Exception as error:
        raise GraphError(
            f"The tool {_tool_name(tool)!r} can't be read as a function with a name and a schema: {error}. "
            "Bind a function, a @tool or a pydantic class instead."
        ) from error
    if plain.get("type") != "function" or "function" not in plain:
        raise GraphError(_free_text_tool_text(tool) if plain.get("type") == "custom" else _server_tool_text(tool))
    return plain


def _is_server_tool(tool: Any) -> bool:
    """A dict with a type of its own and no schema, such as {"type": "web_search_20250305", "name": "web_search"}."""
    if not isinstance(tool, Mapping) or tool.get("type") in (None, "function", "object"):
        return False
    return not any(key in tool for key in ("function", "input_schema", "parameters", "toolSpec", "properties"))


def _server_tool_text(tool: Any) -> str:
    return (
        f"The tool {_tool_name(tool)!r} runs on the provider's server, and the policy only calls functions of yours. "
        "Bind a @tool that does the same, or give this call to your own model with auxiliary=[…]."
    )


def _free_text_tool_text(tool: Any) -> str:
    return (
        f"The tool {_tool_name(tool)!r} takes free text (type 'custom'), and the policy calls tools by a JSON object. "
        "Bind a @tool with one text argument, or give this call to your own model with auxiliary=[…]."
    )


def _tool_name(tool: Any) -> str:
    if isinstance(tool, Mapping):
        return str(tool.get("name") or tool.get("type") or sorted(tool))
    return str(getattr(tool, "name", None) or getattr(tool, "__name__", type(tool).__name__))


def plain_tool_choice(choice: Any) -> Any:
    """None, "auto", "none", "required" or {"type": "function", "function": {"name"}}, from any provider's form.

    Raises:
        GraphError: a form that no provider known here uses.

    Example: {"type": "any"} -> "required"; "add" -> {"type": "function", "function": {"name": "add"}}
    """
    if choice is None or choice is False:
        return None
    if choice is True:
        return "required"
    if isinstance(choice, str):
        return _choice_word(choice) or _named_choice(choice)
    if isinstance(choice, Mapping):
        name = choice.get("name") or (choice.get("function") or choice.get("tool") or {}).get("name")
        if name:
            return _named_choice(str(name))
        word = _choice_word(str(choice.get("type") or next(iter(choice), "")))
        if word:
            return word
    raise GraphError(
        f"tool_choice={choice!r} can't be read. Write 'auto', 'none', 'required', the name of a tool, or "
        "{'type': 'function', 'function': {'name': …}}."
    )


def _choice_word(word: str) -> str | None:
    return {"auto": "auto", "none": "none", "any": "required", "required": "required"}.get(word)


def _named_choice(name: str) -> Plain:
    return {"type": "function", "function": {"name": name}}


def plain_response_format(settings: Mapping[str, Any]) -> Plain | None:
    """What a call's settings say on the form of the answer, in OpenAI's format. None: any text."""
    found = settings.get("response_format")
    if found is None:
        found = (settings.get("output_config") or {}).get("format") or settings.get("output_format")
    if found is None or (isinstance(found, Mapping) and found.get("type") == "text"):
        return None
    if not isinstance(found, Mapping):
        function = convert_to_openai_tool(found)["function"]
        return _json_schema(function["name"], function["parameters"])
    if found.get("type") == "json_schema" and "json_schema" not in found:
        return _json_schema(str(found.get("name") or found.get("schema", {}).get("title", "answer")), found["schema"])
    return dict(found)


def _json_schema(name: str, schema: Any) -> Plain:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def own_max_tokens(model: object, settings: Mapping[str, Any]) -> int | None:
    """The user's cap on one call: from the call, else from the model. None: none was set."""
    fields = type(model).model_fields if isinstance(model, BaseModel) else {}
    held = {name: getattr(model, name) for name in _MAX_TOKEN_NAMES if name in fields}
    for source in (settings, held):
        for name in _MAX_TOKEN_NAMES:
            value = source.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def max_tokens_name(model: object) -> str:
    """By which a chat model takes a cap on one call. Example: of ChatGoogleGenerativeAI "max_output_tokens"."""
    fields = type(model).model_fields if isinstance(model, BaseModel) else {}
    return next((name for name in _MAX_TOKEN_NAMES if name in fields), _MAX_TOKEN_NAMES[0])


def own_temperature(model: object, settings: Mapping[str, Any]) -> float | None:
    """The user's temperature: of the call, else of the model. None: none was set."""
    value = settings.get("temperature", getattr(model, "temperature", None))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def unsupported_sampling(model: object, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What the user set that changes which token is drawn, and that the policy doesn't follow.

    Example: ChatOpenAI(top_p=0.9) -> ("top_p=0.9",)
    """
    values = {name: settings.get(name, getattr(model, name, None)) for name in (*_NEUTRAL, "top_k")}
    return tuple(f"{name}={value}" for name, value in values.items() if value and value != _NEUTRAL.get(name))


def own_stop(model: object, stop: Sequence[str] | str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The user's stop strings: from the call, else from the model."""
    found = (
        stop
        or settings.get("stop")
        or settings.get("stop_sequences")
        or getattr(model, "stop", None)
        or getattr(model, "stop_sequences", None)
        or ()
    )
    return (found,) if isinstance(found, str) else tuple(found)


def assistant_message(reply: Reply, *, parsed: bool = False) -> AIMessage:
    """What the graph gets for one call.

    Args:
        parsed: also put the text, read as JSON, where ChatOpenAI's structured output looks for it.
    """
    return AIMessage(
        content=reply.text,
        id=reply.call_id or None,
        tool_calls=[ToolCall(name=c.name, args=dict(c.arguments), id=c.id, type="tool_call") for c in reply.tool_calls],
        invalid_tool_calls=invalid_tool_calls(reply),
        additional_kwargs=_additional(reply, parsed),
        response_metadata=_metadata(reply),
        usage_metadata=_usage(reply),
    )


def invalid_tool_calls(reply: Reply) -> list[InvalidToolCall]:
    """The unreadable calls of a reply in LangChain's form."""
    return [
        InvalidToolCall(type="invalid_tool_call", id=c.id, name=c.name, args=c.arguments, error=c.error)
        for c in reply.invalid_tool_calls
    ]


def message_chunks(reply: Reply, *, parsed: bool = False) -> Iterator[AIMessageChunk]:
    """The same answer in pieces: text, then tool calls, then what is known at the end. Their sum is the message.

    LangChain repairs broken JSON when it adds chunks up, which would turn an unreadable call into a readable one.
    The arguments of such a call are therefore sent as a JSON string, which is no object, so that it stays unreadable;
    `plain_messages` takes the quotes off again.
    """
    message_id = reply.call_id or None
    additional = _additional(reply, parsed)
    for text in _text_pieces(reply.text):
        yield AIMessageChunk(content=text, id=message_id, additional_kwargs=additional)
        additional = {}
    if reply.tool_calls or reply.invalid_tool_calls or additional:
        yield AIMessageChunk(
            content="", id=message_id, tool_call_chunks=_call_chunks(reply), additional_kwargs=additional
        )
    yield AIMessageChunk(
        content="",
        id=message_id,
        response_metadata=_metadata(reply),
        usage_metadata=_usage(reply),
        chunk_position="last",
    )


def _call_chunks(reply: Reply) -> list[ToolCallChunk]:
    calls = [(c.id, c.name, json.dumps(dict(c.arguments), ensure_ascii=False)) for c in reply.tool_calls]
    broken = [(c.id, c.name, _quoted(c)) for c in reply.invalid_tool_calls]
    return [
        ToolCallChunk(type="tool_call_chunk", id=call_id, name=name, args=args, index=index)
        for index, (call_id, name, args) in enumerate([*calls, *broken])
    ]


def _quoted(call: InvalidCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _unquoted(arguments: str) -> str:
    if not arguments.startswith('"'):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, str) else arguments


def _text_pieces(text: str) -> list[str]:
    words = re.findall(r"\s*\S+\s*|\s+", text)
    width = max(1, -(-len(words) // _MAX_TEXT_CHUNKS))
    return ["".join(words[i : i + width]) for i in range(0, len(words), width)]


def _additional(reply: Reply, parsed: bool) -> Plain:
    additional: Plain = {}
    if reply.reasoning is not None:
        additional["reasoning_content"] = reply.reasoning
    if parsed and (value := json_object(reply.text)) is not None:
        additional["parsed"] = value
    return additional


def json_object(text: str) -> Plain | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a policy may open more brackets than Python reads
        return None
    return value if isinstance(value, dict) else None


def finish_reason(reply: Reply) -> str:
    """Why the reply ended, in OpenAI's words."""
    if reply.stop_reason != "stop":
        return "length" if reply.stop_reason == "length" else "abort"
    return "tool_calls" if reply.tool_calls else "stop"


def _metadata(reply: Reply) -> Plain:
    return {"finish_reason": finish_reason(reply), "model_name": reply.model, "model_provider": "agenttrain"}


def _usage(reply: Reply) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=reply.n_prompt_ids,
        output_tokens=reply.n_response_ids,
        total_tokens=reply.n_prompt_ids + reply.n_response_ids,
        input_token_details=InputTokenDetails(cache_read=reply.n_cached_ids),
    )
