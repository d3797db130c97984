"""veRL's rows to what the loss must know of them: which rollout each is of, and how many tokens it trains.

A row of veRL is a trajectory with a trained token. What names its rollout stands in `extra_fields`, as
`agenttrain.sample.build` writes it. Synthetic rows, which veRL adds to even batches out, are no rows here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agenttrain.errors import SampleError

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta

FIELDS = ("extra_fields", "response_mask", "rm_scores")
TURNS = "turns"
"""In `extra_fields`: which turns the trained tokens of a row are of, see Row.turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory of a rollout that is trained."""

    key: str
    """In the TransferQueue: uid, session and place among the session's rows, joined by "_"."""
    rollout_id: str
    group_id: str
    trajectory: int
    """Index among the rollout's trajectories."""
    n_ids: int
    """Of prompt and response."""
    n_trained: int
    reward: float
    """Of the rollout; every row of it carries the same."""
    oldest_version: int
    """Of the weights that sampled a trained token."""
    turns: tuple[tuple[int, int], ...] = ()
    """(index of a turn, its trained tokens), by position. Empty: nothing is known of the turns."""


def is_padding(tag: dict[str, Any]) -> bool:
    """Whether veRL added a row to even a batch out."""
    return bool(tag.get("is_padding", False))


def rows_of(batch: KVBatchMeta) -> list[Row]:
    """The rows of a batch in its order, without synthetic ones.

    Raises:
        SampleError: a row says nothing of its rollout, or trains no token.
    """
    import transfer_queue as tq

    real = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)]
    if not real:
        return []
    data = tq.kv_batch_get(keys=[key for key, _ in real], partition_id=batch.partition_id, select_fields=list(FIELDS))
    told = zip(
        real, listed(data["extra_fields"]), unbound(data["response_mask"]), unbound(data["rm_scores"]), strict=True
    )
    return [
        row_of(key, tag, extra, n_trained=int(mask.sum()), reward=float(scores.sum()))
        for (key, tag), extra, mask, scores in told
    ]


def row_of(key: str, tag: dict[str, Any], extra: dict[str, Any], *, n_trained: int, reward: float) -> Row:
    """A row from its tag and its `extra_fields`.

    Raises:
        SampleError: it says nothing of its rollout, or trains no token.
    """
    if "rollout_id" not in extra or not n_trained:
        raise SampleError(
            f"Row {key} of veRL's batch has {n_trained} trained tokens and extra_fields {sorted(extra)}; it needs a "
            "trained token, and rollout_id, group_id and trajectory. Let agenttrain's agent loop make all rows."
        )
    return Row(
        key=key,
        rollout_id=extra["rollout_id"],
        group_id=extra["group_id"],
        trajectory=int(extra["trajectory"]),
        n_ids=int(tag["seq_len"]),
        n_trained=n_trained,
        reward=reward,
        oldest_version=int(extra["min_global_steps"]),
        turns=tuple((int(turn), int(n)) for turn, n in extra.get(TURNS, ())),
    )


def by_rollout(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rollout id to its rows by trajectory; rollouts as they first appear."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.rollout_id, []).append(row)
    return {rollout_id: sorted(own, key=lambda row: row.trajectory) for rollout_id, own in found.items()}


def listed(column: Any) -> list[Any]:
    """A column without tensors as a list: TransferQueue's backends answer with different stacks."""
    return list(column.tolist()) if hasattr(column, "tolist") else list(column)


def unbound(column: Any) -> Sequence[Any]:
    """A column of tensors, one for each row."""
    rows: Sequence[Any] = column.unbind()
    return rows
