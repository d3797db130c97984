"""Stands in for sgl_kernel, SGLang's compiled kernels, of which there is no build for a CPU on a package index.

Works, in PyTorch: the choice of experts (`topk_softmax_cpu`, `topk_sigmoid_cpu`) and the hash behind seeded sampling
(`murmur_hash32_cpu`). Every other name can be imported, and raises NotImplementedError when it is called.
"""

import torch

__version__ = "0.0.0+agenttrain.stand.in"

_OPERATIONS = torch.library.Library("sgl_kernel", "FRAGMENT")
_BITS = 0xFFFFFFFF


def _operation(schema):
    """Register the function below under torch.ops.sgl_kernel."""

    def register(function):
        _OPERATIONS.define(schema)
        _OPERATIONS.impl(schema.partition("(")[0], function, "CPU")
        return function

    return register


_ROUTE = (
    "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor? correction_bias=None)"
    " -> (Tensor, Tensor)"
)


@_operation("topk_softmax_cpu" + _ROUTE)
def _route_by_softmax(hidden_states, gating_output, topk, renormalize, correction_bias=None):
    return _strongest(gating_output.float().softmax(-1), topk, renormalize, correction_bias)


@_operation("topk_sigmoid_cpu" + _ROUTE)
def _route_by_sigmoid(hidden_states, gating_output, topk, renormalize, correction_bias=None):
    return _strongest(gating_output.float().sigmoid(), topk, renormalize, correction_bias)


def _strongest(weights, count, renormalize, bias):
    """The `count` experts of each token: weights [T, count] float32 and ids [T, count] int32, strongest first.

    A bias helps to choose, and is no part of the weights.
    """
    if bias is None:
        chosen, ids = weights.topk(count, dim=-1)
    else:
        ids = (weights + bias).topk(count, dim=-1).indices
        chosen = weights.gather(-1, ids)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen, ids.int()


@_operation("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
def _hash_cells(seed, positions, col_indices):
    """MurmurHash3 (32 bits) of the 16 bytes (seed, position, column): [rows, columns], each in [0, 2^32).

    Source: sglang/kernels/ops/sampling/murmur_hash.py at 0.5.23, whose numbers these are.
    """
    seed = seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _BITS, (seed >> 32) & _BITS, positions.to(torch.int64) & _BITS):
        state = _absorb(state, _scrambled(block))
    cells = _absorb(state[:, None], _scrambled(col_indices.to(torch.int64))[None, :])
    return _finished(cells ^ 16)


def _scrambled(block):
    return (_rotated((block * 0xCC9E2D51) & _BITS, 15) * 0x1B873593) & _BITS


def _absorb(state, block):
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & _BITS


def _rotated(word, bits):
    return ((word << bits) | (word >> (32 - bits))) & _BITS


def _finished(word):
    """int64 products wrap around; their low 32 bits are right all the same."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _BITS
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _BITS
    return word ^ (word >> 16)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: agenttrain's stand-in for the CPU hasn't got it.")

    absent.__name__ = name
    return absent
