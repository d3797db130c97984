"""The gate in front of every LangChain chat model: a call inside a rollout becomes a ModelCall, its Reply the answer.

Funnels of BaseChatModel are replaced when the first gate opens and put back after the last closes; which of them a
call meets is decided by langchain-core, so `self_test.py` sends one call through each. Invariants: the user's model
object is never changed; a trained or frozen call reaches no provider and no cache; a call without a route while
rollouts run is refused, unless it runs under `outside_rollouts`. Where a policy only serves, such a call is nobody's
business. Knows nothing of tokens: the route answers.

Source: langchain-core 1.8 language_models/chat_models.py; the v3 funnels are found where they exist.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables.config import RunnableConfig, ensure_config, merge_configs, var_child_runnable_config

from agenttrain.errors import EscapeError, RolloutStop
from agenttrain.graph.attempts import running_nodes
from agenttrain.graph.one_loop import StreamsOnOneLoop, on_one_loop, stream_on_one_loop
from agenttrain.graph.other_model import other_model
from agenttrain.graph.own_answer import recorded
from agenttrain.graph.policy_model import CALL, Routed, StandIn, exact_invalid_calls, policy_for
from agenttrain.graph.site import call_site, model_identity, stock_use
from agenttrain.protocols import KnowsInPlace, Route, StaysOnLoop

FUNNELS = ("_generate_with_cache", "_agenerate_with_cache", "agenerate", "stream", "astream")
LATER_FUNNELS = ("_chat_model_stream_v3", "_achat_model_stream_v3", "_iter_v2_events", "_aiter_v2_events")
"""Replaced where the installed langchain-core has them. The first two give a stream before anything is asked; the
others are what it asks by."""
MOST_PLACES = 100
"""Of escapes that are remembered by their place."""

_FOREIGN = ("langchain", "langgraph", "agenttrain", "concurrent.", "threading", "asyncio", "contextlib", "functools")
"""Modules that are not where a user's code made a call."""


class _Outside:
    """Stands in the route's place where the user's own model answers freely."""

    def __init__(self, *, stays_on_loop: bool) -> None:
        self.stays_on_loop = stays_on_loop


_OUTSIDE, _OUTSIDE_HERE = _Outside(stays_on_loop=False), _Outside(stays_on_loop=True)
_route: contextvars.ContextVar[Route | _Outside | None] = contextvars.ContextVar("agenttrain_route", default=None)

_stops: contextvars.ContextVar[list[BaseException] | None] = contextvars.ContextVar("agenttrain_stops", default=None)
"""What ended the calls inside one `agenerate`, where langchain-core would lose it."""


class Gate:
    """One opening of the gate, and what got past it meanwhile."""

    def __init__(self, *, allow_escapes: bool, watches: bool = True) -> None:
        self.allow_escapes = allow_escapes
        self.watches = watches
        """Rollouts run behind it. False: a policy serves, and calls without a route are none of its business."""
        self.n_escapes = 0
        """Calls without a route while this gate was open, refused or let through."""
        self.places: dict[str, EscapeError] = {}
        """Model, node, thread and line of the first `MOST_PLACES` escapes that differ in one, to what each was told;
        kept since the graph's own code may catch what was raised."""
        self._n_told = 0
        self._example = ""

    @property
    def first_escape(self) -> EscapeError | None:
        """What the first was told."""
        return next(iter(self.places.values()), None)

    def note(self, error: EscapeError, where: str) -> None:
        """A call got past it; hold the lock.

        Args:
            where: the model, node and thread of the call.
        """
        if self.n_escapes == self._n_told:
            self._example = where
        self.n_escapes += 1
        if len(self.places) < MOST_PLACES:
            self.places.setdefault(where, error)

    def escaped(self) -> tuple[int, str]:
        """How many calls got past it since this was last asked, and where the first of them was made."""
        with _lock:
            n, self._n_told = self.n_escapes - self._n_told, self.n_escapes
            return n, self._example if n else ""


_lock = threading.Lock()
_gates: list[Gate] = []
_originals: dict[str, Any] = {}


@contextmanager
def open_gate(*, allow_escapes: bool = False) -> Iterator[Gate]:
    """Put the gate in front of BaseChatModel for a block; nested and concurrent openings share it.

    Args:
        allow_escapes: count calls that have no route and let the user's own model answer, instead of refusing them.
            One strict gate among several open ones makes all of them strict.
    """
    with _opened(Gate(allow_escapes=allow_escapes)) as gate:
        yield gate


@contextmanager
def open_serving_gate() -> Iterator[Gate]:
    """Put the gate in for a block in which a policy serves: calls without a route go to their own models, uncounted."""
    with _opened(Gate(allow_escapes=True, watches=False)) as gate:
        yield gate


@contextmanager
def _opened(gate: Gate) -> Iterator[Gate]:
    with _lock:
        _gates.append(gate)
        _install()
    try:
        yield gate
    finally:
        with _lock:
            _gates.remove(gate)
            if not _gates:
                _uninstall()


@contextmanager
def use_route(route: Route) -> Iterator[None]:
    """Let a route answer the model calls of a block, and of the tasks and context-copying threads begun in it."""
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)


@contextmanager
def outside_rollouts() -> Iterator[None]:
    """Let the user's own models answer in a block, gate or not: a judge that scores, a setup that prepares."""
    token = _route.set(_OUTSIDE_HERE if _stays(_route.get()) else _OUTSIDE)
    try:
        yield
    finally:
        _route.reset(token)


def _install() -> None:
    for name in (*FUNNELS, *LATER_FUNNELS):
        original = getattr(BaseChatModel, name, None)
        if original is None or getattr(original, "agenttrain_gate", False):
            continue
        _originals[name] = original
        replacement: Any = functools.wraps(original)(_REPLACEMENTS[name](original))
        replacement.agenttrain_gate = True
        setattr(BaseChatModel, name, replacement)


def _uninstall() -> None:
    """Put back what was there; where someone else has wrapped the gate since, it stays and lets everything through."""
    for name, original in list(_originals.items()):
        if getattr(vars(BaseChatModel).get(name), "agenttrain_gate", False):
            setattr(BaseChatModel, name, original)
            del _originals[name]


def _routed(
    model: BaseChatModel, settings: Mapping[str, Any], tags: Sequence[str], metadata: Mapping[str, Any]
) -> Routed | None:
    """Who answers this call. None: the user's own model, and nothing is recorded.

    Raises:
        EscapeError: a gate is open and the call has no route.
        RoleError: the route knows no role for it.
    """
    if isinstance(model, StandIn) or not _gates:
        return None
    route = _route.get()
    if route is None:
        _escaped(model)
        return None
    if isinstance(route, _Outside):
        return None
    site = call_site(model, settings, tags=tags, metadata=metadata)
    role, reason = route.role(site)
    in_place = route.in_place if role != "auxiliary" and isinstance(route, KnowsInPlace) else None
    return Routed(route=route, model=model, settings=settings, site=site, role=role, reason=reason, in_place=in_place)


def _stays(route: object) -> bool:
    return isinstance(route, StaysOnLoop) and route.stays_on_loop


def _is_elsewhere(routed: Routed | None) -> bool:
    """Whether an own model answers async calls on the one loop: in and beside rollouts, whose event loops end."""
    if routed is not None:
        return not _stays(routed.route)
    route = _route.get()
    return isinstance(route, _Outside) and not _stays(route)


def is_answered() -> bool:
    """Whether somebody answers for this context: a rollout, a policy that serves, or the user's own models."""
    return _route.get() is not None


def escaped(what: str, told: Callable[[str], EscapeError]) -> EscapeError:
    """Note a call that belongs to no rollout at all gates that watch.

    Args:
        what: is called, in words.
        told: makes the error of what was called, in which node, on which thread and line.
    """
    where = _called_where(what)
    error = told(where)
    with _lock:
        for gate in _gates:
            if gate.watches:
                gate.note(error, where)
    return error


def _escaped(model: BaseChatModel) -> None:
    with _lock:
        watching = [gate for gate in _gates if gate.watches]
    if not watching:
        return
    model_class, name, _ = model_identity(model)
    error = escaped(f"{model_class} {name!r}" if name else model_class, _escape_text)
    if any(not gate.allow_escapes for gate in watching):
        raise error


def _escape_text(where: str) -> EscapeError:
    return EscapeError(
        f"{where}, outside of any rollout while rollouts run, so nobody knows which rollout it belongs to. A thread of "
        "your own doesn't inherit the context: use langchain_core.runnables.config.ContextThreadPoolExecutor, "
        "asyncio.to_thread, or take context = contextvars.copy_context() before the thread starts and call "
        "context.run(model.invoke, …) in it. With @trainable(allow_escapes=True) your own model answers such calls and "
        "they are only counted."
    )


def _called_where(what: str) -> str:
    """What was called, node, thread and line of a call, in words."""
    node = ((var_child_runnable_config.get() or {}).get("metadata") or {}).get("langgraph_node")
    running = sorted(running_nodes())
    place = f"in node {node!r}, " if node else f"while {' and '.join(map(repr, running))} ran, " if running else ""
    return f"{what} was called {place}on thread {threading.current_thread().name!r}{_caller()}"


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_FOREIGN):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = cast(Any, frame.f_back)
    return ""


def _own(routed: Routed, messages: Sequence[BaseMessage]) -> AbstractContextManager[list[BaseMessage]]:
    """Record a call that its own model answers; to be asked under `outside_rollouts`, for nested calls of its own."""
    return recorded(routed.route, routed.auxiliary_call(messages))


def _messages_of(result: ChatResult) -> list[BaseMessage]:
    """The message of each answer; there is one, unless a user's own model was asked for several."""
    return [generation.message for generation in result.generations]


def _by_run_manager(
    model: BaseChatModel, settings: Mapping[str, Any], run_manager: Any, messages: Sequence[BaseMessage]
) -> Routed | None:
    metadata = getattr(run_manager, "metadata", None) or {}
    if "lc_source" not in metadata and (use := stock_use(messages, settings)):
        metadata = {**metadata, "lc_source": use}
    return _routed(model, settings, getattr(run_manager, "tags", None) or (), metadata)


def _by_config(model: BaseChatModel, settings: Mapping[str, Any], config: RunnableConfig | None) -> Routed | None:
    if isinstance(model, StandIn) or not _gates:
        return None
    merged = ensure_config(config)
    metadata = {**(merged.get("metadata") or {}), **(model.metadata or {})}
    return _routed(model, settings, [*(merged.get("tags") or ()), *(model.tags or ())], metadata)


def _with_own_config(model: BaseChatModel, config: RunnableConfig | None) -> RunnableConfig:
    """The call's config with the tags, metadata and callbacks that the user's model object carries."""
    own: dict[str, Any] = {"tags": model.tags, "metadata": model.metadata, "callbacks": model.callbacks}
    held = cast(RunnableConfig, {name: value for name, value in own.items() if value})
    return merge_configs(ensure_config(config), held) if held else ensure_config(config)


def _generate_with_cache_gate(original: Callable[..., ChatResult]) -> Callable[..., ChatResult]:
    def generate_with_cache(
        self: BaseChatModel,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        routed = _by_run_manager(self, kwargs, run_manager, messages)
        if routed is None:
            return original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
        if routed.is_own:
            with _own(routed, messages) as said, outside_rollouts():
                result = original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
                said += _messages_of(result)
                return result
        told = {**kwargs, CALL: routed}
        result = original(_stand_in(routed), messages, stop=stop, run_manager=run_manager, **told)
        return exact_invalid_calls(routed, result)

    return generate_with_cache


def _agenerate_with_cache_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def agenerate_with_cache(
        self: BaseChatModel,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        routed = _by_run_manager(self, kwargs, run_manager, messages)
        if routed is None:
            asked = original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
            return cast(ChatResult, await (on_one_loop(asked) if _is_elsewhere(None) else asked))
        try:
            if routed.is_own:
                with _own(routed, messages) as said, outside_rollouts():
                    asked = original(self, messages, stop=stop, run_manager=run_manager, **kwargs)
                    result = await (on_one_loop(asked) if _is_elsewhere(routed) else asked)
                    said += _messages_of(result)
                    return cast(ChatResult, result)
            told = {**kwargs, CALL: routed}
            result = await original(_stand_in(routed), messages, stop=stop, run_manager=run_manager, **told)
        except RolloutStop as error:
            if (stops := _stops.get()) is not None:
                stops.append(error)
            raise
        return exact_invalid_calls(routed, result)

    return agenerate_with_cache


def _agenerate_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a RolloutStop out of `agenerate`.

    langchain-core 1.8 takes a BaseException that is no Exception for a result there, and dies of an AttributeError,
    which the graph's own `except Exception` and retries would hold.
    """

    async def agenerate(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        if isinstance(_route.get(), _Outside | None):
            return await original(self, *args, **kwargs)
        stops: list[BaseException] = []
        token = _stops.set(stops)
        try:
            return await original(self, *args, **kwargs)
        except AttributeError:
            if stops:
                raise stops[0] from None
            raise
        finally:
            _stops.reset(token)

    return agenerate


def _stream_gate(original: Callable[..., Iterator[AIMessageChunk]]) -> Callable[..., Iterator[AIMessageChunk]]:
    def stream(
        self: BaseChatModel,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        routed = _by_config(self, kwargs, config)
        if routed is None:
            yield from original(self, input, config, stop=stop, **kwargs)
        elif routed.is_own:
            pieces = original(self, input, config, stop=stop, **kwargs)
            with (
                _own(routed, self._convert_input(input).to_messages()) as said,
                contextlib.closing(cast(Any, pieces)),
            ):
                while (piece := _next_outside(pieces)) is not None:
                    said.append(piece)
                    yield piece
        else:
            told = {**kwargs, CALL: routed}
            yield from original(_stand_in(routed), input, _with_own_config(self, config), stop=stop, **told)

    return stream


def _next_outside(pieces: Iterator[Any]) -> Any:
    """The next piece, made under `outside_rollouts`, which must not leak to the consumer. None: no more."""
    with outside_rollouts():
        return next(pieces, None)


def _astream_gate(
    original: Callable[..., AsyncIterator[AIMessageChunk]],
) -> Callable[..., AsyncIterator[AIMessageChunk]]:
    async def astream(
        self: BaseChatModel,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        routed = _by_config(self, kwargs, config)
        model, told = self, kwargs
        if routed is not None and not routed.is_own:
            model, told, config = _stand_in(routed), {**kwargs, CALL: routed}, _with_own_config(self, config)
        pieces = original(model, input, config, stop=stop, **told)
        if _is_elsewhere(routed) and (routed is None or routed.is_own):
            pieces = stream_on_one_loop(pieces)
        if routed is not None and routed.is_own:
            pieces = _recorded_pieces(routed, self._convert_input(input).to_messages(), pieces)
        async with contextlib.aclosing(cast(Any, pieces)):
            async for piece in pieces:
                yield piece

    return astream


async def _recorded_pieces(
    routed: Routed, messages: Sequence[BaseMessage], pieces: AsyncIterator[AIMessageChunk]
) -> AsyncIterator[AIMessageChunk]:
    with _own(routed, messages) as said:
        async with contextlib.aclosing(cast(Any, pieces)) as asked:
            while (piece := await _anext_outside(asked)) is not None:
                said.append(piece)
                yield piece


async def _anext_outside(pieces: AsyncIterator[Any]) -> Any:
    with outside_rollouts():
        return await anext(pieces, None)


def _stream_v3_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    undecorated = getattr(original, "__wrapped__", original)  # @beta warns when called from outside of langchain

    def stream_v3(
        self: BaseChatModel,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        routed = _by_config(self, kwargs, config)
        if routed is None or routed.is_own:  # its events are, once the stream is read
            return undecorated(self, input, config, stop=stop, **kwargs)
        told = {**kwargs, CALL: routed}
        return undecorated(_stand_in(routed), input, _with_own_config(self, config), stop=stop, **told)

    return stream_v3


def _astream_v3_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    stream_v3 = _stream_v3_gate(original)

    async def astream_v3(self: BaseChatModel, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await stream_v3(self, input, config, **kwargs)

    return astream_v3


def _iter_events_gate(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def iter_events(
        self: BaseChatModel, messages: list[BaseMessage], *, run_manager: Any, stream: Any, **kwargs: Any
    ) -> Iterator[Any]:
        routed = _by_run_manager(self, kwargs, run_manager, messages)
        events = original(self, messages, run_manager=run_manager, stream=stream, **kwargs)
        if routed is None:
            yield from events
            return
        with contextlib.closing(cast(Any, events)):
            with _own(routed, messages) as said:
                while (event := _next_outside(events)) is not None and not stream.done:
                    yield event
                said += [stream.output_message] if stream.done else []
            if event is not None:  # the last one: nobody may ask on behind it
                yield event

    return iter_events


def _aiter_events_gate(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def aiter_events(
        self: BaseChatModel, messages: list[BaseMessage], *, run_manager: Any, stream: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        routed = _by_run_manager(self, kwargs, run_manager, messages)
        model: Any = StreamsOnOneLoop(self) if _is_elsewhere(routed) else self
        events = original(model, messages, run_manager=run_manager, stream=stream, **kwargs)
        async with contextlib.aclosing(cast(Any, events)):
            if routed is None:
                async for event in events:
                    yield event
                return
            with _own(routed, messages) as said:
                while (event := await _anext_outside(events)) is not None and not stream.done:
                    yield event
                said += [stream.output_message] if stream.done else []
            if event is not None:
                yield event

    return aiter_events


def _stand_in(routed: Routed) -> BaseChatModel:
    """What answers below LangChain's callbacks where the user's own model doesn't."""
    return policy_for(routed.model) if routed.in_place is None else other_model(routed.model)


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "_generate_with_cache": _generate_with_cache_gate,
    "_agenerate_with_cache": _agenerate_with_cache_gate,
    "agenerate": _agenerate_gate,
    "stream": _stream_gate,
    "astream": _astream_gate,
    "_chat_model_stream_v3": _stream_v3_gate,
    "_achat_model_stream_v3": _astream_v3_gate,
    "_iter_v2_events": _iter_events_gate,
    "_aiter_v2_events": _aiter_events_gate,
}
