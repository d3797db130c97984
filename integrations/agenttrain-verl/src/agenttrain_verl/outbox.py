"""What any thread puts in, a coroutine takes out: in order, nothing twice, waiting for the first."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """One coroutine at a time may take."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Args:
        loop: on which `take` is awaited.
        """
        self._loop = loop
        self._items: deque[T] = deque()
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def take(self, timeout_s: float) -> list[T]:
        """All that is there; empty when nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()  # before looking: what is put from here on sets it again
        return [self._items.popleft() for _ in range(len(self._items))]
