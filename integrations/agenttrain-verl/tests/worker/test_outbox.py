"""What any thread puts in, a coroutine takes out."""

from __future__ import annotations

import asyncio
import threading

from agenttrain_verl.outbox import Outbox


def test_everything_comes_once_and_in_order() -> None:
    """Four threads put while one coroutine takes."""

    async def work() -> list[tuple[int, int]]:
        outbox: Outbox[tuple[int, int]] = Outbox(asyncio.get_running_loop())

        def put_all(who: int) -> None:
            for n in range(500):
                outbox.put((who, n))

        threads = [threading.Thread(target=put_all, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        taken: list[tuple[int, int]] = []
        while len(taken) < 2000:
            taken += await outbox.take(5)
        assert await outbox.take(0.01) == []
        return taken

    taken = asyncio.run(work())
    assert [[n for who, n in taken if who == each] for each in range(4)] == [list(range(500))] * 4


def test_a_closed_loop_is_told_nothing() -> None:
    """A rollout that ends after its worker was closed breaks nothing."""

    async def made() -> Outbox[int]:
        return Outbox(asyncio.get_running_loop())

    asyncio.run(made()).put(1)
