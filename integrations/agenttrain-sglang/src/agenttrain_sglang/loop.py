"""An asyncio event loop on a thread of its own: whoever calls from outside gets a concurrent.futures.Future."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs until `close`; what it runs may not block."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there, from any thread; after `close` its future is cancelled from the beginning."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        future: Future[T] = Future()
        future.cancel()
        return future

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function there, from any thread; after `close` nothing happens."""
        with self._lock:
            if not self._is_closed:
                self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what still runs, wait for it, and end the thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
