"""A user's object becomes a RunnableGraph: compiled, without caches, and apart from the user's checkpointer.

Accepts a compiled graph, a StateGraph, an @entrypoint, a factory, and a context manager or a function that makes one;
the last three may be async and then live on one private event loop until they are closed. Invariant: the user's
objects are not changed; what runs is a copy. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from agenttrain.errors import AgenttrainError, GraphError
from agenttrain.graph.intercept import outside_rollouts

MAX_CLOSURE_VALUES = 500
"""Looked at for each node when its middleware is sought."""
Explain = Callable[[BaseException], GraphError]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableGraph:
    """A compiled graph that rollouts can share."""

    graph: Any
    """langgraph's Pregel: a copy without cache and checkpointer."""
    compiled: Any
    """The user's own, with both; never run."""
    name: str
    async_only: bool
    """Some node, tool or middleware has no sync function, so the graph must be run by an event loop."""
    keeps_checkpoints: bool
    """The user's graph had a LangGraph checkpointer; each rollout gets a fresh one in memory."""
    input_keys: tuple[str, ...] = ()
    """Keys of the input. Empty: LangGraph knows none."""

    def input_schema(self) -> dict[str, Any] | None:
        """JSON schema of the input. None: LangGraph knows none."""
        return _schema(self.graph.get_input_jsonschema)

    def context_schema(self) -> dict[str, Any] | None:
        """JSON schema of the runtime context. None: the graph takes none.

        Empty, so that everything fits, where pydantic can't describe it: a typing.TypedDict before Python 3.12.
        """
        if getattr(self.graph, "context_schema", None) is None:
            return None
        return _schema(self.graph.get_context_jsonschema) or {}

    def with_checkpoints(self) -> Any:
        """The graph for one rollout, with a fresh LangGraph checkpointer in memory."""
        return self.graph.copy(update={"checkpointer": InMemorySaver()})


@contextmanager
def opened(target: Any, *, name: str, explain: Explain) -> Iterator[RunnableGraph]:
    """Call, await and enter what a target needs, and compile it.

    Args:
        explain: makes the GraphError for what the user's code raised.

    Raises:
        GraphError: the target is no graph and makes none, or raised.
    """
    with ExitStack() as stack:
        try:
            with outside_rollouts():
                runnable = _runnable(_built(target, stack, name), name)
        except AgenttrainError:
            raise
        except Exception as error:
            raise explain(error) from error
        yield runnable


def _runnable(graph: Any, name: str) -> RunnableGraph:
    return RunnableGraph(
        graph=graph.copy(update={"cache": None, "checkpointer": None}),
        compiled=graph,
        name=name,
        async_only=is_async_only(graph),
        keeps_checkpoints=bool(graph.checkpointer),
        input_keys=tuple((_schema(graph.get_input_jsonschema) or {}).get("properties", ())),
    )


def _built(target: Any, stack: ExitStack, name: str) -> Any:
    if isinstance(target, Pregel):
        return target
    if isinstance(target, StateGraph):
        return target.compile()
    if inspect.isawaitable(target):
        loop = stack.enter_context(_private_loop())
        return _built(asyncio.run_coroutine_threadsafe(_awaited(target), loop).result(), stack, name)
    if hasattr(target, "__aenter__"):
        return _built(stack.enter_context(_held(target)), stack, name)
    if hasattr(target, "__enter__"):
        return _built(stack.enter_context(target), stack, name)
    if callable(target) and not isinstance(target, (Runnable, BaseTool)):
        return _built(_called(target, name), stack, name)
    raise GraphError(_no_graph_text(target, name))


def _no_graph_text(target: Any, name: str) -> str:
    kind = type(target).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return (
        f"{name} is {article} {kind}, and a LangGraph graph is needed: a compiled graph, a StateGraph, an @entrypoint, "
        "or a function or context manager that gives one. Name another object (graph.py:graph), or decorate what "
        "returns the graph with @trainable."
    )


def _called(factory: Callable[..., Any], name: str) -> Any:
    needed = [p for p in inspect.signature(factory).parameters.values() if _is_needed(p)]
    if len(needed) > 1 or (needed and needed[0].kind is inspect.Parameter.KEYWORD_ONLY):
        raise GraphError(
            f"{name} takes {', '.join(p.name for p in needed)}, and a graph factory is called with nothing or with one "
            "RunnableConfig. Give the other arguments defaults."
        )
    return factory({"configurable": {}}) if needed else factory()


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _private_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agenttrain-graph-loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _held(manager: Any) -> Iterator[Any]:
    """Enter an async context manager and leave it in the same task, as those that hold task groups demand."""
    ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
    release = asyncio.Event()

    async def hold() -> None:
        try:
            async with manager as value:
                ready.set_result(value)
                await release.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    with _private_loop() as loop:
        holding = asyncio.run_coroutine_threadsafe(hold(), loop)
        value = ready.result()
        try:
            yield value
        finally:
            loop.call_soon_threadsafe(release.set)
            holding.result()


def _schema(get: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get()
        except Exception:
            return None


def is_async_only(graph: Any) -> bool:
    """Whether some node, branch, tool or middleware of a graph or its subgraphs has no sync function."""
    return _has_async_only(graph, set())


def _has_async_only(graph: Any, seen: set[int]) -> bool:
    if id(graph) in seen:
        return False
    seen.add(id(graph))
    for node in graph.nodes.values():
        parts = [node.bound, *node.writers]
        if any(_part_is_async_only(part, seen) for part in parts):
            return True
        if any(isinstance(sub, Pregel) and _has_async_only(sub, seen) for sub in node.subgraphs or ()):
            return True
    branches = getattr(getattr(graph, "builder", None), "branches", {})
    return any(_part_is_async_only(b.path, seen) for by_name in branches.values() for b in by_name.values())


def _part_is_async_only(part: Any, seen: set[int]) -> bool:
    if isinstance(part, Pregel):
        return _has_async_only(part, seen)
    if isinstance(part, RunnableSequence) or hasattr(part, "steps"):
        return any(_part_is_async_only(step, seen) for step in part.steps)
    if _lacks(part, "func", "afunc"):
        return True
    if any(_tool_is_async_only(tool) for tool in getattr(part, "tools_by_name", {}).values()):
        return True
    return any(_middleware_is_async_only(value) for value in _closure_values(getattr(part, "func", None)))


def _lacks(part: Any, sync_name: str, async_name: str) -> bool:
    """A callable that has an async function and no sync one, as LangGraph's and LangChain's runnables hold them."""
    held = getattr(part, "__dict__", {})
    return async_name in held and held.get(async_name) is not None and held.get(sync_name) is None


def _tool_is_async_only(tool: Any) -> bool:
    return isinstance(tool, StructuredTool) and tool.func is None and tool.coroutine is not None


def _closure_values(function: Any) -> Iterator[Any]:
    """What a function's closure holds, through the functions in it, wrapped ones and lists of them."""
    waiting, seen = [function], set[int]()
    while waiting and len(seen) < MAX_CLOSURE_VALUES:
        value = waiting.pop()
        if callable(value) and not isinstance(value, type):
            value = inspect.unwrap(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif inspect.isfunction(value):
            waiting.extend(_cell_values(value))


def _cell_values(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _middleware_is_async_only(value: Any) -> bool:
    """LangChain's agent middleware with only the async half of a wrapping hook; the other half raises."""
    owner = getattr(value, "__self__", value)
    if isinstance(owner, (BaseChatModel, type)) or not hasattr(owner, "awrap_model_call"):
        return False
    return any(_only_async_half(type(owner), hook) for hook in ("wrap_model_call", "wrap_tool_call"))


def _only_async_half(middleware: type, hook: str) -> bool:
    base = next((c for c in middleware.__mro__ if c.__name__ == "AgentMiddleware"), None)
    if base is None:
        return False
    sync_is_own = getattr(middleware, hook, None) is not getattr(base, hook, None)
    async_is_own = getattr(middleware, f"a{hook}", None) is not getattr(base, f"a{hook}", None)
    return async_is_own and not sync_is_own
