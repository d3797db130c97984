"""A user's graph becomes the same graph with a policy inside: its runs are answered, all else is as it was.

The copy is an instance of the graph's own class, so servers that look for a compiled graph find one, and it keeps the
user's LangGraph checkpointer, store and cache. Every way to run it (invoke, stream, batch, events; sync or async) ends
in `stream` or `astream`, and these let the run be answered, one step at a time: what the consumer of a stream does
between two steps is none of it. How a run ended is told where that is asked for: a run that waits for a human has not
ended, and one that its consumer left neither ended nor failed. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import RunnableConfig, merge_configs, var_child_runnable_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from agenttrain.errors import GraphError


class ServedRun(Protocol):
    """One run of a served graph."""

    @property
    def tags(self) -> Sequence[str]:
        """Of the run's config."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Of the run's config."""

    @property
    def is_judged(self) -> bool:
        """Whether it wants to be told how the run ended."""

    @property
    def blocks(self) -> bool:
        """Whether `prepare` may take long."""

    def prepare(self) -> None:
        """What a run needs before its first step."""

    def step(self) -> AbstractContextManager[object]:
        """Around each step of the graph."""

    def ended(self, input: Any, state: Any) -> None:
        """The graph ran to its end; may take long."""

    def failed(self, error: Exception) -> None:
        """The graph raised."""


Serve = Callable[[str | None], AbstractContextManager[ServedRun]]
"""Opens one run of the graph, by LangGraph's thread_id where it has one."""
_END = object()


class _Served(Pregel[Any, Any, Any, Any]):
    """Mixed in before the class of the user's graph."""

    serve: ClassVar[Serve]
    close: ClassVar[Callable[[], None]]

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        with type(self).serve(_thread_of(config, self.config)) as run:
            run.prepare()
            watch, told = _watched(run, config)
            try:
                with contextlib.closing(cast(Any, super().stream(input, told, **kwargs))) as chunks:
                    while (chunk := _next_within(run, chunks)) is not _END:
                        yield chunk
            except Exception as error:
                _tell_failure(run, error)
                raise
            if watch.is_over and not (_may_break(self, kwargs) and self.get_state(cast(Any, told)).next):
                run.ended(input, watch.state)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        with type(self).serve(_thread_of(config, self.config)) as run:
            await _prepared(run)
            watch, told = _watched(run, config)
            try:
                async with contextlib.aclosing(cast(Any, super().astream(input, told, **kwargs))) as chunks:
                    while (chunk := await _anext_within(run, chunks)) is not _END:
                        yield chunk
            except Exception as error:
                _tell_failure(run, error)
                raise
            if watch.is_over and not (_may_break(self, kwargs) and (await self.aget_state(cast(Any, told))).next):
                await asyncio.to_thread(run.ended, input, watch.state)


class _Watch(BaseCallbackHandler):
    """Sees the end of the run that it is given to first."""

    run_inline = True

    def __init__(self) -> None:
        self._run_id: Any = None
        self.state: Any = None
        self._has_ended = self._is_interrupted = False

    @property
    def is_over(self) -> bool:
        """It ran to its end, or to a breakpoint."""
        return self._has_ended and not self._is_interrupted

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: Any, **kwargs: Any) -> None:
        self._run_id = self._run_id or run_id

    def on_chain_end(self, outputs: Any, *, run_id: Any, **kwargs: Any) -> None:
        if run_id == self._run_id:
            self.state, self._has_ended = outputs, True

    def on_chain_error(self, error: BaseException, *, run_id: Any, **kwargs: Any) -> None:
        self._is_interrupted = self._is_interrupted or isinstance(error, GraphInterrupt)


def thread_here() -> str | None:
    """LangGraph's thread_id of the node or tool that runs here. None: none does, or it has none."""
    return _thread_of()


def _thread_of(*configs: RunnableConfig | None) -> str | None:
    for config in (*configs, var_child_runnable_config.get()):
        found = ((config or {}).get("configurable") or {}).get("thread_id")
        if found is not None:
            return str(found)
    return None


def _watched(run: ServedRun, config: RunnableConfig | None) -> tuple[_Watch, RunnableConfig | None]:
    """(what sees how the run ends, the run's config with its marks)."""
    watch, marks = _Watch(), RunnableConfig()
    if run.tags:
        marks["tags"] = list(run.tags)
    if run.metadata:
        marks["metadata"] = dict(run.metadata)
    if run.is_judged:
        marks["callbacks"] = [watch]
    return watch, merge_configs(config, marks) if marks else config


async def _prepared(run: ServedRun) -> None:
    if run.blocks:
        await asyncio.to_thread(run.prepare)
    else:
        run.prepare()


def _tell_failure(run: ServedRun, error: Exception) -> None:
    """What LangGraph raises to itself is no failure: an interrupt, a command to a parent graph, a drained run."""
    if run.is_judged and not isinstance(error, GraphBubbleUp):
        run.failed(error)


def _may_break(graph: Pregel[Any, Any, Any, Any], options: Mapping[str, Any]) -> bool:
    """Whether the run may have stopped at a breakpoint, which only its state tells."""
    breaks = (
        options.get("interrupt_before"),
        options.get("interrupt_after"),
        graph.interrupt_before_nodes,
        graph.interrupt_after_nodes,
    )
    return any(breaks) and isinstance(graph.checkpointer, BaseCheckpointSaver)


def _next_within(run: ServedRun, chunks: Iterator[Any]) -> Any:
    with run.step():
        return next(chunks, _END)


async def _anext_within(run: ServedRun, chunks: AsyncIterator[Any]) -> Any:
    with run.step():
        return await anext(chunks, _END)


def served_graph(target: Any, serve: Serve, close: Callable[[], None]) -> Any:
    """A copy of a graph whose runs are served.

    Args:
        target: a compiled graph, an @entrypoint, a StateGraph, or a factory of one of them that needs no argument.
        close: the copy's method of that name.

    Raises:
        GraphError: the target is none of these, or serves a policy already.
    """
    graph = _compiled(target)
    if isinstance(graph, _Served):
        raise GraphError(
            f"attach got a graph ({graph.get_name()}) that serves a policy already. Attach the graph it was made of."
        )
    kind = type(graph)
    parts = {"serve": staticmethod(serve), "close": staticmethod(close), "__module__": __name__}
    copied = graph.copy()
    copied.__class__ = type(f"Served{kind.__name__}", (_Served, kind), parts)
    return copied


def _compiled(target: Any) -> Any:
    if isinstance(target, StateGraph):
        return target.compile()
    if isinstance(target, Pregel):
        return target
    if inspect.isfunction(target) and not inspect.iscoroutinefunction(target) and not _needs_arguments(target):
        made = target()
        if isinstance(made, Pregel | StateGraph):
            return _compiled(made)
        target = made
    raise GraphError(
        f"attach got a {type(target).__name__}, and a LangGraph graph is needed: a compiled graph, an @entrypoint, a "
        "StateGraph, or a function that gives one. For a context manager: `async with graph() as g: attach(g, RUN)`."
    )


def _needs_arguments(function: Callable[..., Any]) -> bool:
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(function).parameters.values()
    )
