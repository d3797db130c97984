"""A user's call and a time limit become its result, or OutOfTime.

The call runs on a daemon thread that is left behind when it hangs, so that the caller always goes on. Threads are kept
and used again, since starting one costs more than most verifiers. Code that never gives back the interpreter lock can't
be timed out here.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from queue import Empty, SimpleQueue
from typing import Any, Literal

from agenttrain.errors import PolicyFailure, RolloutStop


class OutOfTime(Exception):
    """The call went on past its time."""


class Raised(Exception):
    """The call raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


_Outcome = tuple[Literal["returned", "raised"], Any]
_Job = tuple[contextvars.Context, Callable[[], Any], asyncio.AbstractEventLoop | None, "SimpleQueue[_Outcome]"]


def in_time(call: Callable[[], Any], timeout_s: float | None, *, loop: asyncio.AbstractEventLoop | None = None) -> Any:
    """What a call returns, made on a worker in a copy of the caller's context.

    Args:
        loop: running on another thread; an awaitable is awaited there. None: on the worker.

    Raises:
        OutOfTime: it took more than `timeout_s` seconds (None: no limit), and goes on unheard.
        Raised: it raised; PolicyFailure and RolloutStop come as they are.
    """
    outcome: SimpleQueue[_Outcome] = SimpleQueue()
    _worker().jobs.put((contextvars.copy_context(), call, loop, outcome))
    try:
        how, value = outcome.get(timeout=timeout_s)
    except Empty:
        raise OutOfTime from None
    if how == "returned":
        return value
    if isinstance(value, PolicyFailure | RolloutStop):
        raise value
    raise Raised(value)


class _Worker(threading.Thread):
    """Takes one call at a time, and offers itself again after each."""

    def __init__(self) -> None:
        super().__init__(name="agenttrain-verifier", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self._loop: asyncio.Runner | None = None

    def run(self) -> None:
        while True:
            context, call, loop, outcome = self.jobs.get()
            answer = self._outcome(context, call, loop)
            del context, call, loop
            _idle.append(self)  # before the answer, so that whoever waits for it finds this worker free
            outcome.put(answer)
            del answer, outcome

    def _outcome(
        self, context: contextvars.Context, call: Callable[[], Any], loop: asyncio.AbstractEventLoop | None
    ) -> _Outcome:
        try:
            result = context.run(call)
            return "returned", self._awaited(result, context, loop) if inspect.isawaitable(result) else result
        except BaseException as error:  # whatever a verifier raises is its own, SystemExit too
            return "raised", error

    def _awaited(
        self, result: Awaitable[Any], context: contextvars.Context, loop: asyncio.AbstractEventLoop | None
    ) -> Any:
        if loop is not None:
            return context.run(asyncio.run_coroutine_threadsafe, _await(result), loop).result()
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_await(result), context=context)


async def _await(result: Awaitable[Any]) -> Any:
    return await result


_idle: list[_Worker] = []


def _worker() -> _Worker:
    """A free worker, or a new one."""
    try:
        return _idle.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
        return worker


os.register_at_fork(after_in_child=_idle.clear)  # threads don't survive a fork
