"""Are the algorithms those of veRL, to the last digits?

    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch agenttrain ray tensordict==0.10.0 codetiming hydra-core
    /tmp/verl/bin/pip install --no-deps verl==0.9.1 && /tmp/verl/bin/python benchmarks/parity.py

Random batches in float64, some tokens masked: each function against its counterpart in `verl.trainer.ppo`, losses with
their gradients. veRL divides by a standard deviation of n - 1 plus 1e-6 (groups), or n - 1 plus 1e-8 under the root
(whitening): its numbers are multiplied by its own divisor and divided by the one of n before they are compared. It adds
1e-8 to a rollout's number of tokens (GSPO), and holds k3 under 10, which these batches do not reach.
Prints one line per function on standard error and one JSON object; exits 1 when a difference is above 1e-8.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from agenttrain.trainer.advantage import centered_advantages, group_advantages, leave_one_out_advantages
from agenttrain.trainer.credit import gae, whitened
from agenttrain.trainer.loss import (
    LossMean,
    clipped_loss,
    importance_weights,
    k1,
    k3,
    rollout_ratio,
    token_ratio,
    token_weights,
    value_loss,
)

N_CASES, LARGEST = 200, 1e-8
GROUPS, SIBLINGS, WIDTH, CONSTANT = 3, 4, 9, 12
UNUSED = 1e9
"""veRL's second bound on negative advantages, which none of ours has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Random numbers of B rollouts of up to T tokens."""

    rewards: torch.Tensor
    """[B]"""
    mask: torch.Tensor
    """[B, T]"""
    new: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    """[B, T] one number per rollout."""
    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    group: np.ndarray[Any, Any]
    """[B]"""

    @property
    def at(self) -> torch.Tensor:
        """Where tokens are trained."""
        return self.mask.bool()

    def weights(self, mean: LossMean) -> torch.Tensor:
        """[N] of the trained tokens."""
        n = self.mask.sum(1).int().tolist()
        each = token_weights(n, [str(i) for i in range(len(n))], mean=mean, constant=CONSTANT)
        return torch.tensor(each, dtype=torch.float64).repeat_interleave(torch.tensor(n))


def batch(seed: int) -> Batch:
    draw, n = torch.Generator().manual_seed(seed), GROUPS * SIBLINGS

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(n, WIDTH, generator=draw, dtype=torch.float64)

    mask = (torch.rand(n, WIDTH, generator=draw) < 0.7).double()
    mask[:, 0] = 1
    old = normal() - 2
    return Batch(
        rewards=torch.rand(n, generator=draw, dtype=torch.float64),
        mask=mask,
        new=old + normal(0.3),
        old=old,
        reference=old + normal(0.3),
        advantages=torch.randn(n, 1, generator=draw, dtype=torch.float64).expand(n, WIDTH).contiguous(),
        values=normal(),
        old_values=normal(),
        returns=normal(),
        group=np.repeat(np.arange(GROUPS), SIBLINGS),
    )


def by_group(b: Batch, estimate: Callable[[list[float]], list[float]]) -> torch.Tensor:
    parts = b.rewards.split(SIBLINGS)
    return torch.tensor([a for part in parts for a in estimate(part.tolist())], dtype=torch.float64)


def at_last(b: Batch) -> torch.Tensor:
    """[B, T] the reward with each rollout's last trained token."""
    rewards = torch.zeros_like(b.mask)
    for row, mask in enumerate(b.mask):
        rewards[row, int(mask.nonzero()[-1])] = b.rewards[row]
    return rewards


def loss_and_gradient(loss: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """One line of numbers: the loss, and its gradient at every place."""
    leaf = at.clone().requires_grad_(True)
    value = loss(leaf)
    return torch.cat([value.detach().reshape(1), torch.autograd.grad(value, leaf)[0].flatten()])


def grpo(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    theirs = core.compute_grpo_outcome_advantage(at_last(b), b.mask, b.group)[0][:, 0]
    groups = b.rewards.split(SIBLINGS)
    factors = torch.stack([(g.std() + 1e-6) / g.std(correction=0) for g in groups]).repeat_interleave(SIBLINGS)
    return by_group(b, group_advantages), theirs * factors


def dr_grpo(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages, and the loss over them with a constant in place of lengths."""
    theirs = core.compute_grpo_outcome_advantage(at_last(b), b.mask, b.group, norm_adv_by_std_in_grpo=False)[0]
    ours = by_group(b, centered_advantages)
    config = actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=CONSTANT)
    config.global_batch_info["loss_scale_factor"] = CONSTANT

    def loss(new: torch.Tensor) -> torch.Tensor:
        each = ours[:, None].expand_as(b.mask)
        return clipped(b, new, each, "constant")

    def their_loss(new: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = core.compute_policy_loss_vanilla(
            b.old, new, theirs, b.mask, "seq-mean-token-sum-norm", config
        )[0]
        return value

    return (
        torch.cat([ours, loss_and_gradient(loss, b.new)]),
        torch.cat([theirs[:, 0], loss_and_gradient(their_loss, b.new)]),
    )


def rloo(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    theirs = core.compute_rloo_outcome_advantage(at_last(b), b.mask, b.group)[0][:, 0]
    return by_group(b, leave_one_out_advantages), theirs


def clipped(b: Batch, new: torch.Tensor, advantages: torch.Tensor, mean: LossMean) -> torch.Tensor:
    return clipped_loss(
        token_ratio(new[b.at], b.old[b.at]),
        advantages=advantages[b.at],
        weights=b.weights(mean),
        clip_low=0.2,
        clip_high=0.28,
    ).loss


def policy(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def theirs(new: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = core.compute_policy_loss_vanilla(b.old, new, b.advantages, b.mask, "token-mean", actor())[
            0
        ]
        return value

    return (
        loss_and_gradient(lambda new: clipped(b, new, b.advantages, "token-mean"), b.new),
        loss_and_gradient(theirs, b.new),
    )


def gspo(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def ours(new: torch.Tensor) -> torch.Tensor:
        means = ((new - b.old) * b.mask).sum(1).detach() / b.mask.sum(1)
        return clipped_loss(
            rollout_ratio(new[b.at], means[:, None].expand_as(new)[b.at]),
            advantages=b.advantages[b.at],
            weights=b.weights("rollout-mean"),
            clip_low=0.2,
            clip_high=0.28,
        ).loss

    def theirs(new: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = core.compute_policy_loss_gspo(
            b.old, new, b.advantages, b.mask, "seq-mean-token-mean", actor()
        )[0]
        return value

    return loss_and_gradient(ours, b.new), loss_and_gradient(theirs, b.new)


def generalised(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, and whitened advantages."""
    rewards, discount, smoothing = at_last(b), 0.99, 0.9
    whitened_, theirs = core.compute_gae_advantage_return(rewards, b.values, b.mask, discount, smoothing)
    walks = [
        gae(r[m].tolist(), v[m].tolist(), discount=discount, gae_lambda=smoothing)
        for r, v, m in zip(rewards, b.values, b.at, strict=True)
    ]
    plain = (theirs - b.values)[b.at]
    scaled = whitened_[b.at] * (plain.var() + 1e-8).sqrt() / plain.std(correction=0)
    ours = [number for _, row in walks for number in row]
    ours += [number for row in whitened([row for row, _ in walks]) for number in row]
    return torch.tensor(ours, dtype=torch.float64), torch.cat([theirs[b.at], scaled])


def value(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def ours(values: torch.Tensor) -> torch.Tensor:
        return value_loss(
            values[b.at],
            old_values=b.old_values[b.at],
            returns=b.returns[b.at],
            weights=b.weights("token-mean"),
            clip=0.2,
        )

    def theirs(values: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = core.compute_value_loss(values, b.returns, b.old_values, b.mask, 0.2)[0]
        return loss

    return loss_and_gradient(ours, b.values), loss_and_gradient(theirs, b.values)


def distance(name: str, ours: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def compare(b: Batch, core: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            loss_and_gradient(lambda new: ours(new, b.reference).sum(), b.new),
            loss_and_gradient(lambda new: core.kl_penalty(new, b.reference, name).sum(), b.new),
        )

    return compare


def importance(b: Batch, _core: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    theirs, _ = compute_rollout_correction_weights(b.new - b.old, b.mask, "token", 1.2)
    return importance_weights(b.new[b.at], b.old[b.at], 1.2), theirs[b.at]


def actor(**settings: Any) -> Any:
    """veRL's settings of a policy loss."""
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=UNUSED,
        **settings,
    )


CASES: dict[str, Callable[[Batch, Any], tuple[torch.Tensor, torch.Tensor]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "clipped loss": policy,
    "gspo": gspo,
    "gae": generalised,
    "value loss": value,
    "k1": distance("k1", k1),
    "k3": distance("k3", k3),
    "importance": importance,
}


def main() -> int:
    import verl.trainer.ppo.core_algos as core

    found = {}
    for name, compare in CASES.items():
        pairs = [compare(batch(seed), core) for seed in range(N_CASES)]
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        found[name] = {"cases": N_CASES, "difference": difference}
        print(f"{name:<14} {difference:.1e}", file=sys.stderr)
    print(json.dumps(found))
    return int(any(each["difference"] > LARGEST for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
