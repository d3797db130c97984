"""Waiting calls to rows of the KV cache: who may begin now, and how much of each prompt its row already holds.

A call goes on in its session's own row, or copies the longest beginning that another row holds. One that would begin
like a call of the same wave waits for it, and copies then. Knows nothing of models or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from agenttrain.local.kv_cache import BLOCK, KVRows, Row
from agenttrain.records import Generation, Sampling

WORTH_WAITING = 2 * BLOCK
"""A prompt waits for another one of its wave when it can then copy this many more ids."""


@dataclass(eq=False, slots=True)
class Call:
    """One `generate` on its way."""

    prompt: list[int]
    sampling: Sampling
    session: str
    future: Future[Generation]
    stop_ids: frozenset[int]
    hashes: list[int]
    """Of the blocks of what is to be read: the prompt, and after new weights the sampled ids too."""
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    n_cached: int | None = None
    """Prompt ids found in the cache at first. None: not begun."""
    row: Row | None = None

    @property
    def to_read(self) -> list[int]:
        return self.prompt + self.out

    @property
    def n_held(self) -> int:
        """Positions whose keys are in the row: all but the last sampled id."""
        return len(self.prompt) + max(0, len(self.out) - 1)


@dataclass(frozen=True, slots=True)
class Seated:
    """A call that may begin."""

    call: Call
    row: Row
    start: int
    """Ids that the row already holds."""

    @property
    def n_missing(self) -> int:
        return len(self.call.to_read) - self.start


def seat(waiting: Sequence[Call], rows: KVRows, *, most: int, alone: bool) -> tuple[list[Seated], list[Call]]:
    """Give rows to those that may begin now, and copy into them what other rows hold.

    Args:
        most: how many new rows may be taken.
        alone: share nothing: each call begins in an empty row.

    Returns:
        Those seated, and those that still wait.
    """
    joining: list[Seated] = []
    copies: list[tuple[Row, Row, int]] = []
    coming: dict[int, int] = {}
    later: list[Call] = []
    longest = max(len(call.prompt) + call.sampling.max_tokens for call in waiting)
    rows.ensure_length(min(longest, max(len(call.to_read) for call in waiting) + BLOCK))
    for call in waiting:
        ids = call.to_read
        row: Row | None = None
        source = None if alone else rows.own_row(call.session, ids)
        if source is not None and 2 * source[1] >= len(source[0].ids):
            row, n = source
        else:  # another conversation of the session owns that row: leave it whole, and copy what is common
            found = None if alone else rows.find(ids, call.hashes)
            source = max((s for s in (source, found) if s), key=lambda s: s[1], default=None)
            n = source[1] if source else 0
            soon = max((coming[block] for block in call.hashes if block in coming), default=0)
            full = len(joining) >= most
            row = None if full or soon - n >= WORTH_WAITING else rows.take(call.session, len(ids))
            if row is None:
                later.append(call)
                continue
            if source is not None:
                copies.append((source[0], row, n))
        n = min(n, len(ids) - 1)
        row.call, call.row, row.ids = call, row, row.ids[:n]
        rows.touch(row)
        if call.n_cached is None:
            call.n_cached = n
        coming.update((block, (i + 1) * BLOCK) for i, block in enumerate(call.hashes))
        joining.append(Seated(call, row, n))
    rows.copy_prefixes(copies)
    for each in joining:  # only now: a row's ids say what it holds, and others of the wave looked at them
        each.row.ids = each.call.to_read[: each.start]
    return joining, later


def alike(joining: Sequence[Seated], most_ids: int) -> list[list[Seated]]:
    """Split a wave into prefill passes of similar length, so that little is padding.

    Args:
        most_ids: in one pass, padding included; a longer prompt is a pass of its own.
    """
    groups: list[list[Seated]] = []
    shortest = 0
    for each in sorted(joining, key=lambda each: each.n_missing):
        n = each.n_missing
        fits = groups and n <= 2 * shortest + BLOCK and n * (len(groups[-1]) + 1) <= most_ids
        if not fits:
            groups.append([])
            shortest = n
        groups[-1].append(each)
    return groups
