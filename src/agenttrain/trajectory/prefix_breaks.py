"""Turns become counts of prefix breaks: how often a prompt no longer extended what was sampled, and why.

A break is a trajectory other than the rollout's first. It costs context that is computed again and never a token: the
sampled ids before it stay trained where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agenttrain.records import BreakCause, Turn
from agenttrain.trajectory.tree import trajectories


def prefix_breaks(turns: Sequence[Turn]) -> dict[BreakCause, int]:
    """How many trajectories began for each cause; the first of a rollout is no break.

    Args:
        turns: of one rollout.

    Example: two parallel calls on one prompt -> {"parallel_sibling": 1}
    """
    causes = Counter(trajectory.break_cause for trajectory in trajectories(turns))
    causes.pop("first_turn", None)
    return dict(sorted(causes.items()))
