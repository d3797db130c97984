"""A rollout's reward and a critic's values to an advantage and a return for each of its tokens.

A rollout is one walk over its trained tokens in the order in which they were sampled, whatever trajectories they stand
in: context between two of them is no step of its own, and the reward comes once, with the last. What verifiers credit a
turn with comes with the last token of that turn. So splitting a rollout into several trajectories changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from agenttrain.records import RolloutResult, Sample
from agenttrain.trainer.algorithms import Critic
from agenttrain.trainer.batches import Lesson, old_logprobs
from agenttrain.trainer.by_turn import has_credit, parts_by_turn, turns_of_tokens
from agenttrain.trainer.loss import k1

SMALLEST = 1e-8
"""A batch whose advantages deviate by less is not scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trained token stands."""

    sample: int
    """Among the rollout's samples with trained tokens."""
    token: int
    """Among that sample's trained tokens, by position."""


def sampling_order(result: RolloutResult, samples: Sequence[Sample]) -> list[Place]:
    """The trained tokens of a rollout in the order in which they were sampled.

    Turns go by when they began, the tokens of a turn by position; where nothing is known of the turns, samples go as
    they stand.

    Args:
        samples: those of the rollout that have trained tokens.
    """
    keyed = [
        (turn.index if turn is not None else 0, s, n)
        for s, turns in enumerate(turns_of_tokens(result, samples))
        for n, turn in enumerate(turns)
    ]
    return [Place(sample=s, token=n) for _, s, n in sorted(keyed)]


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimates of one walk that ends with its last token.

    Args:
        rewards: [n] with each token.
        values: [n] what a critic expects from before each token on.
        discount: per token.
        gae_lambda: 0: one step and the critic's word; 1: the whole walk's rewards.

    Returns:
        ([n] advantages, [n] returns: advantage + value).

    Source: arXiv:1506.02438, equation 16.

    Example: rewards [0, 1], values [0.4, 0.6], discount 1, lambda 0.5: errors [0.2, 0.4], advantages [0.4, 0.4],
    returns [0.8, 1.0].
    """
    advantages = [0.0] * len(rewards)
    after = following = 0.0
    for t in reversed(range(len(rewards))):
        error = rewards[t] + discount * after - values[t]
        following = advantages[t] = error + discount * gae_lambda * following
        after = values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Rows of numbers shifted and scaled together to mean 0 and mean square 1, each number counted once.

    Example: [[1, 3], [5]] -> [[-1.2247, 0], [1.2247]]; equal numbers become 0.
    """
    numbers = [number for row in rows for number in row]
    mean = math.fsum(numbers) / len(numbers)
    deviation = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers))
    scale = 1.0 / deviation if deviation > SMALLEST else 0.0
    return [[(number - mean) * scale for number in row] for row in rows]


def credited(kept: Sequence[Lesson], critic: Critic, *, kl_coefficient: float = 0.0) -> tuple[Lesson, ...]:
    """Give each trained token its advantage, whitened over all tokens of the step, and its return.

    Args:
        kept: with values measured, and the reference's log probabilities where they cost anything; `advantage` is the
            rollout's reward.
        kl_coefficient: what a token pays for each unit of k1.
    """
    orders = [sampling_order(lesson.result, lesson.samples) for lesson in kept]
    walks = [
        gae(
            _rewards(lesson, order, kl_coefficient),
            _in_order([measured.values for measured in lesson.measured], order),
            discount=critic.discount,
            gae_lambda=critic.gae_lambda,
        )
        for lesson, order in zip(kept, orders, strict=True)
    ]
    advantages = whitened([row for row, _ in walks])
    return tuple(
        _with_walk(lesson, order, row, returns)
        for lesson, order, row, (_, returns) in zip(kept, orders, advantages, walks, strict=True)
    )


def kl_penalty(lesson: Lesson) -> float:
    """k1 over all trained tokens of a rollout: how much likelier it is to the policy than to the reference."""
    return math.fsum(number for row in _k1(lesson) for number in row.tolist())


def _k1(lesson: Lesson) -> list[torch.Tensor]:
    """[samples][n]"""
    return [
        k1(old_logprobs(sample, measured), measured.reference_logprobs)
        for sample, measured in lesson.rows
        if measured.reference_logprobs is not None
    ]


def _rewards(lesson: Lesson, order: Sequence[Place], kl_coefficient: float) -> list[float]:
    rewards = [0.0] * len(order)
    if kl_coefficient:
        rewards = [-kl_coefficient * number for number in _in_order(_k1(lesson), order)]
    for at, part in _parts(lesson, order):
        rewards[at] += part
    rewards[-1] += lesson.advantage
    return rewards


def _parts(lesson: Lesson, order: Sequence[Place]) -> list[tuple[int, float]]:
    """(step of the walk, credit): each credited turn's own, with its last token."""
    if not has_credit(lesson.result):
        return []
    turns, parts = turns_of_tokens(lesson.result, lesson.samples), parts_by_turn(lesson.result)
    walked = [turns[place.sample][place.token] for place in order]
    last_by_turn = {turn.index: at for at, turn in enumerate(walked) if turn is not None}
    return [(at, parts[index]) for index, at in last_by_turn.items()]


def _in_order(rows: Sequence[torch.Tensor | None], order: Sequence[Place]) -> list[float]:
    numbers = [row.tolist() for row in rows if row is not None]
    return [numbers[place.sample][place.token] for place in order]


def _with_walk(lesson: Lesson, order: Sequence[Place], advantages: Sequence[float], returns: Sequence[float]) -> Lesson:
    each = [
        (torch.zeros(sum(sample.response_mask)), torch.zeros(sum(sample.response_mask))) for sample in lesson.samples
    ]
    for place, advantage, value in zip(order, advantages, returns, strict=True):
        each[place.sample][0][place.token] = advantage
        each[place.sample][1][place.token] = value
    measured = tuple(
        replace(before, advantages=a, returns=r) for before, (a, r) in zip(lesson.measured, each, strict=True)
    )
    return replace(lesson, measured=measured)
