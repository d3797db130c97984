"""A model to its KV cache, or to the reason why it has none.

What the configuration tells is believed; then the cache is tried: one sequence read in parts must give the logits that
the model gives to the whole. Knows nothing of calls.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from agenttrain.errors import EngineError
from agenttrain.local import policy
from agenttrain.local.cached_passes import CachedPasses, additive_mask
from agenttrain.local.kv_cache import KVRows

TRIAL_LENGTH = 48
TOLERANCE = 1e-4
"""Largest difference between logits with and without the cache."""

Shapes = tuple[tuple[int, int], tuple[int, int]]
"""Of one layer: (key heads, key size), (value heads, value size)."""


def cached_passes(
    logits: policy.Logits, *, device: torch.device, budget_bytes: int, max_length: int
) -> tuple[CachedPasses | None, str]:
    """The model's passes over an empty cache, or None and why."""
    if why_not := policy.why_not_plain(logits.model.config, max_length):
        return None, why_not
    with torch.inference_mode():
        return _tried(logits, device=device, budget_bytes=budget_bytes, max_length=max_length)


def _tried(
    logits: policy.Logits, *, device: torch.device, budget_bytes: int, max_length: int
) -> tuple[CachedPasses | None, str]:
    model = logits.model
    try:
        rows = KVRows(
            _shapes(logits, device),
            device=device,
            dtype=torch.float32,
            budget_bytes=budget_bytes,
            max_length=max_length,
        )
        passes = CachedPasses(logits, rows, device)
        difference = _difference(model, passes, device=device, n=min(TRIAL_LENGTH, max_length))
    except Exception as error:  # the model's own code: any architecture may refuse the cache in its own way
        return None, f"{type(model).__name__} does not take the cache: {error!r}"
    if not difference <= TOLERANCE:
        return None, f"logits with the cache differ from those without by {difference:.1e}"
    return passes, ""


class _ShapeCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Notes the shapes of what each layer would keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.found: dict[int, Shapes] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_states.shape, value_states.shape
        self.found[layer_idx] = (keys[1], keys[3]), (values[1], values[3])
        return key_states, value_states


def _shapes(logits: policy.Logits, device: torch.device) -> list[Shapes]:
    """What each layer keeps of one position."""
    cache = _ShapeCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    logits.at(
        torch.tensor([0], device=device),
        ids,
        attention_mask=additive_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)),
        position_ids=ids,
        cache=cache,
        use_cache=True,
    )
    if sorted(cache.found) != list(range(len(cache.found))) or not cache.found:
        raise EngineError(f"the layers {sorted(cache.found)} keep keys, and all from 0 on must")
    return [cache.found[i] for i in range(len(cache.found))]


def _difference(model: Any, passes: CachedPasses, *, device: torch.device, n: int) -> float:
    """Between logits with and without the cache, the largest on one random sequence of n ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.vocabulary_size(model), (n,), generator=generator).tolist()
    rows, half = passes.rows, n // 2
    row = rows.take("", n)
    assert row is not None
    rows.ensure_length(n)
    passes.prefill([row], [ids[:half]], [0])
    cached = [passes.prefill([row], [ids[half : n - 1]], [half])]
    rows.n_front = 1
    cached.append(passes.decode(ids[-1:], [n - 1], wanted=[0]))
    rows.n_front, row.session = 0, None
    whole = model(
        input_ids=torch.tensor([ids], device=device),
        attention_mask=torch.ones(1, n, dtype=torch.long, device=device),
        use_cache=False,
    ).logits[0, n - 2 :]
    return float((torch.cat(cached) - whole).abs().max())
