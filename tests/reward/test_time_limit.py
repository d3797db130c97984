"""reward/time_limit.py: a user's call and a time limit become its result, or OutOfTime."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agenttrain.errors import PolicyFailure, RolloutStop
from agenttrain.reward.time_limit import OutOfTime, Raised, in_time


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_a_call_returns_what_it_returns() -> None:
    assert in_time(lambda: 3, 5) == 3
    assert in_time(lambda: 3, None) == 3


def test_an_awaitable_is_awaited() -> None:
    assert in_time(lambda: asyncio.sleep(0, result=3), 5) == 3


def test_an_exception_is_wrapped_unless_it_has_a_meaning_of_its_own() -> None:
    """SystemExit too: a user's call can't end the program."""
    for error in (KeyError("gone"), SystemExit(1)):
        with pytest.raises(Raised) as caught:
            in_time(raising(error), 5)
        assert caught.value.error is error
    for error in (PolicyFailure("wrong"), RolloutStop("budget")):
        with pytest.raises(type(error)):
            in_time(raising(error), 5)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_hangs_is_left_behind(is_async: bool) -> None:
    """The caller goes on after the limit, while the call still hangs, and the next call is not held up."""
    let_go, ended = threading.Event(), []

    def hangs() -> None:
        ended.append(let_go.wait(60))

    async def hangs_there() -> None:
        await asyncio.to_thread(hangs)

    with pytest.raises(OutOfTime):
        in_time(hangs_there if is_async else hangs, 0.05)
    assert in_time(lambda: 3, 60) == 3
    assert not ended
    let_go.set()


def test_one_thread_serves_calls_one_after_the_other() -> None:
    """A worker that another test let go may come free meanwhile; none is started beside the one that is needed."""
    before = _workers()
    threads = {in_time(threading.get_ident, 5) for _ in range(20)}
    assert len(_workers() - before) <= 1
    assert threads <= _workers()
    assert threading.get_ident() not in threads


def _workers() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "agenttrain-verifier"}


def test_calls_of_many_threads_run_at_once() -> None:
    """Eight that wait for each other all get through."""
    barrier = threading.Barrier(8)
    passed: list[bool] = []
    callers = [threading.Thread(target=lambda: passed.append(in_time(barrier.wait, 5) >= 0)) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert passed == [True] * 8


def test_context_variables_of_the_caller_are_seen() -> None:
    """So that current_task() and the current span are there, in async calls too; what is set there stays there."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    async def read() -> int:
        return variable.get()

    assert in_time(read, 5) == 7
    assert in_time(variable.get, 5) == 7
    in_time(lambda: variable.set(8), 5)
    assert variable.get() == 7


def _call_in_child(queue: Any) -> None:
    queue.put(in_time(lambda: 3, 5))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of the parent are not waited for."""
    in_time(lambda: 3, 5)
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    child = fork.Process(target=_call_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=10) == 3
    child.join()
