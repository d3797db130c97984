"""An opened graph and one input become a GraphEnding: the last state, and what ended the run.

Invariant: what the graph does never raises out of here, `exit()` in a tool included, and the last streamed state
survives it; only KeyboardInterrupt passes. Knows nothing of statuses, rewards or tasks.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError

from agenttrain.graph.intercept import outside_rollouts, use_route
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.protocols import Route

N_NODE_THREADS = 32
"""Sync nodes of one rollout that an event loop may run at once; threads are made when needed."""
_INTERRUPT = "__interrupt__"
_NO_CACHE: Mapping[str, Any] = {"__pregel_cache": None}
"""LangGraph's configurable key that wins over the caches of nested graphs."""
_OUTPUT_ERRORS = frozenset({"StructuredOutputError"})
"""langchain.agents' errors for an answer that doesn't fit the asked form, by name: langchain may not be installed."""
_REFUSALS = frozenset({"ValidationError", "ToolInvocationError"})
"""pydantic's error in both of its versions, and langgraph.prebuilt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEnding:
    """How one run of a graph ended."""

    state: Any
    """The last streamed state (for an @entrypoint, what it returned). None: none was streamed."""
    error: BaseException | None = None
    """What ended it: RolloutStop, GraphRecursionError or any other. None: it ran to its end or to an interrupt."""
    recursion: bool = False
    """The recursion limit was reached."""
    interrupted: bool = False
    """It waits for a human; run it again with `Command(resume=…)` as input and the same thread id to go on."""
    interrupts: tuple[Any, ...] = ()
    """langgraph's Interrupt objects, with what was asked."""
    unreadable_answer: bool = False
    """The error says that the model's own answer doesn't fit the form the graph asked for."""
    refused_arguments: bool = False
    """The error says that a tool's arguments don't fit its schema; whose arguments they were it doesn't say."""


class _LastState:
    """Takes what a graph streams and keeps the last of it."""

    def __init__(self) -> None:
        self.state: Any = None
        self.interrupts: tuple[Any, ...] | None = None

    def take(self, chunk: Any) -> None:
        if isinstance(chunk, Mapping) and _INTERRUPT in chunk:
            self.interrupts = tuple(chunk[_INTERRUPT])
            chunk = {key: value for key, value in chunk.items() if key != _INTERRUPT}
            if not chunk:
                return
        self.state = chunk

    def ending(self, error: BaseException | None) -> GraphEnding:
        return GraphEnding(
            state=self.state,
            error=error,
            recursion=isinstance(error, GraphRecursionError),
            interrupted=error is None and self.interrupts is not None,
            interrupts=self.interrupts or (),
            unreadable_answer=error is not None and is_unreadable_answer(error),
            refused_arguments=error is not None and is_refusal(error),
        )


def run_graph(
    runnable: RunnableGraph,
    *,
    input: Any,
    route: Route | None,
    recursion_limit: int,
    thread_id: str,
    context: Any = None,
    callbacks: Sequence[BaseCallbackHandler] = (),
    configurable: Mapping[str, Any] | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> GraphEnding:
    """Run a graph once, on this thread.

    Args:
        input: the graph's input, or a Command that resumes an interrupted thread.
        route: answers its model calls. None: the user's own models do.
        recursion_limit: supersteps.
        thread_id: LangGraph's thread; unique per rollout.
        configurable: further keys of the config's `configurable`.
        loop: of this thread, not running, from `rollout_loop`; for graphs that are async only. None: one is made.
    """
    config: RunnableConfig = {
        "callbacks": list(callbacks),
        "recursion_limit": recursion_limit,
        "configurable": {**_NO_CACHE, **(configurable or {}), "thread_id": thread_id},
    }
    graph = runnable.graph_for(thread_id, input)
    options: dict[str, Any] = {"context": context, "stream_mode": "values"}
    if runnable.keeps_checkpoints:
        options["durability"] = "exit"
    last = _LastState()
    error: BaseException | None = None
    try:
        with use_route(route) if route is not None else outside_rollouts():
            if runnable.async_only:
                _run_on_loop(loop, _consume(graph, input, config, options, last))
            else:
                for chunk in graph.stream(input, config, **options):
                    last.take(chunk)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = raised
    ending = last.ending(error)
    if ending.interrupted:
        runnable.keep_for_resume(thread_id, graph)
    return ending


@contextmanager
def rollout_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for one rollout thread, whose sync nodes run on threads that no other rollout shares.

    asyncio's own default executor has n_cpu + 4 threads for the whole loop: 256 rollouts on one loop would wait.
    """
    loop = asyncio.new_event_loop()
    executor = ThreadPoolExecutor(N_NODE_THREADS, thread_name_prefix="agenttrain-node")
    loop.set_default_executor(executor)
    try:
        yield loop
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        executor.shutdown(wait=False, cancel_futures=True)
        loop.close()


def is_unreadable_answer(error: BaseException) -> bool:
    """Whether an error comes from reading the model's answer: LangChain's parsers, agents and structured output."""
    if isinstance(error, OutputParserException):
        return True
    if any(kind.__name__ in _OUTPUT_ERRORS for kind in type(error).__mro__):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "_oai_structured_outputs_parser" for frame, _ in frames)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is pydantic's or LangGraph's word on arguments that don't fit a tool's schema."""
    return any(kind.__name__ in _REFUSALS for kind in type(error).__mro__)


async def _consume(graph: Any, input: Any, config: RunnableConfig, options: dict[str, Any], last: _LastState) -> None:
    async with aclosing(graph.astream(input, config, **options)) as chunks:
        async for chunk in chunks:
            last.take(chunk)


def _run_on_loop(loop: asyncio.AbstractEventLoop | None, run: Coroutine[Any, Any, None]) -> None:
    if loop is None:
        with rollout_loop() as own:
            _run_on_loop(own, run)
        return
    try:
        loop.run_until_complete(run)
    finally:
        _cancel_leftovers(loop)


def _cancel_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks that a graph left running, so that they can't call on into the next rollout."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
