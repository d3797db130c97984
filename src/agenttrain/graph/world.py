"""A user's `setup=` and a task become the world of one rollout: entered before the graph, left after the verifiers.

A world is entered and left on one thread of its own, an async one in one task of an event loop that runs there all
the while, as task groups demand (an MCP client holds one). Async nodes and verifiers run on that same loop, so that
they can use its sessions. Invariant: a world that was entered is left once, whatever the graph did, and what leaving
it raises is told and not raised. Knows nothing of graphs or statuses.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agenttrain.error_place import place_of_error
from agenttrain.errors import GraphError, WorldError
from agenttrain.graph.intercept import outside_rollouts
from agenttrain.graph.named import call_with, check_call
from agenttrain.graph.run import cancel_leftovers, rollout_loop
from agenttrain.records import NOT_LEFT, Task
from agenttrain.trainable import current_task_is, function_name

KEYS = ("context", "configurable", "state")
"""What a setup may give."""
OWN_CONFIGURABLE = ("thread_id", "checkpoint_id", "checkpoint_ns", "checkpoint_map")
"""LangGraph's keys that a rollout sets itself."""
ASKED = ("task",)
Setup = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one setup gave to its rollout."""

    context: Any = None
    """LangGraph's runtime context: a mapping is laid over the task's, anything else stands in its place. None: none."""
    configurable: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config's `configurable`."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the graph's input, laid over the task's."""

    def context_over(self, context: Mapping[str, Any] | None) -> Any:
        """The context of the graph, where the task has this one."""
        if self.context is None:
            return context
        both = isinstance(context, Mapping) and isinstance(self.context, Mapping)
        return {**context, **self.context} if both else self.context  # type: ignore[dict-item]


class World:
    """One task's world, entered.

    Attributes:
        given: what it gives to the rollout.
        loop: the running event loop of an async one. None: the setup is not async.
    """

    def __init__(self, setup: Setup, task: Task) -> None:
        """Enter it; blocks until the setup has given something.

        Raises:
            WorldError: the setup raised.
            GraphError: it is no context manager, or gave what no graph takes.
        """
        self._setup, self._task = setup, task
        self.loop: asyncio.AbstractEventLoop | None = None
        self._entered: Future[Any] = Future()
        self._release: Future[None] = Future()
        self._left: Future[None] = Future()
        with outside_rollouts(), current_task_is(task):
            context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._live,), name="agenttrain-world", daemon=True).start()
        try:
            given = self._entered.result()
        except GraphError:
            raise
        except BaseException as error:
            raise WorldError(
                f"{setup_text(setup)} raised {type(error).__name__}: {error}{place_of_error(error)} before task "
                f"{task.id!r}. Nothing was run; the rollout is tried again."
            ) from error
        try:
            self.given = _read(given, setup_text(setup))
        except GraphError:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Have it left, without waiting for that."""
        with suppress(InvalidStateError):
            self._release.set_result(None)

    def leave(self, timeout_s: float) -> str:
        """Leave it, and wait at most this long for that.

        Returns:
            What went wrong, in words; empty when nothing did.
        """
        self.let_go()
        try:
            self._left.result(timeout_s)
        except TimeoutError as error:
            if not self._left.done():
                return f"{NOT_LEFT}{function_name(self._setup)} took more than {timeout_s:g} s"
            return self._raised(error)
        except BaseException as error:
            return self._raised(error)
        return ""

    def _raised(self, error: BaseException) -> str:
        what = f"{type(error).__name__}: {error}{place_of_error(error)}"
        return f"{NOT_LEFT}{function_name(self._setup)} raised {what}"

    def _live(self) -> None:
        """Everything that happens on the world's thread."""
        try:
            manager = _manager(self._setup, self._task)
            if hasattr(type(manager), "__aenter__"):
                self._hold_async(manager)
            else:
                with manager as given:
                    self._entered.set_result(given)
                    self._release.result()
        except BaseException as error:
            ended = self._left if self._entered.done() else self._entered
            ended.set_exception(error)
        else:
            self._left.set_result(None)

    def _hold_async(self, manager: Any) -> None:
        async def hold() -> None:
            async with manager as given:
                self._entered.set_result(given)
                await asyncio.wrap_future(self._release)

        with rollout_loop() as loop:
            self.loop = loop
            holding = loop.create_task(hold())
            try:
                while not holding.done():
                    with suppress(SystemExit):  # asyncio lets `exit()` in any task out of the loop: the graph's to see
                        loop.run_until_complete(asyncio.wait([holding]))
            finally:
                cancel_leftovers(loop)
            holding.result()


def check_setup(setup: Setup) -> None:
    """Refuse, before anything runs, a setup that can't be called or makes no context manager.

    Raises:
        GraphError: with what to write.
    """
    check_call(setup, ASKED, positional=ASKED, what=setup_text(setup))
    function = setup if inspect.isroutine(setup) or inspect.isclass(setup) else type(setup).__call__
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        kind = "asynccontextmanager" if inspect.isasyncgenfunction(function) else "contextmanager"
        raise GraphError(f"{setup_text(setup)} is a generator. Decorate it: @contextlib.{kind}.")


def setup_text(setup: Setup) -> str:
    """As the user wrote it: `setup=shop`."""
    return f"setup={function_name(setup)}"


def _manager(setup: Setup, task: Task) -> Any:
    """The context manager that a setup makes for a task."""
    made = call_with(setup, {"task": task}, positional=ASKED, what=setup_text(setup))()
    if hasattr(type(made), "__aenter__") or hasattr(type(made), "__enter__"):
        return made
    if inspect.iscoroutine(made):
        made.close()
    raise GraphError(
        f"{setup_text(setup)} gave {_kind(made)}, and a context manager is needed. Write a generator with one yield, "
        "under @contextlib.contextmanager or @contextlib.asynccontextmanager."
    )


def _read(given: Any, what: str) -> Given:
    if given is None:
        return Given()
    if not isinstance(given, Mapping):
        raise GraphError(f"{what} yielded {_kind(given)}, and nothing or a mapping is needed: {_EXAMPLE}")
    for key in given:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"For example {_EXAMPLE}"
            raise GraphError(f"{what} yielded the key {key!r}. Accepted: {', '.join(KEYS)}. {hint}")
    for key in ("configurable", "state"):
        if not isinstance(given.get(key) or {}, Mapping):
            raise GraphError(f"{what} yielded {key!r} as {_kind(given[key])}, and a mapping is needed.")
    taken = [key for key in given.get("configurable") or {} if key in OWN_CONFIGURABLE]
    if taken:
        raise GraphError(f"{what} yielded configurable {taken[0]!r}, which each rollout sets itself. Leave it out.")
    return Given(
        context=given.get("context"),
        configurable=given.get("configurable") or {},
        state=given.get("state") or {},
    )


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_EXAMPLE = 'yield {"context": {"db": db}}.'
