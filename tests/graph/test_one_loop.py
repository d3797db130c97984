"""Async work of many event loops on one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agenttrain.graph.one_loop import on_one_loop, stream_on_one_loop

word: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="")


async def here() -> tuple[int, str]:
    return id(asyncio.get_running_loop()), word.get()


async def pieces(n: int, ended: list[str]) -> AsyncIterator[tuple[int, int]]:
    try:
        for i in range(n):
            yield i, id(asyncio.get_running_loop())
            await asyncio.sleep(0)
        if n > 2:
            raise ValueError("too many")
    finally:
        ended.append("ended")


def run(call: Any) -> Any:
    async def awaited() -> Any:
        return await call

    return asyncio.run(awaited())


async def listed(made: Any) -> list[Any]:
    return [piece async for piece in made]


def test_every_loop_gets_the_same_one_and_context_goes_along() -> None:
    word.set("said")
    (first, said), (second, _) = run(on_one_loop(here())), run(on_one_loop(here()))
    assert (first, said) == (second, "said")
    assert run(here())[0] != first


def test_from_the_one_loop_it_is_a_plain_await() -> None:
    async def nested() -> tuple[int, int]:
        return (await here())[0], (await on_one_loop(here()))[0]

    outer, inner = run(on_one_loop(nested()))
    assert outer == inner


def test_a_stream_comes_piece_by_piece_and_ends() -> None:
    ended: list[str] = []
    one = run(on_one_loop(here()))[0]
    assert run(listed(stream_on_one_loop(pieces(2, ended)))) == [(0, one), (1, one)]
    assert ended == ["ended"]


def test_what_a_stream_raises_comes_out() -> None:
    with pytest.raises(ValueError, match="too many"):
        run(listed(stream_on_one_loop(pieces(3, []))))


def test_a_stream_that_is_left_is_ended_there() -> None:
    ended: list[str] = []

    async def first() -> Any:
        stream: Any = stream_on_one_loop(endless(ended))
        found = await anext(stream)
        await stream.aclose()
        while not ended:
            await asyncio.sleep(0.001)
        return found

    assert run(first()) == 0
    assert ended == ["ended"]


async def endless(ended: list[str]) -> AsyncIterator[int]:
    try:
        for i in range(1_000_000_000):
            yield i
            await asyncio.sleep(0.001)
    finally:
        ended.append("ended")
