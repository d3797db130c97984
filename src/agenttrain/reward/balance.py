"""The parts of many rewards become figures that tell whether they do what they are for: one part against another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.part import TERMS
from agenttrain.records import Reward, Rollout
from agenttrain.reward.layers import is_decision

UNLIKELY = 1e-3
"""Chance under which more violations than before are no accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What terms and outcomes come to, a rollout, on the mean of their sizes."""

    terms: float
    outcome: float
    names: tuple[str, ...]
    """Of the terms."""


def weighing(rewards: Iterable[Reward]) -> Weighing | None:
    """Over the rewards that no gate decided. None: there is none, or no term in them."""
    open_ones = [reward for reward in rewards if not reward.closed]
    names = dict.fromkeys(part.name for reward in open_ones for part in reward.parts if part.kind in TERMS)
    if not names:
        return None
    return Weighing(terms=_mean_size(open_ones, TERMS), outcome=_mean_size(open_ones, ("outcome",)), names=tuple(names))


def _mean_size(rewards: Sequence[Reward], kinds: Sequence[str]) -> float:
    sums = [sum(part.weight * part.score for part in reward.parts if part.kind in kinds) for reward in rewards]
    return math.fsum(map(abs, sums)) / len(sums)


def means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Name of each part to the mean of its scores, where it answered; what a verifier decides of success is no part."""
    scores: dict[str, list[float]] = {}
    for reward in rewards:
        for part in reward.parts:
            if not part.error and not is_decision(part):
                scores.setdefault(part.name, []).append(part.score)
    return {name: math.fsum(each) / len(each) for name, each in scores.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """How often a part failed and was left out."""

    name: str
    n: int
    of: int
    example: str
    """Id of the first rollout, and what was raised there."""


def parts_left_out(rollouts: Sequence[Rollout]) -> list[LeftOut]:
    """Each part that was left out in some rollout, of those with a reward."""
    rewarded = [(rollout, rollout.reward) for rollout in rollouts if rollout.reward is not None]
    counts = Counter(part.name for _, reward in rewarded for part in reward.parts if part.error)
    first: dict[str, str] = {}
    for rollout, reward in rewarded:
        for part in reward.parts:
            if part.error:
                first.setdefault(part.name, f"{rollout.id}: {part.error}")
    return [LeftOut(name=name, n=n, of=len(rewarded), example=first[name]) for name, n in sorted(counts.items())]


def safety_violations(rewards: Sequence[Reward]) -> int | None:
    """Rewards with a closed safety gate. None: no reward has such a gate."""
    gates = [[part.is_closed for part in reward.parts if part.kind == "safety"] for reward in rewards]
    return sum(map(any, gates)) if any(gates) else None


def is_rise(n: int, of: int, *, before: Mapping[str, Any]) -> bool:
    """Whether so many violations are more than the baseline's rate gives by chance, in all but one of 1,000 steps.

    The rate is (violations + 1) / (rollouts + 2), so that a baseline of a few rollouts without one promises no zero.

    Example: a baseline of 0 in 198: rate 0.005; of 64 rollouts 3 are no rise (chance 0.004), 4 are one (0.0003).
    """
    rate = ((before["safety_violations"] or 0) + 1) / (before["rollouts"] + 2)
    return n > 0 and at_least(n, of, rate) < UNLIKELY


def at_least(k: int, n: int, rate: float) -> float:
    """Chance of k or more of n, each with this rate between 0 and 1: the upper tail of the binomial distribution."""
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(i + 1)
        - math.lgamma(n - i + 1)
        + i * math.log(rate)
        + (n - i) * math.log1p(-rate)
        for i in range(k, n + 1)
    ]
    return math.fsum(map(math.exp, logs))
