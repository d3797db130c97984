"""What rollouts changed of what judges them, and whether that paid: a score that rises with it is not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from agenttrain.records import Rollout

TAMPERING = "tampering"
"""Key of a reward part's evidence: [text] what the agent changed of what judges it."""
FEWEST = 8
"""Tampering rollouts with siblings to compare with, below which nothing is said."""
STANDARD_ERRORS = 3.0
"""By which their gain must lie above 0: about 1 in 700 by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tampering:
    """What tampering rollouts got, against the other rollouts of their groups."""

    n: int
    """Rollouts that did."""
    example: Rollout
    gain: float | None
    """Mean of their score less that of the others of their group. None: too few have such others."""
    error: float | None
    """Standard error of the gain."""

    @property
    def pays(self) -> bool:
        """Whether the gain is more than chance would give."""
        return self.gain is not None and self.error is not None and self.gain > max(STANDARD_ERRORS * self.error, 1e-9)


def tampering_of(rollout: Rollout) -> tuple[str, ...]:
    """What its verifiers found changed, each text once."""
    parts = rollout.reward.parts if rollout.reward is not None else ()
    return tuple(dict.fromkeys(text for part in parts for text in part.evidence.get(TAMPERING, ())))


def tampering_in(rollouts: Sequence[Rollout]) -> Tampering | None:
    """None: no rollout did.

    Example: in a group with scores 1 (tampered), 0, 0.5 the gain is 0.75
    """
    tampered = [rollout for rollout in rollouts if tampering_of(rollout)]
    if not tampered:
        return None
    honest: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and not tampering_of(rollout):
            honest.setdefault(rollout.group_id, []).append(rollout.reward.score)
    gains = [
        rollout.reward.score - fmean(honest[rollout.group_id])
        for rollout in tampered
        if rollout.reward is not None and rollout.group_id in honest
    ]
    is_enough = len(gains) >= FEWEST
    return Tampering(
        n=len(tampered),
        example=tampered[0],
        gain=fmean(gains) if is_enough else None,
        error=stdev(gains) / math.sqrt(len(gains)) if is_enough else None,
    )
