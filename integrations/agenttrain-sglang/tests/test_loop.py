"""A loop of its own: coroutines run there, and closing it ends them."""

from __future__ import annotations

import asyncio
import threading

from agenttrain_sglang.loop import LoopThread


async def where() -> str:
    return threading.current_thread().name


async def for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def test_a_coroutine_runs_on_the_loops_thread() -> None:
    loop = LoopThread("the-loop")
    assert loop.run(where()).result(5) == "the-loop"
    loop.close()


def test_close_cancels_what_runs_and_may_be_called_twice() -> None:
    loop, ended = LoopThread("ends"), []
    running = loop.run(for_ever(ended))
    loop.run(where()).result(5)
    loop.close()
    loop.close()
    assert ended == ["cancelled"]
    assert running.cancelled()
