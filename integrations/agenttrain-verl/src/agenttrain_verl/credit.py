"""Rewards of rollouts to an advantage for each token of veRL's rows: a rollout counts once, whatever its rows.

veRL calls an estimator with tensors of rows and nothing that tells whose they are, so what is known of the rows is held
in a context variable meanwhile. Registered here is "agenttrain": any estimator of agenttrain over a group's rewards, or
with a critic one walk over a rollout's trained tokens in the order in which they were sampled. veRL's own "grpo" reads
a rollout's last row alone, which is right, and is put in units of the deviation that agenttrain divides by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from agenttrain.errors import TrainerError
from agenttrain.trainer.advantage import all_equal
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
    return by_walk(what.rows, response_mask, what.values, discount=float(config.gamma), gae_lambda=float(config.lam))


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates of each rollout as one walk, whitened over all trained tokens of the batch.

    Args:
        rows: [B]
        response_mask: [B, T]
        values: [B, T] what the critic expects from before each token on.

    Returns:
        ([B, T] advantages, [B, T] returns), 0 where nothing is trained.

    Source: `agenttrain.trainer.credit.credited`, which does this to a step of the local trainer.
    """
    by_id = by_rollout(row for row in rows if row is not None)
    walks = [walked(own, rows, response_mask) for own in by_id.values()]
    estimates = [
        gae(
            [0.0] * (len(walk) - 1) + [own[0].reward],
            [float(values[place]) for place in walk],
            discount=discount,
            gae_lambda=gae_lambda,
        )
        for own, walk in zip(by_id.values(), walks, strict=True)
    ]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    whole = whitened([row for row, _ in estimates])
    for walk, row, (_, expected) in zip(walks, whole, estimates, strict=True):
        for place, advantage, value in zip(walk, row, expected, strict=True):
            advantages[place], returns[place] = advantage, value
    return advantages, returns


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
