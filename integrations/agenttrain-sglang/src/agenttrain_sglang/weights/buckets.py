"""Published weights, a lazily made stream, in pieces that fit in memory.

Each bucket is put together when it is asked for and is meant to be dropped before the next one. Names are those of
Hugging Face's files: experts that a model of transformers 5 keeps in one tensor per layer are told one by one, since
that is what SGLang loads (it passes over a name it doesn't know without a word).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

MIB = 1 << 20
FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
"""The names of transformers 5 for all experts of a layer: [E, 2I, H] and [E, H, I]."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some weights that travel together."""

    tensors: list[tuple[str, Any]]
    """(Hugging Face name, contiguous tensor); may share memory with the trainer's parameters."""
    number: int
    """From 0."""
    is_last: bool

    @property
    def n_bytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors)


def in_buckets(
    weights: Iterable[tuple[str, Any]], *, n_bytes: int, dtype: Any = None, device: str = "cpu"
) -> Iterator[Bucket]:
    """Cut weights into buckets of at most n_bytes, or of one tensor that is larger.

    Args:
        weights: (name, tensor) on any device, read once, no further than one tensor past the bucket.
        dtype: what floating-point tensors are cast to. None: each keeps its own.
        device: where the buckets' tensors are to be.
    """
    waiting: list[tuple[str, Any]] = []
    size = number = 0
    for name, published in one_by_one(weights):
        tensor = _travelling(published, dtype, device)
        if waiting and size + tensor.nbytes > n_bytes:
            yield Bucket(waiting, number, is_last=False)
            waiting, size, number = [], 0, number + 1
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield Bucket(waiting, number, is_last=True)


def one_by_one(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same weights under the names of files: fused experts apart, all others as they are.

    Example: ("mlp.experts.gate_up_proj", [2, 6, 4]) -> mlp.experts.0.gate_proj.weight [3, 4], …0.up_proj…, …1.…
    """
    for name, tensor in weights:
        fused = FUSED_EXPERTS.fullmatch(name)
        if fused is None or tensor.dim() != 3:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor.detach()):
            front = f"{fused[1]}.{expert}"
            if fused[2] == "down_proj":
                yield f"{front}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{front}.gate_proj.weight", gate
                yield f"{front}.up_proj.weight", up


def _travelling(tensor: Any, dtype: Any, device: str) -> Any:
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with torch.no_grad():
        return tensor.detach().to(device=device, dtype=cast).contiguous()
