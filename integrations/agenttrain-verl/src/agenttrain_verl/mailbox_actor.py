"""Where one sender leaves buckets of weights and several receivers fetch them: an actor of Ray, without veRL or torch.

It holds references into Ray's object store, never the weights. Invariants: of two rounds nothing is mixed; every
receiver gets every bucket once, in order; at most `AHEAD` buckets that one of them still lacks are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from agenttrain.errors import EngineError

AHEAD: Final = 2
FETCHED_IN_S: Final = 600.0
"""How long a receiver may work on one bucket before it is taken for dead."""


class Mailbox:
    """One round at a time: begin, put …, end; and get … of each receiver meanwhile."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._round = ""
        self._held: dict[int, Any] = {}
        self._next: list[int] = []
        """Of each receiver, the number of the bucket that it wants next."""
        self._n_buckets: int | None = None
        """None: more may come."""
        self._failure: str | None = None

    async def begin(self, name: str, n_receivers: int) -> None:
        """A new round; what an older one left is gone."""
        async with self._changed:
            self._round, self._held, self._next = name, {}, [0] * n_receivers
            self._n_buckets = self._failure = None
            self._changed.notify_all()

    async def put(self, number: int, reference: Sequence[Any]) -> None:
        """Leave a bucket; waits while receivers are behind.

        Args:
            reference: [1] an object reference; alone Ray would hand over what it refers to.

        Raises:
            EngineError: a receiver fetches nothing any more.
        """
        async with self._changed:
            await self._wait_until(lambda: number - min(self._next, default=number) < AHEAD)
            self._held[number] = reference[0]
            self._changed.notify_all()

    async def end(self, n_buckets: int) -> None:
        """Nothing more will come; returns when every receiver has fetched all."""
        async with self._changed:
            self._n_buckets = n_buckets
            self._changed.notify_all()
            await self._wait_until(lambda: all(number > n_buckets for number in self._next))

    async def fail(self, why: str) -> None:
        """What came will not be whole: receivers get an EngineError."""
        async with self._changed:
            self._failure = why
            self._changed.notify_all()

    async def get(self, name: str, receiver: int, number: int) -> list[Any]:
        """Fetch a bucket of a round.

        Returns:
            [1] its reference; empty: there are no more.

        Raises:
            EngineError: the sender has failed.
        """
        async with self._changed:
            if number and self._round == name:
                self._fetched(receiver, number)
            await self._changed.wait_for(lambda: self._round == name and self._is_known(number))
            if self._failure is not None:
                raise EngineError(f"New weights broke off before they were whole: {self._failure}")
            if number == self._n_buckets:
                self._next[receiver] = number + 1
                self._changed.notify_all()
                return []
            return [self._held[number]]

    def _is_known(self, number: int) -> bool:
        return number in self._held or number == self._n_buckets or self._failure is not None

    def _fetched(self, receiver: int, number: int) -> None:
        """Whoever asks for a bucket has worked on the one before."""
        self._next[receiver] = number
        for old in [old for old in self._held if old < min(self._next)]:
            del self._held[old]
        self._changed.notify_all()

    async def _wait_until(self, is_so: Any) -> None:
        try:
            await asyncio.wait_for(self._changed.wait_for(is_so), FETCHED_IN_S)
        except TimeoutError:
            raise EngineError(
                f"For {FETCHED_IN_S:.0f} s a replica has fetched no more of the new weights (next buckets: "
                f"{self._next}). See the workers' logs in the run's folder."
            ) from None
