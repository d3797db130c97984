"""Published weights on their way to an engine's actor: cut into buckets here, one lazily read stream there.

Invariant: at most two buckets of a stream are in the receiving process beside what the engine keeps of them. A bucket
is bytes in numpy arrays, which Ray moves without pickling them.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import numpy as np
import torch
from agenttrain.errors import EngineError
from numpy.typing import NDArray

Packed = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Hugging Face name, dtype as torch names it, shape, bytes."""
Bucket = list[Packed]

LARGEST: Final = 256 << 20
"""Bytes of a bucket, whatever is asked for: veRL asks for 2 GiB by default, more than a small object store holds, and
larger ones are no faster (91 MiB on two cores: 0.3 s whole, 0.4 s in three)."""
AHEAD: Final = 1
"""Buckets that wait while the engine works on another."""


async def in_buckets(weights: AsyncIterator[tuple[str, Any]], *, n_bytes: int) -> AsyncIterator[Bucket]:
    """Cut weights into buckets of at most n_bytes and LARGEST, or of one tensor that is larger.

    Args:
        weights: (name, tensor) on any device. Each is copied before the next is asked for: it may lie in memory that
            is used again.
    """
    bucket: Bucket = []
    size = 0
    async for name, tensor in weights:
        if bucket and size + tensor.nbytes > min(n_bytes, LARGEST):
            yield bucket
            bucket, size = [], 0
        bucket.append(packed(name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def packed(name: str, tensor: torch.Tensor) -> Packed:
    """A tensor's own bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().copy()


def unpacked(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with memory of their own: what Ray handed over is its object store's, and goes back to it."""
    for name, dtype, shape, data in bucket:
        yield name, torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(shape)


class WeightStream:
    """Buckets put by one thread, read as (name, tensor) pairs by another."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._changed = threading.Condition()
        self._is_whole = False
        self._failure: str | None = None
        """Why no more will come, though the stream is not whole."""
        self._is_left = False
        """Nobody reads any more."""

    def put(self, bucket: Bucket) -> None:
        """Add a bucket; waits while others wait, returns at once when nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._buckets) < AHEAD or self._is_left or self._failure is not None)
            if not self._is_left:
                self._buckets.append(bucket)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Nothing more will come, and what came is not all: the reader gets an EngineError."""
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def leave(self) -> None:
        """The reader is through, or has given up."""
        with self._changed:
            self._is_left = True
            self._buckets.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises EngineError where the stream broke off."""
        while (bucket := self._next()) is not None:
            yield from unpacked(bucket)

    def _next(self) -> Bucket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._buckets or self._is_whole or self._failure is not None)
            if self._failure is not None:
                raise EngineError(f"New weights broke off before they were whole: {self._failure}")
            bucket = self._buckets.pop(0) if self._buckets else None
            self._changed.notify_all()
            return bucket
