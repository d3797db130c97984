"""A reply as it was sampled becomes the ways in which a chat template would write it otherwise.

The reply is written into a short conversation, as the graph handed it back, and its text and ids are held against what
was sampled. Nothing is changed by that: what was sampled stays in the prompt. Where the template can't write such a
conversation, nothing is known and nothing is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

from agenttrain.protocols import Parsed
from agenttrain.records import Ids, Respelling

Message = Mapping[str, Any]
N_KEPT: Final = 2048
"""Comparisons that are kept; siblings say the same again and again."""
ASKED: Final[Message] = {"role": "user", "content": "a"}
_CLOSED = re.compile(r"\s*</think>\s*")
_EMPTY = re.compile(r"<think>\s*</think>\s*")


class Spelling:
    """How one chat template writes replies. Thread-safe."""

    def __init__(
        self,
        *,
        write: Callable[[Sequence[Message], bool], str],
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        read: Callable[[Ids], Parsed],
        stop_ids: Ids,
    ) -> None:
        """Take what writes and reads.

        Args:
            write: a conversation by the template, with or without its generation prompt.
        """
        self._write, self._encode, self._decode, self._read = write, encode, decode, read
        self._stop_ids = stop_ids
        self._of = lru_cache(maxsize=N_KEPT)(self._compared)

    def respelled(self, response_ids: Ids, message: Message, new_messages: Sequence[Message]) -> tuple[Respelling, ...]:
        """How the template would write a reply otherwise than it was sampled; empty where it writes the same.

        Args:
            message: the reply as it was handed back.
            new_messages: what follows it: a template may write a reply in another way once a user has spoken.
        """
        roles = {each["role"] for each in new_messages}
        calls = [_plain_call(call, i) for i, call in enumerate(message.get("tool_calls") or ())]
        said = json.dumps([message.get("content") or "", calls], default=str)
        return self._of(response_ids, said, "tool" in roles, "user" in roles)

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """What stands before a reply: the question, and the generation prompt."""
        question = self._write([ASKED], False)
        return question, self._write([ASKED], True)[len(question) :]

    def _compared(self, response_ids: Ids, said: str, tools_follow: bool, user_follows: bool) -> tuple[Respelling, ...]:
        content, calls = json.loads(said)
        after = _results(calls) if tools_follow else []
        after += [ASKED] if user_follows or not after else []
        reply = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        try:
            question, opener = self._opening
            whole = self._write([ASKED, reply, *after], False)
        except Exception:  # a template's own error, of any class
            return ()
        if not whole.startswith(question):
            return ()
        n = len(response_ids) - (bool(response_ids) and response_ids[-1] in self._stop_ids)
        sampled, written = opener + self._decode(response_ids[:n]), whole[len(question) :]
        if not written.startswith(sampled):
            reasoning = self._read(response_ids).reasoning
            return _differences(sampled, written, opener, reasoning, content if isinstance(content, str) else "", calls)
        ends_alike = written.startswith(self._decode(response_ids[n:]), len(sampled))
        alike = ends_alike and list(self._encode(sampled)) == [*self._encode(opener), *response_ids[:n]]
        return () if alike else ("tokens_respelled",)


def _plain_call(call: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A call with an id that is the same in every rollout, unless the model's own format carries one."""
    id, function = str(call.get("id") or "call_"), call.get("function", call)
    named = {"name": function.get("name"), "arguments": function.get("arguments")}
    return {"id": f"call_{place:08x}" if id.startswith("call_") else id, "type": "function", "function": named}


def _results(calls: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [
        {"role": "tool", "content": "b", "tool_call_id": call["id"], "name": call["function"]["name"]} for call in calls
    ]


def _differences(
    sampled: str, written: str, opener: str, reasoning: str | None, content: str, calls: Sequence[Any]
) -> tuple[Respelling, ...]:
    """What of a reply is written otherwise, given that something is."""
    causes: list[Respelling] = []
    if reasoning and reasoning.strip() not in written:
        causes.append("thinking_dropped")
        closed = _CLOSED.match(sampled, sampled.index(reasoning) + len(reasoning)) if reasoning in sampled else None
        header = opener.partition("<think>")[0]
        if closed is None or not written.startswith(header):
            return tuple(causes)
        sampled, written = sampled[closed.end() :], _EMPTY.sub("", written[len(header) :], count=1)
        if written.startswith(sampled):
            return tuple(causes)
    if not calls:
        return (*causes, "text_respelled")
    (text, made), (text_written, made_written) = _parted(sampled, content), _parted(written, content)
    if text != text_written:
        causes.append("text_respelled")
    if text == text_written or not made_written.startswith(made):
        causes.append("arguments_respelled")
    return tuple(causes)


def _parted(reply: str, content: str) -> tuple[str, str]:
    """A reply's text with the white space after it, and its calls."""
    content = content.strip()
    end = reply.index(content) + len(content) if content in reply else 0
    calls = reply[end:].lstrip()
    return reply[: len(reply) - len(calls)], calls
