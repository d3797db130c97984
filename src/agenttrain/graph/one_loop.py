"""Async calls of the user's own models run on one event loop of the process, whichever rollout makes them.

Each rollout has an event loop of its own, and an HTTP client keeps connections that belong to the loop they were opened
on: shared by rollouts, it raises "Event loop is closed" or "bound to a different event loop" (httpx 0.28;
langchain-openai 1.7 shares one client among all models of an address). Invariant: the loop lasts as long as the
process, as such clients do. Context variables go with the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")
_END = object()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agenttrain-own-models", daemon=True).start()
    return loop


_making = threading.Lock()


def _the_loop() -> asyncio.AbstractEventLoop:
    with _making:
        return _loop()


async def on_one_loop(call: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives, run on the one loop; cancelled there when it is cancelled here."""
    loop = _the_loop()
    if asyncio.get_running_loop() is loop:
        return await call
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))


async def stream_on_one_loop(pieces: AsyncIterator[T]) -> AsyncIterator[T]:
    """What an async generator yields, run on the one loop, by one task; ended there when this one is closed."""
    loop, here = _the_loop(), asyncio.get_running_loop()
    if here is loop:
        async for piece in pieces:
            yield piece
        return
    queue: asyncio.Queue[object] = asyncio.Queue()

    def put(item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the rollout's loop is closed: nobody waits any more
            here.call_soon_threadsafe(queue.put_nowait, item)

    async def produce() -> None:
        async with contextlib.aclosing(cast(Any, pieces)):
            async for piece in pieces:
                put(piece)

    produced = asyncio.run_coroutine_threadsafe(produce(), loop)
    produced.add_done_callback(lambda _: put(_END))
    try:
        while (item := await queue.get()) is not _END:
            yield cast(T, item)
        produced.result()
    finally:
        produced.cancel()


class StreamsOnOneLoop:
    """A chat model to langchain-core's `_aiter_v2_events`, whose raw stream runs on the one loop.

    The events are told to an object of the rollout's own loop, so that only what makes them may run elsewhere.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return stream_on_one_loop(self._model._astream(*args, **kwargs))

    @property
    def _astream_chat_model_events(self) -> Callable[..., AsyncIterator[Any]] | None:
        native = getattr(self._model, "_astream_chat_model_events", None)
        if native is None:
            return None
        return lambda *args, **kwargs: stream_on_one_loop(native(*args, **kwargs))
