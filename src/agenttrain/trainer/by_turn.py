"""Credit by node and turn to an advantage for each turn: how much better than its siblings a rollout did there.

The reward of a turn is its rollout's score and the turn's own credit. It is compared with each sibling's mean reward at
the same place in the graph, or with its score where the sibling was not there, so that a rollout counts once in every
baseline, whatever the number of its turns or trajectories. Knows nothing of tokens but whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agenttrain.records import RolloutResult, Sample, Turn

Nodes = tuple[str, ...]
"""A place in the graph: a node and those around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """A rollout as its group sees it."""

    score: float
    """Less what is taken from it."""
    part_by_turn: Mapping[int, float] = field(default_factory=dict)
    """Index of a trained turn to its own credit."""
    nodes_by_turn: Mapping[int, Nodes] = field(default_factory=dict)
    """Index of a trained turn to where it was made."""

    def mean_at(self, nodes: Nodes) -> float:
        """Mean reward of the turns made there; the score where there are none."""
        parts = [part for index, part in self.part_by_turn.items() if self.nodes_by_turn[index] == nodes]
        return self.score + math.fsum(parts) / len(parts) if parts else self.score


def credited(result: RolloutResult, score: float) -> Credited:
    """A rollout with the credit of its trained turns, 0 where nothing was said of them.

    Args:
        score: of the rollout, less what is taken from it.
    """
    turns = trained_turns(result)
    return Credited(
        score=score,
        part_by_turn=parts_by_turn(result),
        nodes_by_turn={turn.index: turn.site.nodes for turn in turns},
    )


def parts_by_turn(result: RolloutResult) -> dict[int, float]:
    """Index of each trained turn to its own credit, beside the rollout's score."""
    reward = result.rollout.reward
    credit = reward.credit if reward is not None else None
    return {turn.index: credit.of(turn) if credit is not None else 0.0 for turn in trained_turns(result)}


def has_credit(result: RolloutResult) -> bool:
    """Whether a verifier said something of parts of a rollout."""
    return result.rollout.reward is not None and result.rollout.reward.credit is not None


def trained_turns(result: RolloutResult) -> list[Turn]:
    """The turns with trained tokens, in the order in which they began."""
    ids = {span.turn_id for path in result.trajectories for span in path.spans if span.trained}
    return sorted((turn for turn in result.turns if turn.id in ids), key=lambda turn: turn.index)


def compared(group: Sequence[Credited]) -> list[dict[int, list[float]]]:
    """What an estimator is given for each trained turn: the rewards of a group as if the rollout's were the turn's.

    Args:
        group: [G] siblings.

    Returns:
        [G] index of a turn to [G] rewards.

    Example: scores 1 and 0; turn 0 of the first has credit 0.5, and the second's two turns in that node -1 and 0: the
    first's turn 0 is given [1.5, -0.5], the second's turns [1.5, -1.0] and [1.5, 0.0].
    """
    places = {nodes for each in group for nodes in each.nodes_by_turn.values()}
    means = {nodes: [each.mean_at(nodes) for each in group] for nodes in places}
    return [
        {
            index: [*means[nodes][:i], each.score + each.part_by_turn[index], *means[nodes][i + 1 :]]
            for index, nodes in each.nodes_by_turn.items()
        }
        for i, each in enumerate(group)
    ]


def turns_of_tokens(result: RolloutResult, samples: Sequence[Sample]) -> list[list[Turn | None]]:
    """Which turn sampled each trained token.

    Args:
        samples: those of the rollout that have trained tokens.

    Returns:
        [samples][n] None: nothing is known of the turn.
    """
    by_id = {turn.id: turn for turn in result.turns}
    spans_by_trajectory = {trajectory.index: trajectory.spans for trajectory in result.trajectories}
    found: list[list[Turn | None]] = []
    for sample in samples:
        turn_at: dict[int, Turn | None] = {}
        for span in spans_by_trajectory.get(sample.extra_fields.get("trajectory", -1), ()):
            turn_at |= dict.fromkeys(range(span.start, span.end), by_id.get(span.turn_id))
        found.append([turn_at.get(t) for t, mask in enumerate(sample.response_mask) if mask])
    return found
