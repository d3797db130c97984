"""reward/balance.py: the parts of many rewards, one against another."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from agenttrain.records import PartKind, Reward, RewardPart, Rollout
from agenttrain.reward.balance import (
    LeftOut,
    Weighing,
    at_least,
    is_rise,
    means,
    parts_left_out,
    safety_violations,
    weighing,
)


def part(name: str, score: float, kind: PartKind = "outcome", weight: float = 1.0, error: str = "") -> RewardPart:
    return RewardPart(name=name, score=score, kind=kind, weight=weight, error=error)


def reward(*parts: RewardPart, closed: str = "") -> Reward:
    return Reward(score=0.0, parts=parts, closed=closed)


def rollout(id: str, *parts: RewardPart) -> Rollout:
    return Rollout(
        id=id, task_id="t", phase="train", step=1, sibling=0, attempt=0, status="completed", reward=reward(*parts)
    )


def test_what_terms_and_outcome_come_to() -> None:
    """Sizes of what is added: |-0.5 × 1 + 0.25| and |-0.5 × 0.5| are 0.25 each; the outcome 1 and 0. Closed ones don't
    count."""
    rewards = [
        reward(part("tests", 1.0), part("turns", 1.0, "cost", -0.5), part("style", 0.25, "process")),
        reward(part("tests", 0.0), part("turns", 0.5, "cost", -0.5)),
        reward(part("gate", 0.0, "safety", 0.0), part("turns", 9.0, "cost", -0.5), closed="gate"),
    ]
    assert weighing(rewards) == Weighing(terms=0.25, outcome=0.5, names=("turns", "style"))
    assert weighing([reward(part("tests", 1.0))]) is None
    assert weighing([]) is None


def test_the_means_of_parts_are_of_those_that_answered() -> None:
    """What a verifier decides of success is no part."""
    rewards = [
        reward(
            part("tests", 1.0), part("tests.success", 1.0, weight=0.0), part("style", 0.0, weight=0.0, error="hung")
        ),
        reward(part("tests", 0.5), part("style", 0.5)),
    ]
    assert means(rewards) == {"tests": 0.75, "style": 0.5}


def test_parts_that_were_left_out_are_counted() -> None:
    """Of the rollouts that have a reward, with the first as an example."""
    rollouts = [
        rollout("r1", part("style", 1.0)),
        rollout("r2", part("style", 0.0, error="hung")),
        rollout("r3", part("style", 0.0, error="raised")),
    ]
    assert parts_left_out(rollouts) == [LeftOut(name="style", n=2, of=3, example="r2: hung")]


def test_violations_are_counted_by_rollout_and_unknown_without_a_safety_gate() -> None:
    """Whichever gate decided the score; two closed gates of one rollout are one violation."""
    closed = part("a", 0.0, "safety", 0.0), part("b", 0.0, "safety", 0.0)
    rewards = [reward(*closed, closed="a"), reward(part("a", 1.0, "safety", 0.0), part("f", 0.0, "format", 0.0))]
    assert safety_violations(rewards) == 1
    assert safety_violations([reward(part("f", 0.0, "format", 0.0))]) is None


@pytest.mark.parametrize(
    ("n", "of", "violations", "rollouts", "rise"),
    [
        (3, 64, 0, 198, False),
        (4, 64, 0, 198, True),
        (4, 64, 2, 198, False),
        (0, 64, 0, 198, False),
        (9, 64, 0, 20, False),
    ],
)
def test_a_rise_is_more_than_chance_gives(n: int, of: int, violations: int, rollouts: int, rise: bool) -> None:
    """A baseline of 20 without a violation promises no rate below 1 in 22."""
    assert is_rise(n, of, before={"safety_violations": violations, "rollouts": rollouts}) is rise


@pytest.mark.parametrize(("k", "n", "rate"), [(3, 64, 0.005), (0, 5, 0.5), (5, 5, 0.5), (40, 5000, 0.005), (6, 5, 0.1)])
def test_the_tail_is_the_binomials(k: int, n: int, rate: float) -> None:
    """Against scipy's, also where a product of binomial coefficients would overflow."""
    assert at_least(k, n, rate) == pytest.approx(binom.sf(k - 1, n, rate), rel=1e-9)
