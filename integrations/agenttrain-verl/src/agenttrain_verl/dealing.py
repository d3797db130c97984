"""Rows to mini-batches and ranks: all rows of a rollout in one optimizer step, an equal number of rows in each place.

veRL gives each rank a contiguous part of the batch, and each mini-batch a contiguous part of that, all of one size. So
rows are dealt into a table of cells, one for each mini-batch and rank, that is read rank by rank; cells with fewer rows
are filled up with padding. The number of optimizer steps is that of the mini-batches, whatever the number of rows, and
rollouts go into them as the local trainer deals them. Knows nothing of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agenttrain_verl.rows import Row, by_rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step."""

    rollout_ids: tuple[str, ...]
    cells: tuple[tuple[int, ...], ...]
    """[ranks][rows] positions of rows; a position from the number of rows on is padding. All of one length."""

    @property
    def n_rows(self) -> int:
        """With padding, over all ranks."""
        return sum(map(len, self.cells))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The optimizer steps of one epoch, all with one number of rows."""

    updates: tuple[Update, ...]
    n_padding: int
    """Rows that are none."""

    @property
    def order(self) -> list[int]:
        """Positions as veRL must see them: rank by rank, and within a rank update by update."""
        n_ranks = len(self.updates[0].cells)
        return [place for rank in range(n_ranks) for update in self.updates for place in update.cells[rank]]


def seed_of(seed: int, step: int, epoch: int) -> str:
    """What shuffles the deal of an epoch, as in the local trainer.

    Example: seed 1, step 4: "1-4", then "1-4-1" in the second epoch.
    """
    return f"{seed}-{step}-{epoch}" if epoch else f"{seed}-{step}"


def dealt(rollout_ids: Sequence[str], n: int, *, seed: str) -> list[list[str]]:
    """Rollouts into at most n updates, shuffled by the seed; none is empty.

    Args:
        rollout_ids: in the order of the requests.

    Source: `agenttrain.trainer.batches.minibatches`, with which a test compares it.
    """
    shuffled = list(rollout_ids)
    random.Random(seed).shuffle(shuffled)
    return [part for i in range(n) if (part := shuffled[i::n])]


def deal(rows: Sequence[Row], *, n_minibatches: int, n_ranks: int, seed: str) -> Deal:
    """Deal the rows of one epoch.

    Args:
        rows: at least one; rollouts are dealt in the order in which they first appear.

    Returns:
        Every row once. Rollouts fewer than mini-batches give as many updates as rollouts.

    Example: rows of rollouts a, a, b on one rank, two mini-batches: cells (0, 1) and (2, 3), where 3 is padding.
    """
    places_by_rollout: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places_by_rollout.setdefault(row.rollout_id, []).append(place)
    parts = dealt(list(places_by_rollout), n_minibatches, seed=seed)
    places = [[place for rollout_id in part for place in places_by_rollout[rollout_id]] for part in parts]
    width = max(-(-len(each) // n_ranks) for each in places)
    updates, next_padding = [], len(rows)
    for part, each in zip(parts, places, strict=True):
        cells = spread({place: rows[place].n_ids for place in each}, n_ranks=n_ranks, width=width)
        for cell in cells:
            n_missing = width - len(cell)
            cell += range(next_padding, next_padding + n_missing)
            next_padding += n_missing
        updates.append(Update(rollout_ids=tuple(part), cells=tuple(map(tuple, cells))))
    return Deal(updates=tuple(updates), n_padding=next_padding - len(rows))


def spread(lengths: Mapping[int, int], *, n_ranks: int, width: int) -> list[list[int]]:
    """Places over ranks, at most `width` on each, with about equal sums: the longest first, to the rank with least.

    Args:
        lengths: place to its ids.

    Example: {0: 5, 1: 3, 2: 3} on two ranks of at most 2: [[0], [1, 2]].
    """
    cells: list[list[int]] = [[] for _ in range(n_ranks)]
    sums = [0] * n_ranks
    for place in sorted(lengths, key=lambda place: (-lengths[place], place)):
        rank = min((r for r in range(n_ranks) if len(cells[r]) < width), key=lambda r: (sums[r], r))
        cells[rank].append(place)
        sums[rank] += lengths[place]
    return [sorted(cell) for cell in cells]


def in_order(rows: Sequence[Row], rollout_ids: Sequence[str]) -> list[Row]:
    """Rows by rollout in a given order, and by trajectory within it; rollouts that it does not name come last."""
    place = {rollout_id: n for n, rollout_id in enumerate(rollout_ids)}
    grouped = by_rollout(rows)
    ids = sorted(grouped, key=lambda rollout_id: place.get(rollout_id, len(place)))
    return [row for rollout_id in ids for row in grouped[rollout_id]]
