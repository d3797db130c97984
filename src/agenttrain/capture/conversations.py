"""Messages become the turn that they continue, or the reason why they continue none.

A conversation is known by a chain of hashes over its messages, one a message, so that finding its turn costs one
look-up whatever the number of turns. Arguments of tool calls are compared parsed; ids of tool calls, the reasoning of
earlier replies and white space around an assistant's text are not compared.

Frozen turns are continued like trained ones: they keep a conversation's ids exact, and the tree masks them. Where
several turns left the same conversation behind (parallel siblings, a retry), LangGraph's identity decides: the one
with the most of the checkpoint namespace in common, then one that nothing continues yet, then the latest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agenttrain.capture.instructions import instruction_of
from agenttrain.records import BreakCause, CallSite, InvalidCall, ModelCall, ParsedCall, Turn

_Place = tuple[str | None, str | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The messages of one call, hashed."""

    digests: tuple[bytes, ...]
    """[messages] of the conversation up to and with each message."""
    n_known: int
    """Messages up to and with the last assistant's; 0 when there is none."""
    tools: bytes
    """Hash of the tools."""
    instruction: bytes = b""
    """Hash of what the call asks of its answer; empty when it asks for nothing."""

    @property
    def digest(self) -> bytes:
        """Of all messages, the tools and the instruction."""
        return self.digests[-1] + self.tools + self.instruction

    @property
    def known(self) -> bytes | None:
        """Of the conversation up to the last assistant's message. None: there is none, or nothing follows it."""
        return self.digests[self.n_known - 1] if 0 < self.n_known < len(self.digests) else None


def hashed(call: ModelCall) -> Prompt:
    """The hash chain of a call's messages."""
    digests, digest, n_known = [], b"", 0
    for i, message in enumerate(call.messages):
        digest = _digest(digest, _canonical(message))
        digests.append(digest)
        if message.get("role") == "assistant":
            n_known = i + 1
    instruction = instruction_of(call)
    return Prompt(
        digests=tuple(digests),
        n_known=n_known,
        tools=_digest(b"", call.tools) if call.tools else b"",
        instruction=_digest(b"", instruction) if instruction else b"",
    )


def left_behind(
    prompt: Prompt, text: str, calls: Sequence[ParsedCall], invalid: Sequence[InvalidCall]
) -> tuple[bytes, ...]:
    """Digests of the conversation after an answer; a graph may hand unreadable calls back, or leave them out."""
    said = [(call.name, _plain(call.arguments)) for call in calls]
    tried = [*said, *((call.name or "", _plain(call.arguments)) for call in invalid)]
    return tuple(
        _digest(prompt.digests[-1], ("assistant", text.strip(), made))
        for made in ([said, tried] if invalid else [said])
    )


class Conversations:
    """Every conversation of one rollout. Not thread-safe: its recorder holds a lock."""

    def __init__(self) -> None:
        self._turns: defaultdict[bytes, list[tuple[Turn, Prompt]]] = defaultdict(list)
        """Digest of prompt and reply to the turns that left it, with what they answered."""
        self._continued: set[str] = set()
        self._begun: defaultdict[bytes, list[CallSite]] = defaultdict(list)
        """Digest of a whole prompt to the places that asked it."""
        self._first_steps: dict[_Place, int] = {}
        self._openings: set[bytes] = set()

    def begin(self, prompt: Prompt, site: CallSite) -> tuple[Turn | None, BreakCause | None]:
        """Note that a call is made with this prompt.

        Returns:
            The turn whose prompt and reply it begins with and that only new messages follow, or why there is none.
        """
        parent = self._parent(prompt, site)
        cause = None if parent else self._break_cause(prompt, site)
        if parent is not None:
            self._continued.add(parent.id)
        self._begun[prompt.digest].append(site)
        self._openings.add(prompt.digests[0])
        place, step = _place(site), site.step or 0
        self._first_steps[place] = min(step, self._first_steps.get(place, step))
        return parent, cause

    def _parent(self, prompt: Prompt, site: CallSite) -> Turn | None:
        known = self._turns.get(prompt.known, ()) if prompt.known is not None else ()
        turns = [turn for turn, asked in known if _same_settings(asked, prompt)]
        return max(turns, key=lambda turn: self._closeness(turn, site), default=None)

    def _break_cause(self, prompt: Prompt, site: CallSite) -> BreakCause:
        if not self._begun:
            return "first_turn"
        if prompt.n_known and (known := self._turns.get(prompt.digests[prompt.n_known - 1])):
            return _changed(known, prompt) if prompt.known is not None else "template"
        if prompt.digest in self._begun:
            return "retry" if any(map(site.retries, self._begun[prompt.digest])) else "parallel_sibling"
        return "history_rewritten" if self._rewritten(prompt, site) else "other_conversation"

    def answered(
        self, turn: Turn, prompt: Prompt, text: str, calls: Sequence[ParsedCall], invalid: Sequence[InvalidCall]
    ) -> None:
        """A turn has answered its prompt."""
        for digest in left_behind(prompt, text, calls, invalid):
            self._turns[digest].append((turn, prompt))

    def _closeness(self, turn: Turn, site: CallSite) -> tuple[int, int, bool, int]:
        shared = _n_shared(turn.site.checkpoint_ns.split("|"), site.checkpoint_ns.split("|"))
        same_attempt = int(turn.site.task_id == site.task_id and turn.site.attempt == site.attempt)
        return (shared, same_attempt, turn.id not in self._continued, turn.index)

    def _rewritten(self, prompt: Prompt, site: CallSite) -> bool:
        """Whether this place has asked before, or the opening is known and an assistant has spoken since.

        What middleware asks for its own ends is a conversation of its own each time.
        """
        before = None if site.source else self._first_steps.get(_place(site))
        return (before is not None and before < (site.step or 0)) or (
            prompt.n_known > 0 and prompt.digests[0] in self._openings
        )


def _same_settings(one: Prompt, other: Prompt) -> bool:
    return (one.tools, one.instruction) == (other.tools, other.instruction)


def _changed(known: Sequence[tuple[Turn, Prompt]], prompt: Prompt) -> BreakCause:
    """What tells a call from the turns that left its conversation behind."""
    same_tools = any(asked.tools == prompt.tools for _, asked in known)
    return "instruction_changed" if same_tools else "tools_changed"


def _place(site: CallSite) -> _Place:
    """A node in one execution of the graph around it; what middleware asks there for its own ends is apart."""
    return site.node, site.source, site.checkpoint_ns.rpartition("|")[0]


def _n_shared(mine: Sequence[str], others: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), min(len(mine), len(others)))


def _canonical(message: Mapping[str, Any]) -> Any:
    role, content = message.get("role"), message.get("content") or ""
    if role != "assistant":
        return (role, content)
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = [(function.get("name") or "", _plain(function.get("arguments"))) for function in functions]
    return (role, content.strip() if isinstance(content, str) else content, said)


def _plain(arguments: Any) -> Any:
    """Arguments as data: text is read as JSON where it can be."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return blake2b(before + text.encode(), digest_size=16).digest()
