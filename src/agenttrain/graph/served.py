"""A user's graph becomes the same graph with a policy inside: its runs are answered, all else is as it was.

The copy is an instance of the graph's own class, so servers that look for a compiled graph find one, and it keeps the
user's LangGraph checkpointer, store and cache. Every way to run it (invoke, stream, batch, events; sync or async) ends
in `stream` or `astream`, and these let the route answer, one step at a time: what the consumer of a stream does between
two steps is none of the route's business. Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from agenttrain.errors import GraphError
from agenttrain.graph.intercept import use_route
from agenttrain.protocols import Route

Serve = Callable[[], AbstractContextManager[Route]]
"""Opens what one run of the graph needs, and gives what answers its calls."""
_END = object()


class _Served(Pregel[Any, Any, Any, Any]):
    """Mixed in before the class of the user's graph."""

    serve: ClassVar[Serve]
    close: ClassVar[Callable[[], None]]

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with type(self).serve() as route, contextlib.closing(cast(Any, super().stream(*args, **kwargs))) as chunks:
            while (chunk := _next_within(route, chunks)) is not _END:
                yield chunk

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with type(self).serve() as route:
            async with contextlib.aclosing(cast(Any, super().astream(*args, **kwargs))) as chunks:
                while (chunk := await _anext_within(route, chunks)) is not _END:
                    yield chunk


def _next_within(route: Route, chunks: Iterator[Any]) -> Any:
    with use_route(route):
        return next(chunks, _END)


async def _anext_within(route: Route, chunks: AsyncIterator[Any]) -> Any:
    with use_route(route):
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
