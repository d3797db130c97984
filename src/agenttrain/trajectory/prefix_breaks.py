"""Turns become counts of prefix breaks: how often a prompt no longer extended what was sampled, and why.

A break is a trajectory other than the rollout's first. It costs context that is computed again and never a token: the
sampled ids before it stay trained where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agenttrain.records import BreakCause, Turn
from agenttrain.trajectory.tree import trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where the prompt of one turn left what another turn saw and sampled."""

    turn_id: str
    from_turn_id: str
    position: int
    """First position of the prompt that differs, from 0."""
    in_response: bool
    """Whether that position was sampled; False: it was in the other turn's prompt."""
    expected_id: int
    """The id that stood there."""
    seen_id: int | None
    """The id that stands there now. None: the prompt ends before it."""


def prefix_breaks(turns: Sequence[Turn]) -> dict[BreakCause, int]:
    """How many trajectories began for each cause; the first of a rollout is no break.

    Args:
        turns: of one rollout.

    Example: two parallel calls on one prompt -> {"parallel_sibling": 1}
    """
    causes = Counter(trajectory.break_cause for trajectory in trajectories(turns))
    causes.pop("first_turn", None)
    return dict(sorted(causes.items()))


def departure(turn: Turn, earlier: Sequence[Turn]) -> Departure | None:
    """Where the prompt left the earlier turn that it follows longest.

    Returns:
        None when it extends one of them, or when it shares no first id with any.
    """
    shared = [(_n_shared(turn, other), other) for other in earlier if other.id != turn.id and other.response_ids]
    best, parent = max(shared, key=lambda pair: pair[0], default=(0, None))
    if parent is None or best == 0 or best == len(parent.prompt_ids) + len(parent.response_ids):
        return None
    stream = parent.prompt_ids + parent.response_ids
    return Departure(
        turn_id=turn.id,
        from_turn_id=parent.id,
        position=best,
        in_response=best >= len(parent.prompt_ids),
        expected_id=stream[best],
        seen_id=turn.prompt_ids[best] if best < len(turn.prompt_ids) else None,
    )


def _n_shared(turn: Turn, other: Turn) -> int:
    stream = other.prompt_ids + other.response_ids
    n = min(len(turn.prompt_ids), len(stream))
    return next((i for i in range(n) if turn.prompt_ids[i] != stream[i]), n)
