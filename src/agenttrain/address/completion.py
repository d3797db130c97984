"""A Reply becomes a chat completion, whole or in the pieces of a stream. The pieces' sum is the whole.

A call that can't be read stands among the tool calls with its text, unchanged, as its arguments, which is how OpenAI's
clients know calls that are no JSON. One whose text is JSON all the same, such as `[1]` or an object without a name,
stands in the content, unchanged too: a client would run it as a call that nobody made, or break on it (ChatOpenAI
raises on arguments that are no object, langchain-openai 1.7).
Source: OpenAI's API reference, "The chat completion object" and "The chat completion chunk object".
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from agenttrain.records import InvalidCall, ParsedCall, Reply

Plain = dict[str, Any]
_MOST_PIECES: Final = 16
"""Of an answer's text."""


def completion(reply: Reply) -> Plain:
    """The whole answer."""
    choice = {"index": 0, "message": _message(reply), "logprobs": None, "finish_reason": finish_reason(reply)}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chunks(reply: Reply, *, include_usage: bool) -> Iterator[Plain]:
    """The same answer in pieces: text, tool calls, why it ended, and at the end the usage where it is asked for."""
    head = _head(reply, "chat.completion.chunk") | ({"usage": None} if include_usage else {})
    for delta in _deltas(reply):
        yield {**head, "choices": [_piece(delta, None)]}
    yield {**head, "choices": [_piece({}, finish_reason(reply))]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(reply)}


def events(pieces: Iterator[Plain]) -> Iterator[bytes]:
    """Pieces as server-sent events, with OpenAI's mark at the end."""
    for piece in pieces:
        yield b"data: " + as_json(piece) + b"\n\n"
    yield b"data: [DONE]\n\n"


def as_json(value: Plain) -> bytes:
    """In ASCII, so that half a surrogate pair that a policy wrote does not fail."""
    return json.dumps(value, separators=(",", ":")).encode()


def finish_reason(reply: Reply) -> str:
    """stop, length or tool_calls. A cut answer is cut even where a call was read from it."""
    if reply.stop_reason == "length":
        return "length"
    return "tool_calls" if _calls(reply) else "stop"


def usage(reply: Reply) -> Plain:
    """Tokens of prompt and answer, and how many of the prompt's were in the KV cache."""
    return {
        "prompt_tokens": reply.n_prompt_ids,
        "completion_tokens": reply.n_response_ids,
        "total_tokens": reply.n_prompt_ids + reply.n_response_ids,
        "prompt_tokens_details": {"cached_tokens": reply.n_cached_ids},
    }


def _head(reply: Reply, kind: str) -> Plain:
    return {"id": f"chatcmpl-{reply.call_id}", "object": kind, "created": int(time.time()), "model": reply.model}


def _message(reply: Reply) -> Plain:
    calls, text = _calls(reply), _text(reply)
    message: Plain = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _text(reply: Reply) -> str:
    mistakable = [call.arguments for call in reply.invalid_tool_calls if _reads_as_call(call.arguments)]
    return "\n".join(filter(None, (reply.text, *mistakable)))


def _calls(reply: Reply) -> list[Plain]:
    unreadable = [call for call in reply.invalid_tool_calls if not _reads_as_call(call.arguments)]
    made: Sequence[ParsedCall | InvalidCall] = (*reply.tool_calls, *unreadable)
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name or "", "arguments": _arguments(call)}}
        for call in made
    ]


def _reads_as_call(arguments: str) -> bool:
    """Whether a client takes the text of an unreadable call for arguments: JSON, or nothing at all."""
    try:
        json.loads(arguments or "{}")
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _arguments(call: ParsedCall | InvalidCall) -> str:
    if isinstance(call, InvalidCall):
        return call.arguments
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _deltas(reply: Reply) -> Iterator[Plain]:
    calls, text = _calls(reply), _text(reply)
    yield {"role": "assistant", "content": None if calls and not text else ""}
    if reply.reasoning is not None:
        yield {"reasoning_content": reply.reasoning}
    for piece in _text_pieces(text):
        yield {"content": piece}
    for index, call in enumerate(calls):
        yield {"tool_calls": [{"index": index, **call}]}


def _piece(delta: Plain, reason: str | None) -> Plain:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _text_pieces(text: str) -> list[str]:
    words = re.findall(r"\s*\S+\s*|\s+", text)
    width = max(1, -(-len(words) // _MOST_PIECES))
    return ["".join(words[i : i + width]) for i in range(0, len(words), width)]
