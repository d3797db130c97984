"""Rows that begin alike to log probabilities, with their common beginning read once and its gradient whole.

The keys and values of the beginning are computed in a pass of their own and stand in front of every row's; the graph
of both passes is one, so that the gradient is that of reading each row in full (the same sums in another order).
Right for models with plain full attention only: `works` tries it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from agenttrain.local.policy import Logits, why_not_plain

TOLERANCE = 1e-4
MASKED = torch.finfo(torch.float32).min


class PrefixCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keeps the keys and values of the first pass, and puts them before those of the second."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.n_read = 0
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.n_read == 0:
            self._held[layer_idx] = (key_states, value_states)
            return key_states, value_states
        n_rows = key_states.shape[0]
        keys, values = (held.expand(n_rows, -1, -1, -1) for held in self._held[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.n_read

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.n_read + query_length, 0


def logits_after(logits: Logits, prefix: torch.Tensor, flat: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] at flat positions of rows [B, T] that all follow a prefix [P].

    Rows are padded on the right, so that causal attention alone keeps real positions from padding.
    """
    cache = PrefixCache()
    nowhere = torch.zeros(1, dtype=torch.long, device=input_ids.device)
    _pass(logits, cache, nowhere, prefix[None])
    cache.n_read = len(prefix)
    return _pass(logits, cache, flat, input_ids)


def _pass(logits: Logits, cache: PrefixCache, flat: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    n_rows, width = input_ids.shape
    positions = torch.arange(cache.n_read, cache.n_read + width, device=input_ids.device)
    hidden = torch.arange(cache.n_read + width, device=input_ids.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, device=input_ids.device).masked_fill_(hidden, MASKED)
    return logits.at(
        flat,
        input_ids,
        attention_mask=mask.expand(n_rows, 1, -1, -1),
        position_ids=positions.expand(n_rows, -1),
        cache=cache,
        use_cache=True,
    )


def works(logits: Logits, *, n_vocabulary: int, max_length: int) -> bool:
    """Whether this model's logits are the same when a beginning is read once, tried on random ids."""
    if max_length < 24 or why_not_plain(logits.model.config, max_length):
        return False
    device = next(logits.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(n_vocabulary, (2, 24), generator=generator).to(device)
    ids[1, :16] = ids[0, :16]
    with torch.no_grad():
        whole = logits.model(input_ids=ids, use_cache=False).logits[:, 16:].flatten(0, 1).float()
        try:
            flat = torch.arange(16, device=device)
            parted = logits_after(logits, ids[0, :16], flat, ids[:, 16:])
        except Exception:  # the model's own code: any architecture may refuse the cache in its own way
            return False
    return bool((whole - parted).abs().max() <= TOLERANCE)
