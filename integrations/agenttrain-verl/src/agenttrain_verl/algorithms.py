"""Our table [trainer] to what veRL has to be told of an algorithm. Refuses by name what veRL's loss can't do.

veRL's loss sees rows, and a rollout may have several. Three of its means count a rollout once as they are: token-mean,
seq-mean-token-sum-norm with the number of rollouts as its batch size, and token-sum over advantages that hold the
weight already. Knows nothing of rows: `counted` and `credit` do what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agenttrain.errors import ConfigError
from agenttrain.trainer.algorithms import chosen

if TYPE_CHECKING:
    from agenttrain.config import TrainerTable

OWN_ESTIMATOR = "agenttrain"
"""What our estimator is registered as with veRL."""
SIBLINGS_OF_VERL = {"group": True, "centered": False}
"""Advantages that veRL's "grpo" gives, which counts a rollout once, to whether it divides by the deviation."""
AGGREGATED = {"token-mean": "token-mean", "rollout-mean": "token-sum", "constant": "seq-mean-token-sum-norm"}
"""Our means of a loss to veRL's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlAlgorithm:
    """One way of training in veRL's words."""

    advantage: str
    """Name of agenttrain's estimator."""
    adv_estimator: str
    """Name of the estimator that veRL calls: its own "grpo", or ours."""
    norm_by_std: bool
    """Whether veRL's "grpo" divides by the group's standard deviation."""
    loss_agg_mode: str
    policy_loss: str
    """"vanilla": each token's ratio is clipped; "gspo": that of a row, which `reanchors` makes a rollout's."""
    scales_by_rollout: bool
    """Whether advantages are divided by rollouts × tokens of the rollout before a sum over tokens."""
    is_constant: bool
    """Whether the loss is divided by rollouts × limits.tokens."""
    reanchors: bool
    """Whether old log probabilities are shifted, so that every row of a rollout has the rollout's mean log ratio."""
    critic: bool
    clip_low: float
    clip_high: float


def of(settings: TrainerTable) -> VerlAlgorithm:
    """What a run's trainer table is for veRL.

    Raises:
        ConfigError: a combination that can't be right, or that veRL's loss can't count once per rollout.
    """
    algorithm = chosen(settings)
    critic, advantage = algorithm.critic is not None, algorithm.advantage
    if advantage is None:
        raise ConfigError(
            f"trainer.name is {settings.name!r}, which learns without advantages, and veRL trains by them. Set "
            'trainer.name = "verl".'
        )
    _refuse(settings, mean=algorithm.loss, critic=critic)
    of_verl = not critic and advantage in SIBLINGS_OF_VERL
    return VerlAlgorithm(
        advantage=advantage,
        adv_estimator="grpo" if of_verl else OWN_ESTIMATOR,
        norm_by_std=SIBLINGS_OF_VERL.get(advantage, False),
        loss_agg_mode=AGGREGATED[algorithm.loss],
        policy_loss="gspo" if algorithm.ratio == "rollout" else "vanilla",
        scales_by_rollout=algorithm.loss == "rollout-mean",
        is_constant=algorithm.loss == "constant",
        reanchors=algorithm.ratio == "rollout",
        critic=critic,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )


def _refuse(settings: TrainerTable, *, mean: str, critic: bool) -> None:
    cost = settings.kl_coefficient
    if cost and settings.kl == "k1":
        raise ConfigError(
            f'trainer.kl is "k1" and trainer.kl_coefficient {cost:g}: veRL takes it from the reward of each row, and a '
            'rollout may have several. Set trainer.kl = "k3", a term of the loss, or use --trainer local.'
        )
    if cost and mean == "rollout-mean":
        raise ConfigError(
            f"trainer.kl_coefficient is {cost:g} and the loss a rollout-mean (trainer.algorithm "
            f"{settings.algorithm!r}): veRL adds up the distance over tokens without a rollout's weight. Set "
            'trainer.loss = "token-mean", leave trainer.kl_coefficient out, or use --trainer local.'
        )
    if critic and mean == "rollout-mean":
        raise ConfigError(
            f'trainer.loss is "rollout-mean" and trainer.algorithm {settings.algorithm!r} has a critic, whose loss '
            'veRL adds up over tokens without a rollout\'s weight. Set trainer.loss = "token-mean", or use '
            "--trainer local."
        )
