"""Our trainer table in veRL's words."""

from __future__ import annotations

import pytest
from agenttrain.config import TrainerTable
from agenttrain.errors import ConfigError

from agenttrain_verl.algorithms import of


@pytest.mark.parametrize(
    ("algorithm", "estimator", "by_std", "mean", "loss", "scales", "reanchors", "critic"),
    [
        ("grpo", "grpo", True, "token-mean", "vanilla", False, False, False),
        ("dr_grpo", "grpo", False, "seq-mean-token-sum-norm", "vanilla", False, False, False),
        ("rloo", "agenttrain", False, "token-mean", "vanilla", False, False, False),
        ("gspo", "grpo", True, "token-sum", "gspo", True, True, False),
        ("ppo", "agenttrain", False, "token-mean", "vanilla", False, False, True),
    ],
)
def test_each_algorithm(
    algorithm: str, estimator: str, by_std: bool, mean: str, loss: str, scales: bool, reanchors: bool, critic: bool
) -> None:
    made = of(TrainerTable.model_validate({"algorithm": algorithm}))
    assert (made.adv_estimator, made.norm_by_std) == (estimator, by_std)
    assert (made.loss_agg_mode, made.policy_loss) == (mean, loss)
    assert (made.scales_by_rollout, made.reanchors, made.critic) == (scales, reanchors, critic)


def test_a_plugins_advantage_goes_through_our_estimator() -> None:
    made = of(TrainerTable(advantage="of-a-plugin"))
    assert (made.adv_estimator, made.advantage) == ("agenttrain", "of-a-plugin")


def test_a_trainer_that_learns_without_advantages_is_none_of_verls() -> None:
    with pytest.raises(ConfigError, match="'sft', which learns without advantages"):
        of(TrainerTable(name="sft"))


def test_bounds_are_the_algorithms_or_the_users() -> None:
    assert (of(TrainerTable()).clip_low, of(TrainerTable()).clip_high) == (0.2, 0.28)
    assert of(TrainerTable(clip_high=0.4)).clip_high == 0.4


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"kl": "k1", "kl_coefficient": 0.1}, 'trainer.kl = "k3"'),
        ({"algorithm": "gspo", "kl_coefficient": 0.1}, "trainer.kl_coefficient is 0.1 and the loss a rollout-mean"),
        ({"algorithm": "ppo", "loss": "rollout-mean"}, "has a critic"),
    ],
)
def test_what_verls_loss_would_count_by_rows_is_refused(table: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match="--trainer local") as error:
        of(TrainerTable.model_validate(table))
    assert named in str(error.value)


def test_k1_without_a_coefficient_is_no_matter() -> None:
    assert of(TrainerTable(kl="k1")).adv_estimator == "grpo"
