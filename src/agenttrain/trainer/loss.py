"""Log probabilities and advantages to the clipped policy loss, in which every sampled token weighs once.

Weights are computed per rollout, so that splitting a rollout into several trajectories changes neither the loss nor its
gradient. Beside the policy's loss: what a critic's values are held to, and how far the policy is from another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agenttrain.errors import SampleError

LossMean = Literal["token-mean", "rollout-mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of some tokens and what is reported of it."""

    loss: torch.Tensor
    """Scalar; the sum over the micro-batches of an update is its loss."""
    n_clipped: int
    """Tokens whose ratio was outside of the bounds on the side that the advantage pushes to."""


def token_weights(
    n_trained: Sequence[int],
    rollout_ids: Sequence[str],
    *,
    mean: LossMean = "token-mean",
    constant: int = 1,
    shares: Mapping[str, float] | None = None,
) -> list[float]:
    """What each trained token of each trajectory weighs in one update.

    Args:
        n_trained: [S] tokens with mask 1 in each trajectory.
        rollout_ids: [S] the rollout that each trajectory is of.
        mean: "token-mean": 1 / all tokens. "rollout-mean": 1 / (rollouts × tokens of this rollout). "constant":
            1 / (rollouts × constant).
        constant: tokens that a rollout may have; read by "constant" alone.
        shares: rollout id to how many rollouts it counts as, above 0. None: each as one.

    Returns:
        [S] weights of one token; those of all tokens sum to 1, but for "constant". A rollout without trained tokens is
        not counted.

    Raises:
        SampleError: no token is trained.

    Example: n_trained [2, 1, 1], rollout_ids [a, a, b]: token-mean [1/4, 1/4, 1/4], rollout-mean [1/6, 1/6, 1/2],
    constant 5: [1/10, 1/10, 1/10]; token-mean where a counts as half a rollout: [1/5, 1/5, 2/5].
    """
    by_rollout: dict[str, int] = {}
    for n, rollout_id in zip(n_trained, rollout_ids, strict=True):
        by_rollout[rollout_id] = by_rollout.get(rollout_id, 0) + n
    if not any(by_rollout.values()):
        raise SampleError(f"None of {len(n_trained)} trajectories has a trained token. Drop such updates before.")
    share = {rollout_id: (shares or {}).get(rollout_id, 1.0) for rollout_id in by_rollout}
    if mean == "token-mean":
        total = math.fsum(share[i] * n for i, n in by_rollout.items())
        return [share[i] / total for i in rollout_ids]
    n_rollouts = math.fsum(share[i] for i, n in by_rollout.items() if n)
    if mean == "constant":
        return [share[i] / (n_rollouts * constant) for i in rollout_ids]
    return [share[i] / (n_rollouts * by_rollout[i]) if by_rollout[i] else 0.0 for i in rollout_ids]


def token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """How much likelier each token is now than when it was sampled: [N], [N] -> [N].

    Example: probability 0.3 against 0.2: 1.5.
    """
    return (logprobs - old_logprobs).exp()


def rollout_ratio(logprobs: torch.Tensor, mean_log_ratios: torch.Tensor) -> torch.Tensor:
    """The ratio of each token's rollout: the geometric mean of its tokens' ratios, with the gradient of all of them.

    The value is known before the pass, since a rollout's trajectories may be in different ones; the gradient of the
    token's own share flows through its log probability. Weighed by 1 / tokens and summed over the rollout that is the
    gradient of the rollout's ratio.

    Args:
        logprobs: [N] at the weights of now; carries the gradient.
        mean_log_ratios: [N] mean over the token's rollout of log ratios, at the same weights.

    Source: GSPO, arXiv:2507.18071, equations 7 and 14.

    Example: log ratios [0.4, 0.0] of one rollout: exp(0.2) = 1.2214 for both tokens.
    """
    return (mean_log_ratios + logprobs - logprobs.detach()).exp()


def clipped_loss(
    ratio: torch.Tensor, *, advantages: torch.Tensor, weights: torch.Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate, weighted and negated.

    Args:
        ratio: [N] of the trained tokens, now against when they were sampled; carries the gradient.
        advantages: [N]
        weights: [N] from `token_weights`, times what corrects for the engine.
        clip_low: the ratio is held above 1 - clip_low.
        clip_high: and below 1 + clip_high.

    Source: PPO, arXiv:1707.06347, equation 7, with the two bounds of DAPO, arXiv:2503.14476, section 3.1.

    Example: one token, ratio 1.5, advantage 2, bounds 0.2 and 0.28: loss -(1.28 × 2) = -2.56, gradient 0.
    """
    free = ratio * advantages
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    n_clipped = int((held < free).sum())
    return PolicyLoss(loss=-(torch.minimum(free, held) * weights).sum(), n_clipped=n_clipped)


def likelihood_loss(logprobs: torch.Tensor, *, weights: torch.Tensor) -> PolicyLoss:
    """The negative log likelihood, weighted; nothing is clipped.

    Args:
        logprobs: [N] of the trained tokens, without a temperature; carries the gradient.
        weights: [N] from `token_weights`.

    Example: probabilities 1/2 and 1/8, weights 1/2 each: 2 log 2 = 1.3863.
    """
    return PolicyLoss(loss=-(logprobs * weights).sum(), n_clipped=0)


def importance_weights(trainer_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """What each token's loss is weighed by, since the engine that sampled is not quite the trainer.

    Args:
        trainer_logprobs: [N] at the weights that the step began with.
        engine_logprobs: [N] as recorded when they were sampled.
        cap: no weight is more; without it a token that the engine thought very unlikely would rule an update.

    Returns:
        [N] above 0, without gradient.

    Source: V-trace's truncation, arXiv:1802.01561, section 4.1, for engines of language models as Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.

    Example: probabilities 0.5 against 0.1 and 0.1 against 0.2, cap 2: [2, 0.5].
    """
    return (trainer_logprobs - engine_logprobs).detach().exp().clamp(max=cap)


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) on each sampled token, without bias: [N], [N] -> [N]; it may be negative.

    It goes into the reward. As a term of a loss it would teach nothing: its gradient is that of the log probability,
    which is 0 on average over what the policy samples.

    Source: J. Schulman, "Approximating KL Divergence", 2020.

    Example: probability 0.5 against 0.25: log 2 = 0.6931.
    """
    return logprobs - reference_logprobs


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) on each sampled token, never negative and without bias: [N], [N] -> [N].

    It goes into the loss. Its derivative by a log probability is 1 - reference / policy, so that over the policy's own
    samples its gradient is that of KL(reference || policy), which has the same minimum.

    Source: J. Schulman, "Approximating KL Divergence", 2020; GRPO, arXiv:2402.03300, equation 4.

    Example: probability 0.5 against 0.25: 0.5 - log 0.5 - 1 = 0.1931.
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.expm1() - log_ratio


def value_loss(
    values: torch.Tensor, *, old_values: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, clip: float
) -> torch.Tensor:
    """Half the squared error of a critic, in which moving by more than the clip gains nothing.

    Args:
        values: [N] carries the gradient.
        old_values: [N] when the step began.
        returns: [N] what they are held to.
        weights: [N]
        clip: values are held within this distance of the old ones, and the worse of the two errors counts.

    Returns:
        Scalar.

    Source: the clipped value error of PPO's own implementation, as told in arXiv:2005.12729, section 3.

    Example: value 1.5, old 1, return 2, clip 0.2: held at 1.2; errors 0.25 and 0.64: loss 0.32.
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    worse = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    return 0.5 * (worse * weights).sum()
