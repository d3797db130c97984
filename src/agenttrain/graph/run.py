"""An opened graph and one input become a GraphEnding: the last state, and what ended the run.

Where somebody answers for the human, a graph that was interrupted goes on with the answers until it ends. Invariant:
what the graph and the answers do never raises out of here, `exit()` in a tool included, and the last streamed state
survives it; only KeyboardInterrupt passes. Knows nothing of statuses, rewards or tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError
from langgraph.types import Command, Interrupt

from agenttrain.errors import GraphError
from agenttrain.graph.attempts import counted_attempts
from agenttrain.graph.intercept import outside_rollouts, use_route
from agenttrain.graph.policy_model import kept_refusals
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.protocols import Route

N_NODE_THREADS = 32
"""Sync nodes of one rollout that an event loop may run at once; threads are made when needed."""
STREAMED = ("values", "updates")
"""States, and beside them what the graph waits for: of a breakpoint only the updates tell."""
_INTERRUPT = "__interrupt__"
_NO_CACHE: Mapping[str, Any] = {"__pregel_cache": None}
"""LangGraph's configurable key that wins over the caches of nested graphs."""
_OUTPUT_ERRORS = frozenset({"StructuredOutputError"})
"""langchain.agents' errors for an answer that doesn't fit the asked form, by name: langchain may not be installed."""
_ABOUT_TOOL = r"(?i:\btool\W+){name}(?!\w)|(['\"`]){name}\1"
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
    """It waits for a human, and nobody answers for one."""
    interrupts: tuple[Interrupt, ...] = ()
    """What was asked last."""
    unreadable_answer: bool = False
    """The error says that the model's own answer doesn't fit the form the graph asked for."""
    refused_arguments: bool = False
    """The error says that a tool's arguments don't fit its schema; whose arguments they were it doesn't say."""
    refusal: GraphError | None = None
    """The first call that the policy can't answer, even where the graph's own code caught it. None: there was none."""


Answer = Callable[[Sequence[Interrupt], Any], Mapping[str, Any]]
"""All that is asked, and the last streamed state, become interrupt id to the value to resume with, or an awaitable of
it. Nothing is asked at a breakpoint."""


class _LastState:
    """Takes what a graph streams and keeps the last of it."""

    def __init__(self) -> None:
        self.state: Any = None
        self.interrupts: tuple[Interrupt, ...] | None = None
        """None: it is not interrupted. Empty: at a breakpoint, where nothing is asked."""
        self.refusals: list[GraphError] = []

    def take(self, mode: str, chunk: Any) -> None:
        """Take one chunk of the modes `STREAMED`; each task that waits tells its own interrupts."""
        asks = isinstance(chunk, Mapping) and _INTERRUPT in chunk
        if mode == "updates":
            if asks:
                self.interrupts = (self.interrupts or ()) + tuple(chunk[_INTERRUPT])
            return
        if asks:
            chunk = {key: value for key, value in chunk.items() if key != _INTERRUPT}
        if chunk or not asks:
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
            refusal=next(iter(self.refusals), None),
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
    answer: Answer | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> GraphEnding:
    """Run a graph on this thread until it ends.

    Args:
        input: the graph's input.
        route: answers its model calls. None: the user's own models do.
        recursion_limit: supersteps, counted anew after each interrupt.
        thread_id: LangGraph's thread; unique per rollout.
        configurable: further keys of the config's `configurable`.
        answer: answers for the human, called under `outside_rollouts`; it ends a graph that is interrupted for ever by
            raising. None: the first interrupt ends the run.
        loop: for graphs that are async only and for async answers: from `rollout_loop` on this thread and not running,
            or running on another thread. None: one is made.
    """
    config: RunnableConfig = {
        "recursion_limit": recursion_limit,
        "configurable": {**_NO_CACHE, **(configurable or {}), "thread_id": thread_id},
    }
    options: dict[str, Any] = {"context": context, "stream_mode": list(STREAMED)}
    graph = runnable.graph
    if runnable.keeps_checkpoints or answer is not None:
        graph, options["durability"] = runnable.with_checkpoints(), "exit"
    last = _LastState()
    try:
        with (
            counted_attempts() as attempts,
            kept_refusals(last.refusals),
            rollout_loop() if runnable.async_only and loop is None else nullcontext(loop) as loop,
        ):
            config["callbacks"] = [*callbacks, attempts]
            while True:
                with use_route(route) if route is not None else outside_rollouts():
                    _stream(graph, runnable.async_only, loop, input, config, options, last)
                if answer is None or last.interrupts is None:
                    break
                with outside_rollouts():
                    input = _resumption(last, answer, loop)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return last.ending(error)
    return last.ending(None)


def _stream(
    graph: Any,
    async_only: bool,
    loop: asyncio.AbstractEventLoop | None,
    input: Any,
    config: RunnableConfig,
    options: dict[str, Any],
    last: _LastState,
) -> None:
    """Run a graph to its end or next interrupt."""
    last.interrupts = None
    if async_only:
        _run_on(loop, _consume(graph, input, config, options, last))
        return
    for mode, chunk in graph.stream(input, config, **options):
        last.take(mode, chunk)


def _resumption(last: _LastState, answer: Answer, loop: asyncio.AbstractEventLoop | None) -> Command[Any] | None:
    """The input that goes on: each answer by its interrupt's id. None: goes on from a breakpoint."""
    answers = {
        interrupt_id: _run_on(loop, _awaited(said)) if inspect.isawaitable(said) else said
        for interrupt_id, said in answer(last.interrupts or (), last.state).items()
    }
    return Command(resume=answers) if answers else None


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


def is_about_tool(error: BaseException | None, names: Sequence[str]) -> bool:
    """Whether an error says that there is no tool of one of these names: a look-up of it, or a text that quotes it.

    Example: KeyError("refnd"), ValueError("unknown tool refnd") and names ("refnd",) -> True
    """
    if not isinstance(error, Exception):
        return False
    text = str(error)
    return any(name and re.search(_ABOUT_TOOL.format(name=re.escape(name)), text) for name in names)


async def _consume(graph: Any, input: Any, config: RunnableConfig, options: dict[str, Any], last: _LastState) -> None:
    async with aclosing(graph.astream(input, config, **options)) as chunks:
        async for mode, chunk in chunks:
            last.take(mode, chunk)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _run_on(loop: asyncio.AbstractEventLoop | None, run: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives: on a loop of its own, on one of this thread, or on one that runs on another thread."""
    if loop is None:
        with rollout_loop() as own:
            return _run_on(own, run)
    if loop.is_running():
        return asyncio.run_coroutine_threadsafe(run, loop).result()
    try:
        return loop.run_until_complete(run)
    finally:
        cancel_leftovers(loop)


def cancel_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks that a graph left running, so that they can't call on into the next rollout."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
