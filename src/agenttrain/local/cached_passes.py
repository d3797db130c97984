"""Ids and rows of the KV cache to logits: a prefill pass that reads what rows lack, a decode pass that adds one id.

Both write the keys and values of what they read into the rows. Knows nothing of calls, sampling or when to run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agenttrain.local.kv_cache import KVRows, Row
from agenttrain.local.policy import Logits


class CachedPasses:
    """The passes of one model over its rows."""

    def __init__(self, logits: Logits, rows: KVRows, device: torch.device) -> None:
        self.rows = rows
        self._logits, self._device = logits, device

    def prefill(self, rows: Sequence[Row], parts: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Read parts [m][≤ T] into rows from starts [m]; logits [m, V] at the end of each part."""
        width = max(map(len, parts))
        end = max(start + len(part) for start, part in zip(starts, parts, strict=True))
        ids = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self._device)
        first = torch.tensor(starts, device=self._device)
        lengths = torch.tensor([len(part) for part in parts], device=self._device)
        columns = torch.arange(width, device=self._device)
        real = columns < lengths[:, None]
        last = (lengths - 1).clamp(min=0)
        positions = first[:, None] + torch.minimum(columns, last[:, None])
        visible = torch.arange(end, device=self._device) <= positions[:, :, None]
        return self._logits.at(
            torch.arange(len(parts), device=self._device) * width + last,
            ids,
            attention_mask=additive_mask(visible[:, None]),
            position_ids=positions,
            cache=self.rows.prefilling(rows, first, real, end),
            use_cache=True,
        )

    def decode(self, ids: Sequence[int], places: Sequence[int], *, wanted: Sequence[int]) -> torch.Tensor:
        """Read one id into each front row.

        Args:
            ids: [n_front]
            places: [n_front] where each id goes.
            wanted: [m] front rows whose logits are needed.

        Returns:
            [m, V]
        """
        end = 1 + max(places)
        positions = torch.tensor(places, device=self._device)
        visible = torch.arange(end, device=self._device) <= positions[:, None]
        return self._logits.at(
            torch.tensor(wanted, device=self._device),
            torch.tensor(ids, device=self._device)[:, None],
            attention_mask=additive_mask(visible[:, None, None]),
            position_ids=positions[:, None],
            cache=self.rows.decoding(positions, end),
            use_cache=True,
        )


def additive_mask(visible: torch.Tensor) -> torch.Tensor:
    """Float [B, 1, T, end] that attention adds: 0 where a query may look."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, torch.finfo(torch.float32).min)
