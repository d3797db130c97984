"""Keys and values of everything the engine has read: rows of one growing buffer per layer.

A row holds the keys and values of `row.ids`, exactly those and of the weights of now. Rows in use lie at the front, so
that a decode step attends over a view and copies nothing; rows are exchanged when calls come and go. `SlotCache` lets
any transformers model with plain full attention read and write the rows. Knows nothing of calls or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

BLOCK = 16
"""Ids in a block of the prefix index."""
LENGTH_STEP = 64
"""The buffer's length is a multiple of it."""


@dataclass(eq=False, slots=True)
class Row:
    """One line of the buffer."""

    slot: int
    ids: list[int] = field(default_factory=list)
    """Ids whose keys and values stand in the row, from position 0."""
    session: str | None = None
    """None: free; its ids may still serve as another row's prefix."""
    call: Any = None
    """What uses the row now. None: idle."""
    used: int = 0
    """Tick of the last use; the least is evicted first."""


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The transformers cache of one forward pass: writes new keys and values into rows, gives back whole rows.

    `step` and `end` are set by `KVRows` for each pass.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.step: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None = None
        self.end = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step is None:
            raise RuntimeError("SlotCache was used outside of a forward pass of the engine.")
        return self.step(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1


class KVRows:
    """The rows, their buffer and the index of prefixes."""

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        budget_bytes: int,
        max_length: int,
    ) -> None:
        """shapes: per layer ((key heads, key size), (value heads, value size))."""
        self.rows: list[Row] = []
        self.n_front = 0
        """Slots below it take part in a decode step."""
        self.cache = SlotCache()
        self._device, self._dtype = device, dtype
        self._shapes = [pair for layer in shapes for pair in layer]
        self._buffers = [torch.empty(0, heads, 0, size, device=device, dtype=dtype) for heads, size in self._shapes]
        self._bytes_per_position = sum(heads * size for heads, size in self._shapes) * dtype.itemsize
        self._budget_bytes = budget_bytes
        self._max_length = max_length
        self._length = 0
        self._tick = 0
        self._row_by_block: dict[int, Row] = {}

    # ── space ────────────────────────────────────────────────────────────────────────────────────────────────────

    def room_for(self, n_rows: int, length: int) -> bool:
        """Whether the budget allows this many rows of this length; one row is always allowed."""
        return n_rows <= 1 or n_rows * max(length, self._length) * self._bytes_per_position <= self._budget_bytes

    def ensure_length(self, length: int) -> None:
        """Make every row at least this long, letting idle rows go where the budget demands it."""
        if length <= self._length:
            return
        wanted = max(length, min(self._length * 3 // 2, self._max_length))
        wanted = -(-wanted // LENGTH_STEP) * LENGTH_STEP
        affordable = max(1, self._budget_bytes // (wanted * self._bytes_per_position))
        if self._capacity > affordable:
            self._drop_idle(affordable)
        self._resize(max(len(self.rows), min(self._capacity, affordable)), wanted)

    def _drop_idle(self, n_rows: int) -> None:
        """Keep n_rows rows: all in use, then those used last. Rows in use are kept even beyond the budget."""
        by_need = sorted(self.rows, key=lambda row: (row.call is None, -row.used))
        n_busy = sum(row.call is not None for row in self.rows)
        kept = sorted(by_need[: max(n_rows, n_busy)], key=lambda row: row.slot)
        slots = torch.tensor([row.slot for row in kept], device=self._device, dtype=torch.long)
        self._buffers = [buffer[slots] for buffer in self._buffers]
        self.n_front = sum(row.slot < self.n_front for row in kept)
        self.rows = kept
        self._row_by_block.clear()
        for slot, row in enumerate(kept):
            row.slot = slot

    @property
    def _capacity(self) -> int:
        return int(self._buffers[0].shape[0]) if self._buffers else 0

    def _resize(self, capacity: int, length: int) -> None:
        n, kept = min(capacity, len(self.rows)), self._length
        grown = []
        for buffer, (heads, size) in zip(self._buffers, self._shapes, strict=True):
            new = torch.zeros(capacity, heads, length, size, device=self._device, dtype=self._dtype)
            new[:n, :, :kept] = buffer[:n, :, :kept]
            grown.append(new)
        self._buffers, self._length = grown, length

    def _add_row(self) -> Row:
        if len(self.rows) == self._capacity:
            length = max(self._length, LENGTH_STEP)
            affordable = self._budget_bytes // (length * self._bytes_per_position)
            self._resize(max(self._capacity + 1, min(max(4, self._capacity * 2), affordable)), length)
        row = Row(slot=len(self.rows))
        self.rows.append(row)
        return row

    def take(self, session: str, length: int) -> Row | None:
        """An empty row for a session: a free one, a new one, or the one idle for longest. None: all are in use."""
        free = [row for row in self.rows if row.call is None and row.session is None]
        if free:
            row = min(free, key=lambda row: (row.slot >= self.n_front, row.used))
        elif self.room_for(len(self.rows) + 1, length):
            row = self._add_row()
        else:
            idle = [row for row in self.rows if row.call is None]
            if not idle:
                return None
            row = min(idle, key=lambda row: row.used)
        row.ids, row.session = [], session
        self.touch(row)
        return row

    def touch(self, row: Row) -> None:
        self._tick += 1
        row.used = self._tick

    def free(self, session: str) -> None:
        for row in self.rows:
            if row.session == session:
                row.session = None

    def forget(self) -> None:
        """Drop what all rows hold: the weights have changed."""
        self._row_by_block.clear()
        for row in self.rows:
            row.ids = []

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────────

    def own_row(self, session: str, prompt: list[int]) -> tuple[Row, int] | None:
        """The session's idle row that shares the longest prefix with a prompt, and how long that is. None: no id."""
        best: tuple[Row, int] | None = None
        for row in self.rows:
            if row.session == session and row.call is None and row.ids:
                n = common_prefix(row.ids, prompt)
                if n > (best[1] if best else 0):
                    best = (row, n)
        return best

    def index(self, row: Row, hashes: Sequence[int]) -> None:
        """Let other rows find this row's first blocks."""
        if len(self._row_by_block) > 200_000:
            self._row_by_block.clear()
        for block in hashes:
            self._row_by_block[block] = row

    def find(self, prompt: list[int], hashes: Sequence[int]) -> tuple[Row, int] | None:
        """A row that starts with the longest run of a prompt's blocks, and its length in ids."""
        for n_blocks in range(len(hashes), 0, -1):
            row = self._row_by_block.get(hashes[n_blocks - 1])
            n = n_blocks * BLOCK
            if row is not None and row.ids[:n] == prompt[:n]:
                return row, n
        return None

    def copy_prefixes(self, copies: Sequence[tuple[Row, Row, int]]) -> None:
        """Copy the first n positions of rows: (from, to, n). All are read before any is written."""
        if copies:
            self._move([a.slot for a, _, _ in copies], [b.slot for _, b, _ in copies], max(n for *_, n in copies))

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────

    def gather_front(self) -> None:
        """Move rows so that those in use lie below n_front, with at most a quarter of the front idle."""
        busy = [row for row in self.rows if row.call is not None]
        crowded = len(busy) > self.n_front or 4 * len(busy) < 3 * self.n_front
        n_front = len(busy) if crowded else self.n_front
        outside = [row for row in busy if row.slot >= n_front]
        holes = sorted((row for row in self.rows[:n_front] if row.call is None), key=lambda row: row.used)
        self._exchange(list(zip(holes, outside, strict=False)))
        self.n_front = n_front

    def _exchange(self, pairs: Sequence[tuple[Row, Row]]) -> None:
        if not pairs:
            return
        a, b = [x.slot for x, _ in pairs], [y.slot for _, y in pairs]
        self._move(a + b, b + a, max(self.held(row) for pair in pairs for row in pair))
        for x, y in pairs:
            x.slot, y.slot = y.slot, x.slot
            self.rows[x.slot], self.rows[y.slot] = x, y

    def held(self, row: Row) -> int:
        """Positions of a row that hold something."""
        return len(row.ids) if row.call is None else int(row.call.n_held)

    def _move(self, sources: list[int], targets: list[int], length: int) -> None:
        src, dst = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        for buffer in self._buffers:
            view = buffer[:, :, :length]
            view.index_copy_(0, dst, view.index_select(0, src))  # a third quicker than view[dst] = view[src]

    # ── forward passes ───────────────────────────────────────────────────────────────────────────────────────────

    def decoding(self, positions: torch.Tensor, end: int) -> SlotCache:
        """The cache of a decode step: one id for each front row, written at positions [n_front]."""
        n, buffers = self.n_front, self._buffers
        rows = torch.arange(n, device=self._device)

        def step(k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = buffers[2 * layer], buffers[2 * layer + 1]
            keys[rows, :, positions] = k[:, :, 0]
            values[rows, :, positions] = v[:, :, 0]
            return keys[:n, :, :end], values[:n, :, :end]

        self.cache.step, self.cache.end = step, end
        return self.cache

    def prefilling(self, rows: Sequence[Row], starts: torch.Tensor, real: torch.Tensor, end: int) -> SlotCache:
        """The cache of a prefill: right-padded chunks, written at starts [m] where real [m, T]; padding is not."""
        buffers = self._buffers
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        at_row, at_column = real.nonzero(as_tuple=True)
        to_slot, to_position = slots[at_row], starts[at_row] + at_column

        def step(k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = buffers[2 * layer], buffers[2 * layer + 1]
            keys[to_slot, :, to_position] = k[at_row, :, at_column]
            values[to_slot, :, to_position] = v[at_row, :, at_column]
            return keys[:, :, :end].index_select(0, slots), values[:, :, :end].index_select(0, slots)

        self.cache.step, self.cache.end = step, end
        return self.cache


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many ids two lists share from the start.

    Example: [5, 6, 7], [5, 6, 8, 9] -> 2
    """
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def block_hashes(ids: list[int]) -> list[int]:
    """A hash of every prefix that is a whole number of blocks."""
    hashes, last = [], 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        last = hash((last, *ids[start : start + BLOCK]))
        hashes.append(last)
    return hashes
