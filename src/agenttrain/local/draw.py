"""Logits to sampled ids and their log probabilities, the same for a call whoever shares its batch.

Each token takes one uniform number that is a hash of (seed, position), and the inverse of the cumulative distribution
in float64 turns it into an id: no generator whose state could depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position).

    Args:
        seeds: [B] from 0, up to 64 bits.
        positions: [B] from 0, place in the response.

    Source: splitmix64 (Steele, Lea, Flood 2014), its finaliser over the seed and over a counter of it.

    Example: uniforms([0], [0])[0] -> 0.8833108082136426, splitmix64's first output for seed 0, divided by 2**64.
    """
    with np.errstate(over="ignore"):
        mixed_seeds = _mix(np.asarray(seeds, dtype=np.uint64))
        counters = (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(mixed_seeds + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits: torch.Tensor, *, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Sample one id a row.

    Args:
        logits: [B, V] float32.
        temperatures: [B] 0 takes the likeliest id.
        seeds: [B]
        positions: [B] place in the response, from 0.

    Returns:
        ids [B] and their log probabilities [B] at the row's temperature (at 1 for greedy).
    """
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = torch.tensor([t or 1.0 for t in temperatures], dtype=logits.dtype, device=logits.device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = [t == 0.0 for t in temperatures]
    if all(greedy):
        ids = logprobs.argmax(dim=-1)
    else:
        ids = _inverse_cdf(logprobs, uniforms(seeds, positions))
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=ids.device), logprobs.argmax(dim=-1), ids)
    return ids.tolist(), logprobs.gather(1, ids[:, None])[:, 0].tolist()


def _inverse_cdf(logprobs: torch.Tensor, u: NDArray[np.float64]) -> torch.Tensor:
    cdf = logprobs.double().exp_().cumsum_(dim=-1)
    targets = torch.from_numpy(u).to(cdf.device)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
