"""Log probabilities and advantages to the clipped policy loss, in which every sampled token weighs once.

Weights are computed per rollout and sum to 1 over an update, so that splitting a rollout into several trajectories
changes neither the loss nor its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agenttrain.errors import SampleError

LossMean = Literal["token-mean", "rollout-mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of some tokens and what is reported of it."""

    loss: torch.Tensor
    """Scalar; the sum over the micro-batches of an update is its loss."""
    n_clipped: int
    """Tokens whose ratio was outside of the bounds on the side that the advantage pushes to."""


def token_weights(
    n_trained: Sequence[int], rollout_ids: Sequence[str], *, mean: LossMean = "token-mean"
) -> list[float]:
    """What each trained token of each trajectory weighs in one update.

    Args:
        n_trained: [S] tokens with mask 1 in each trajectory.
        rollout_ids: [S] the rollout that each trajectory is of.
        mean: "token-mean": 1 / all tokens. "rollout-mean": 1 / (rollouts × tokens of this rollout).

    Returns:
        [S] weights of one token; those of all tokens sum to 1. A rollout without trained tokens is not counted.

    Raises:
        SampleError: no token is trained.

    Example: n_trained [2, 1, 1], rollout_ids [a, a, b]: token-mean [1/4, 1/4, 1/4], rollout-mean [1/6, 1/6, 1/2].
    """
    by_rollout: dict[str, int] = {}
    for n, rollout_id in zip(n_trained, rollout_ids, strict=True):
        by_rollout[rollout_id] = by_rollout.get(rollout_id, 0) + n
    total = sum(by_rollout.values())
    if total == 0:
        raise SampleError(f"None of {len(n_trained)} trajectories has a trained token. Drop such updates before.")
    if mean == "token-mean":
        return [1.0 / total] * len(n_trained)
    n_rollouts = sum(n > 0 for n in by_rollout.values())
    return [1.0 / (n_rollouts * by_rollout[i]) if by_rollout[i] else 0.0 for i in rollout_ids]


def policy_loss(
    logprobs: torch.Tensor,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped surrogate, weighted and negated.

    Args:
        logprobs: [N] of the trained tokens, at the weights of now; carries the gradient.
        old_logprobs: [N] as recorded when they were sampled.
        advantages: [N]
        weights: [N] from `token_weights`.
        clip_low: the ratio is held above 1 - clip_low.
        clip_high: and below 1 + clip_high.

    Source: PPO, arXiv:1707.06347, equation 7, with the two bounds of DAPO, arXiv:2503.14476, section 3.1.

    Example: one token, ratio 1.5, advantage 2, bounds 0.2 and 0.28: loss -(1.28 × 2) = -2.56, gradient 0.
    """
    ratio = (logprobs - old_logprobs).exp()
    free = ratio * advantages
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    n_clipped = int((held < free).sum())
    return PolicyLoss(loss=-(torch.minimum(free, held) * weights).sum(), n_clipped=n_clipped)
