"""Turns and Trajectories become counts: where the tokens of one rollout stand, and why those at mask 0 are not trained.

Invariant: every sampled token is in exactly one of trained, frozen, retried, aborted and dropped; context and
other_trajectory count tokens that stand beside them. What a trainer did with the rollout is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agenttrain.records import Trajectory, Turn
from agenttrain.trajectory.tree import ABORTED, SUPERSEDED, extends_exactly

_REASONS = {SUPERSEDED: "retried", ABORTED: "aborted"}


def token_places(turns: Sequence[Turn], trajectories: Sequence[Trajectory], *, may_be_trained: bool) -> dict[str, int]:
    """Tokens by telemetry's mask reasons; reasons without a token are left out.

    Args:
        may_be_trained: whether the rollout gave samples; else its tokens at mask 1 count as dropped.
    """
    by_id = {turn.id: turn for turn in turns}
    counts: Counter[str] = Counter()
    for path in trajectories:
        n_sampled = sum(span.end - span.start for span in path.spans)
        counts["context"] += len(path.response_ids) - n_sampled
        for span in path.spans:
            counts[_place(span.reason, may_be_trained=may_be_trained)] += span.end - span.start
        counts["other_trajectory"] += _n_sampled_before(by_id[path.spans[0].turn_id], by_id)
    return {reason: n for reason, n in counts.items() if n}


def _place(reason: str, *, may_be_trained: bool) -> str:
    if not reason:
        return "trained" if may_be_trained else "dropped"
    return _REASONS.get(reason, "frozen")


def _n_sampled_before(turn: Turn, by_id: Mapping[str, Turn]) -> int:
    """Ids in the prompt of a turn that earlier turns of another trajectory sampled."""
    n = 0
    while (parent := by_id.get(turn.extends or "")) is not None and extends_exactly(turn, parent):
        n += len(parent.response_ids)
        turn = parent
    return n
