"""A call of a tool, or the execution of a node, becomes a text key: the same wherever it is one and the same doing.

In a rollout a call is the n-th with its tool and its arguments, and a repetition counts with what it repeats: a tool
call of the same id, and a call in a node that LangGraph runs again, since it raised or since a human has answered. So
the key depends on nothing that differs between two lives of a run: no id of LangGraph or of a message, no attempt.
Outside of rollouts a call goes by its thread and its tool call's id. Knows nothing of what a tool does.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from agenttrain.graph.attempts import begun_at, place_at
from agenttrain.graph.site import call_site, namespaces_here
from agenttrain.records import CallSite, RolloutRequest

PREFIX = "agenttrain-"
N_DIGITS = 40
_TOOLS = "langchain_core.tools"
"""Modules whose `run` and `arun` are a tool's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """One call of a tool."""

    key: str
    """In a rollout; empty outside of them."""
    call_id: str | None
    """Of the model's tool call. None: the graph's own code called it."""
    namespace: str
    """Of the node execution that called it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call that was counted, as it was made last."""

    site: CallSite
    begun: int
    """How often its node execution had begun."""
    call_id: str | None

    def has_id_of(self, later: _Seen) -> bool:
        """Whether both are one tool call of the model: some give an id to several, so it counts within a node."""
        same_node = later.site.checkpoint_ns == self.site.checkpoint_ns
        return same_node and self.call_id is not None and later.call_id == self.call_id

    def is_repeated_by(self, later: _Seen) -> bool:
        """Whether a later call, equal in tool and arguments, is made by a node that is run again."""
        again = later.site.checkpoint_ns == self.site.checkpoint_ns and later.begun > self.begun
        return again or later.site.retries(self.site)


class CountedCalls:
    """The tool calls of one rollout. Thread-safe."""

    def __init__(self, request: RolloutRequest, *, run_id: str) -> None:
        self._of = (run_id, request.phase, request.step, request.task.id, request.sibling)
        self._seen: dict[tuple[str, str], list[_Seen]] = {}
        self._lock = threading.Lock()

    def key_of(self, tool: str, arguments: str, call_id: str | None) -> str:
        """The key of a call that is made here."""
        namespaces = namespaces_here()
        begun = begun_at(namespaces[-1]) if namespaces else 0
        site = call_site(None, {}, tags=(), metadata={})
        with self._lock:
            seen = self._seen.setdefault((tool, arguments), [])
            nth = _place(seen, _Seen(site, begun, call_id))
        return _text("tool", *self._of, tool, arguments, nth)

    def key_here(self, namespaces: list[str]) -> str:
        """The key of a node execution."""
        return _text("node", *self._of, *map(place_at, namespaces))


def _place(seen: list[_Seen], call: _Seen) -> int:
    """Which of the calls that were counted this one repeats, or the place of a new one."""
    same_id = (i for i, each in enumerate(seen) if each.has_id_of(call))
    repeated = (i for i, each in enumerate(seen) if each.is_repeated_by(call))
    nth = next(chain(same_id, repeated), None)
    if nth is None:
        seen.append(call)
        return len(seen) - 1
    seen[nth] = call
    return nth


_calls: contextvars.ContextVar[CountedCalls | None] = contextvars.ContextVar("agenttrain_calls", default=None)
_made: contextvars.ContextVar[_Made | None] = contextvars.ContextVar("agenttrain_call", default=None)


@contextmanager
def counted_calls(calls: CountedCalls) -> Iterator[None]:
    """Count the tool calls of one rollout in a block, and in tasks and context-copying threads begun there."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


@contextmanager
def call_made(tool: str, arguments: Any, call_id: str | None) -> Iterator[str]:
    """A tool is called here: gives the call's key, empty outside of rollouts; `idempotency_key` knows it meanwhile."""
    calls = _calls.get()
    key = calls.key_of(tool, canonical(arguments), call_id) if calls is not None else ""
    token = _made.set(_Made(key=key, call_id=call_id, namespace=_namespace()))
    try:
        yield key
    finally:
        _made.reset(token)


def idempotency_key(tool_call_id: str | None = None) -> str:
    """A key for what this tool call, or this execution of a node, does to the world: give it to what you write to.

    In a rollout the key is made of the run, phase, step, task, sibling, tool and arguments, and of which of the
    rollout's calls with these arguments it is. It stays the same when LangGraph runs the node again (a RetryPolicy, a
    tool that is called again by the same tool call's id, a node that asked a human), when an environment failure has
    the rollout tried again, and when a run that was killed goes on and makes the rollout anew. It differs between two
    calls of a rollout, equal arguments or not, and between rollouts, siblings, steps and runs. Outside of a tool it is
    the node execution's: made of the node, its superstep and its path in place of tool and arguments.

    Outside of rollouts, where a graph serves, it is made of the thread's id and the tool call's id, so that a replay
    of the thread has the same; in a node, of the thread and the node's execution, which is another one when the thread
    is replayed from an earlier checkpoint. It is the same as often as it is asked for in one call: a tool that writes
    twice adds a word of its own.

    Args:
        tool_call_id: of the call, where the tool has it by `Annotated[str, InjectedToolCallId]`. Needed only outside
            of rollouts, in an async tool of a graph that is not run by agenttrain.attach or use. None: found.

    Raises:
        LookupError: neither a tool nor a node runs here, or the tool call's id can't be found.

    Example:
        @tool
        def refund(order: str) -> str:
            return payments.refund(order, key=agenttrain.idempotency_key())
    """
    made, calls, namespaces = _made.get(), _calls.get(), namespaces_here()
    in_tool = made is not None and made.namespace == _namespace()
    if calls is not None:
        if made is not None and in_tool:
            return made.key
        if namespaces:
            return calls.key_here(namespaces)
        raise LookupError(_NOWHERE)
    on_stack = _tool_on_the_stack()
    call_id = tool_call_id or (made.call_id if made is not None and in_tool else (on_stack or {}).get("tool_call_id"))
    if call_id is not None:
        return _text("served tool", _thread_id(), call_id)
    if in_tool or on_stack is not None or _is_task_of_tool():
        raise LookupError(
            "This tool's call has no id here, and without one no key tells it from another. Let the tool ask for it, "
            "tool_call_id: Annotated[str, InjectedToolCallId], call it by a ToolCall, and write "
            "idempotency_key(tool_call_id)."
        )
    if not namespaces:
        raise LookupError(_NOWHERE)
    return _text("served node", _thread_id(), *namespaces)


_NOWHERE = (
    "No tool and no node runs here, so there is nothing to make a key of. Call idempotency_key() inside a tool or a "
    "node that LangGraph runs; a thread of your own needs contextvars.copy_context()."
)


def canonical(arguments: Any) -> str:
    """Arguments as text: JSON with sorted keys; what JSON can't hold by its own text, or by its type if it has none.

    What can't be written down at all (nested too deep, a whole number of thousands of digits, keys of several types)
    goes by its type: whatever a model writes, its call has a key.

    Example: {"b": 1, "a": Decimal("2.50")} -> '{"a":"2.50","b":1}'
    """
    try:
        return json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return type(arguments).__qualname__


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    has_text = any("__str__" in vars(kind) or "__repr__" in vars(kind) for kind in type(value).__mro__[:-1])
    return str(value) if has_text else type(value).__qualname__


def _text(*parts: Any) -> str:
    digest = hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()
    return f"{PREFIX}{digest[:N_DIGITS]}"


def _configurable() -> Mapping[str, Any]:
    return (var_child_runnable_config.get() or {}).get("configurable") or {}


def _namespace() -> str:
    return str(_configurable().get("checkpoint_ns") or "")


def _thread_id() -> str:
    return str(_configurable().get("thread_id") or "")


def _tool_on_the_stack() -> Mapping[str, Any] | None:
    """Variables of the innermost tool's call on this stack, if nothing but it stands between here and its node.

    Source: langchain-core 1.0 to 1.8, tools/base.py, `run` and `arun`.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_TOOLS) and "tool_call_id" in frame.f_locals:
            config = frame.f_locals.get("config") or {}
            is_of_node = str((config.get("configurable") or {}).get("checkpoint_ns") or "") == _namespace()
            return frame.f_locals if is_of_node else None
        frame = frame.f_back
    return None


def _is_task_of_tool() -> bool:
    """Whether this task is an async tool's, which langchain-core runs in one of its own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and str(getattr(task.get_coro(), "__qualname__", "")).endswith("._arun")
