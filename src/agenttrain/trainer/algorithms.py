"""A name in `trainer.algorithm` to what it stands for: which advantage, ratio, mean and bounds, and whether a critic.

A trainer may have an algorithm of its own, which `trainer.algorithm` can't name. What a user sets explicitly wins over
the declaration; combinations that can't be right are refused. Knows no mathematics: `advantage`, `credit` and `loss` do
that, and each algorithm's example is worked by their functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.config import Config, TrainerTable
    from agenttrain.trainer.loss import LossMean

Ratio = Literal["token", "rollout", "none"]
LearnsFrom = Literal["differences", "successes"]
OVERRIDES = ("advantage", "loss", "clip_low", "clip_high")
"""Keys of `trainer` that stand over an algorithm's own."""
OF_CRITICS = ("discount", "gae_lambda", "value_learning_rate", "value_clip", "critic_warmup_steps")
"""Keys of `trainer` that only an algorithm with a critic reads."""
OF_POLICY_GRADIENTS = ("advantage", "clip_low", "clip_high", "importance_cap", "kl_coefficient", *OF_CRITICS)
"""Keys of `trainer` that say how rewards move a policy; plain likelihood reads none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """How values are learned and what they are used for."""

    discount: float = 1.0
    """Per trained token; the context between two turns takes no time."""
    gae_lambda: float = 1.0
    """1: no bias from a critic that has seen little; under 1, less noise once it is good."""
    value_learning_rate: float = 1e-2
    value_clip: float = 0.2
    """A value moves at most this far from where it was when the step began."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What one way of training is made of."""

    advantage: str | None
    """Name of an advantage estimator. None: what is trained is not compared."""
    ratio: Ratio
    """What is clipped: each token's probability ratio, or the geometric mean of a rollout's. "none": nothing is, the
    loss is the negative log likelihood."""
    loss: LossMean
    clip_low: float
    clip_high: float
    critic: Critic | None = None
    """None: the siblings of a rollout are its baseline."""

    @property
    def learns_from(self) -> LearnsFrom:
        """What it takes for a group to teach: that its rewards differ, or a success."""
        return "successes" if self.ratio == "none" else "differences"


GRPO = Algorithm(advantage="group", ratio="token", loss="token-mean", clip_low=0.2, clip_high=0.28)
"""Each rollout against its siblings, in units of their standard deviation.

Source: arXiv:2402.03300, section 4.1.2; token-mean and the higher upper bound as in DAPO, arXiv:2503.14476.

Example: rewards [1, 0], one token each, ratios [1.5, 1]: advantages [1, -1], loss -(1.28 - 1) / 2 = -0.14.
"""
DR_GRPO = Algorithm(advantage="centered", ratio="token", loss="constant", clip_low=0.2, clip_high=0.2)
"""GRPO without its two biases: no standard deviation, and a constant in place of lengths.

Source: arXiv:2503.20783, section 3.2; the constant is `limits.tokens`, the mean is over an update's rollouts.

Example: rewards [1, 0], tokens [2, 1], constant 4, ratios 1: advantages [1/2, -1/2], loss
-(2 × 1/2 - 1 × 1/2) / (2 × 4) = -0.0625.
"""
RLOO = Algorithm(advantage="leave-one-out", ratio="token", loss="token-mean", clip_low=0.2, clip_high=0.2)
"""Each rollout against the mean of the others: REINFORCE with a baseline that it has no part in.

Source: arXiv:2402.14740, section 2.2. At ratio 1 the gradient is the paper's sum over a rollout's tokens, up to one
factor for the whole update; the clipped ratio corrects the updates after the first.

Example: rewards [1, 0, 0], one token each, ratios 1: advantages [1, -1/2, -1/2], loss 0; gradient by the first
log probability -1/3.
"""
GSPO = Algorithm(advantage="group", ratio="rollout", loss="rollout-mean", clip_low=3e-4, clip_high=4e-4)
"""GRPO with one ratio per rollout: the geometric mean of its tokens' ratios, over all of its trajectories.

Source: arXiv:2507.18071, equations 5 to 7; bounds of section 5.1.

Example: rewards [1, 0]; log ratios of the first rollout's two tokens [0.2, -0.2]: its ratio is exp(0) = 1 and is not
clipped, though token ratios of 1.22 and 0.82 would leave these bounds; the second's only ratio is 1: loss 0.
"""
PPO = Algorithm(advantage="reward", ratio="token", loss="token-mean", clip_low=0.2, clip_high=0.2, critic=Critic())
"""Each token against what a critic expected there.

Source: arXiv:1707.06347, equations 7 and 9, with advantages of arXiv:1506.02438, equation 16, whitened over the batch.

Example: one rollout of two tokens, reward 1, values [0.4, 0.6], discount 1, lambda 0.5: errors [0.2, 0.4],
advantages [0.2 + 0.5 × 0.4, 0.4] = [0.4, 0.4], returns [0.8, 1.0].
"""
SFT = Algorithm(advantage=None, ratio="none", loss="token-mean", clip_low=math.inf, clip_high=math.inf)
"""The likelihood of rollouts that succeeded, each task's together weighing as much as any other's.

Source: rejection sampling fine-tuning, arXiv:2308.01825, section 3.3; a bound on what easy tasks weigh as in
arXiv:2312.06585, section 5.

Example: two successes of task a, of one token each, probabilities 1/2 and 1/4; one of task b, one token, 1/8:
(log 2 / 2 + log 4 / 2 + log 8) / 2 = 2.25 log 2 = 1.5596.
"""
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {"grpo": GRPO, "dr_grpo": DR_GRPO, "rloo": RLOO, "gspo": GSPO, "ppo": PPO}
)
OF_TRAINERS: Mapping[str, Algorithm] = MappingProxyType({"sft": SFT})
"""By `trainer.name`: those that stand in the place of `trainer.algorithm`'s."""


def chosen(settings: TrainerTable) -> Algorithm:
    """The algorithm of a configuration, with what was set explicitly in its place.

    Raises:
        ConfigError: a combination that can't be right.
    """
    algorithm = OF_TRAINERS.get(settings.name) or ALGORITHMS[settings.algorithm]
    _check(settings, algorithm)
    explicit = {key: value for key in OVERRIDES if (value := getattr(settings, key)) is not None}
    if algorithm.critic is not None:
        own = {key: value for key in OF_CRITICS if (value := getattr(settings, key)) is not None}
        explicit["critic"] = replace(algorithm.critic, **own)
    return replace(algorithm, **explicit)


def algorithm_name(settings: TrainerTable) -> str:
    """What a report calls it: the trainer's name where its algorithm is its own."""
    return settings.name if settings.name in OF_TRAINERS else settings.algorithm


def with_algorithm(config: Config) -> Config:
    """The configuration with everything that its algorithm decides written out.

    Raises:
        ConfigError: a combination that can't be right.
    """
    algorithm = chosen(config.trainer)
    keys = ("loss",) if algorithm.ratio == "none" else OVERRIDES
    decided = {key: getattr(algorithm, key) for key in keys}
    if algorithm.critic is not None:
        decided |= {key: getattr(algorithm.critic, key) for key in OF_CRITICS}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=decided)})


def _check(settings: TrainerTable, algorithm: Algorithm) -> None:
    name = settings.algorithm
    if algorithm.ratio == "none":
        _check_likelihood(settings)
        return
    if algorithm.critic is not None and settings.advantage not in (None, algorithm.advantage):
        raise ConfigError(
            f"trainer.algorithm is {name!r}, whose advantages come from a critic, and trainer.advantage is "
            f"{settings.advantage!r}, which compares siblings. Leave trainer.advantage out, or take one of: "
            f"{', '.join(other for other, a in ALGORITHMS.items() if a.critic is None)}."
        )
    if algorithm.critic is None:
        for key in OF_CRITICS:
            if getattr(settings, key) is not None:
                raise ConfigError(
                    f"trainer.{key} is {getattr(settings, key)!r}, and trainer.algorithm {name!r} has no critic that "
                    f'would read it. Leave it out, or set trainer.algorithm = "ppo".'
                )
        if settings.group_size < 2:
            raise ConfigError(
                f"trainer.group_size is {settings.group_size}, and trainer.algorithm {name!r} compares the rollouts of "
                'a group. Set it to 2 or more, or trainer.algorithm = "ppo".'
            )


def _check_likelihood(settings: TrainerTable) -> None:
    for key in OF_POLICY_GRADIENTS:
        value = getattr(settings, key)
        if value != type(settings).model_fields[key].default:
            raise ConfigError(
                f"trainer.{key} is {value!r}, and trainer.name {settings.name!r} would not read it: its loss is the "
                "negative log likelihood of successes, without advantages, ratios or a reference. Leave it out, or "
                "write it in [local.trainer], which the local trainer alone reads."
            )
