"""Rewards of rollouts to an advantage for each token of veRL's rows: a rollout counts once, whatever its rows.

veRL calls an estimator with tensors of rows and nothing that tells whose they are, so what is known of the rows is held
in a context variable meanwhile. Registered here is "agenttrain": any estimator of agenttrain over a group's rewards, or
with a critic one walk over a rollout's trained tokens in the order in which they were sampled. veRL's own "grpo" reads
a rollout's last row alone, which is right, and is put in units of the deviation that agenttrain divides by. Where
verifiers credit nodes or turns, both leave the place to what the rollouts' lessons say of each token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from agenttrain.errors import TrainerError
from agenttrain.trainer.advantage import all_equal
from agenttrain.trainer.batches import Lesson
from agenttrain.trainer.by_turn import has_credit, parts_by_turn
from agenttrain.trainer.credit import gae, whitened
from verl.trainer.ppo.core_algos import register_adv_est

from agenttrain_verl.algorithms import OWN_ESTIMATOR
from agenttrain_verl.rows import Row, by_rollout

GroupAdvantages = Callable[[Sequence[float]], list[float]]
Place = tuple[int, int]
"""A row of the batch, and a position of its response."""
VERL_EPSILON = 1e-6
"""What veRL adds to a group's deviation (core_algos.py, compute_grpo_outcome_advantage, at 0.9.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an estimator must know and veRL does not hand it."""

    rows: Sequence[Row | None]
    """[B] of the batch that it is called with; None: padding."""
    estimate: GroupAdvantages
    values: torch.Tensor | None = None
    """[B, T] what the critic expects from before each token on."""
    parts: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Rollout id to what verifiers credit its turns with, by index. Without those where they credit none."""


_known: ContextVar[Known] = ContextVar("agenttrain_verl_known")


@contextmanager
def known(what: Known) -> Iterator[None]:
    """Hold what estimators read while veRL calls them."""
    token = _known.set(what)
    try:
        yield
    finally:
        _known.reset(token)


def _held() -> Known:
    try:
        return _known.get()
    except LookupError:
        raise TrainerError(
            "agenttrain's estimator was called by a trainer that doesn't say which rollouts its rows are of. Use it "
            "through agenttrain's own: agenttrain fit graph.py --trainer verl."
        ) from None


@register_adv_est(OWN_ESTIMATOR)  # type: ignore[untyped-decorator, unused-ignore]
def advantages_and_returns(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What veRL's trainer asks of an estimator, from what is known of the rows.

    Args:
        token_level_rewards: [B, T], not read: every row ends with its rollout's reward, which counts once.
        response_mask: [B, T]
        config: veRL's `algorithm`, whose `gamma` and `lam` are read where there is a critic.

    Returns:
        ([B, T] advantages, [B, T] returns), 0 where nothing is trained.
    """
    what = _held()
    if what.values is None:
        spread = by_group(what.rows, response_mask, what.estimate)
        return spread, spread
    gamma, lam = float(config.gamma), float(config.lam)
    return by_walk(what.rows, response_mask, what.values, discount=gamma, gae_lambda=lam, parts=what.parts)


def by_group(rows: Sequence[Row | None], response_mask: torch.Tensor, estimate: GroupAdvantages) -> torch.Tensor:
    """[B, T] advantages of a group's rollouts, spread over the trained tokens of all of their rows."""
    advantages = rollout_advantages([row for row in rows if row is not None], estimate)
    by_row = [0.0 if row is None else advantages[row.rollout_id] for row in rows]
    return torch.tensor(by_row, dtype=torch.float32)[:, None] * response_mask


def by_walk(
    rows: Sequence[Row | None],
    response_mask: torch.Tensor,
    values: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
    parts: Mapping[str, Mapping[int, float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates of each rollout as one walk, whitened over all trained tokens of the batch.

    Args:
        rows: [B]
        response_mask: [B, T]
        values: [B, T] what the critic expects from before each token on.
        parts: rollout id to what its turns are credited with, by index; each comes with the turn's last token.

    Returns:
        ([B, T] advantages, [B, T] returns), 0 where nothing is trained.

    Source: `agenttrain.trainer.credit.credited`, which does this to a step of the local trainer.
    """
    by_id = by_rollout(row for row in rows if row is not None)
    walks = [walked(own, rows, response_mask) for own in by_id.values()]
    estimates = [
        gae(
            _rewards_of_walk(own, parts.get(rollout_id, {})),
            [float(values[place]) for place in walk],
            discount=discount,
            gae_lambda=gae_lambda,
        )
        for (rollout_id, own), walk in zip(by_id.items(), walks, strict=True)
    ]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    whole = whitened([row for row, _ in estimates])
    for walk, row, (_, expected) in zip(walks, whole, estimates, strict=True):
        for place, advantage, value in zip(walk, row, expected, strict=True):
            advantages[place], returns[place] = advantage, value
    return advantages, returns


def _rewards_of_walk(own: Sequence[Row], parts: Mapping[int, float]) -> list[float]:
    """[n] with each trained token: a turn's credit with its last one, the rollout's reward with the last of all."""
    turns = sorted(turn for row in own for turn, n in row.turns for _ in range(n))
    rewards = [0.0] * sum(row.n_trained for row in own)
    for index, part in parts.items():
        rewards[bisect_right(turns, index) - 1] += part
    rewards[-1] += own[0].reward
    return rewards


def walked(own: Sequence[Row], rows: Sequence[Row | None], response_mask: torch.Tensor) -> list[Place]:
    """The trained tokens of a rollout in the order in which they were sampled: by turn, then row, then position.

    Args:
        own: the rollout's rows, by trajectory.
        rows: [B] of the batch.
        response_mask: [B, T]
    """
    place_by_key = {row.key: n for n, row in enumerate(rows) if row is not None}
    keyed: list[tuple[int, int, Place]] = []
    for s, row in enumerate(own):
        at = place_by_key[row.key]
        turns = [turn for turn, n in row.turns for _ in range(n)] or [0] * row.n_trained
        positions = response_mask[at].nonzero()[:, 0].tolist()
        keyed += [(turn, s, (at, position)) for turn, position in zip(turns, positions, strict=True)]
    return [place for *_, place in sorted(keyed)]


def credited_parts(taught: Sequence[Lesson]) -> dict[str, dict[int, float]]:
    """Rollout id to what verifiers credit its trained turns with, by index; only rollouts of which they credit some."""
    return {one.rollout_id: parts_by_turn(one.result) for one in taught if has_credit(one.result)}


def credited_rows(rows: Sequence[Row], taught: Sequence[Lesson]) -> dict[str, Sequence[float]]:
    """Row to the advantages of its trained tokens; only rows of groups in which verifiers credit nodes or turns.

    Source: `agenttrain.trainer.batches.lessons`, as in the local trainer.
    """
    by_place = {
        (one.rollout_id, sample.extra_fields["trajectory"]): advantages
        for one in taught
        if one.by_token
        for sample, advantages in zip(one.samples, one.by_token, strict=True)
    }
    places = {row.key: (row.rollout_id, row.trajectory) for row in rows}
    return {key: by_place[place] for key, place in places.items() if place in by_place}


def rollout_advantages(rows: Sequence[Row], estimate: GroupAdvantages) -> dict[str, float]:
    """Rollout id to its advantage among the rollouts of its group, each counted once."""
    return {
        rollout_id: advantage
        for group in _rewards(rows).values()
        for rollout_id, advantage in zip(group, estimate(list(group.values())), strict=True)
    }


def deviation_factors(rows: Sequence[Row]) -> dict[str, float]:
    """Group id to what veRL's advantages "grpo" are multiplied by, so that the deviation is that of the group itself.

    veRL divides by the deviation with n - 1, plus 1e-6; agenttrain by that with n (core_algos.py at 0.9.1).

    Example: rewards 1, 0: deviations 0.7071 and 0.5: 1.4142.
    """
    return {group_id: _deviation_factor(list(group.values())) for group_id, group in _rewards(rows).items()}


def _rewards(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Group id to rollout id to reward."""
    rewards: dict[str, dict[str, float]] = {}
    for row in rows:
        rewards.setdefault(row.group_id, {})[row.rollout_id] = row.reward
    return rewards


def _deviation_factor(rewards: Sequence[float]) -> float:
    n = len(rewards)
    if n < 2 or all_equal(rewards):
        return 1.0
    mean = math.fsum(rewards) / n
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    return (math.sqrt(squares / (n - 1)) + VERL_EPSILON) / math.sqrt(squares / n)
