"""What each algorithm is made of, its example worked by the functions it is made of, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agenttrain.config import Config, TrainerTable, resolve
from agenttrain.errors import ConfigError
from agenttrain.local.plugin import agenttrain_register_advantages
from agenttrain.protocols import AdvantageEstimator
from agenttrain.trainer.algorithms import (
    ALGORITHMS,
    OF_CRITICS,
    OVERRIDES,
    SFT,
    Algorithm,
    Critic,
    algorithm_name,
    chosen,
    with_algorithm,
)
from agenttrain.trainer.credit import gae
from agenttrain.trainer.loss import clipped_loss, likelihood_loss, rollout_ratio, token_weights


def estimator(name: str | None) -> AdvantageEstimator:
    assert name is not None
    estimators: dict[str, AdvantageEstimator] = {}
    agenttrain_register_advantages(estimators.__setitem__)
    return estimators[name]


def loss_of(
    algorithm: Algorithm, rewards: list[float], log_ratios: list[list[float]], *, constant: int = 1
) -> tuple[float, list[float]]:
    """(loss, its gradient by each token's log probability) of one group, each rollout's log ratios in a row."""
    n = [len(row) for row in log_ratios]
    names = [str(i) for i in range(len(n))]
    new = torch.tensor([x for row in log_ratios for x in row], dtype=torch.float64, requires_grad=True)
    each = token_weights(n, names, mean=algorithm.loss, constant=constant)

    def repeated(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).repeat_interleave(torch.tensor(n))

    means = repeated([sum(row) / len(row) for row in log_ratios])
    loss = clipped_loss(
        new.exp() if algorithm.ratio == "token" else rollout_ratio(new, means),
        advantages=repeated(estimator(algorithm.advantage)(rewards)),
        weights=repeated(each),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    ).loss
    return loss.item(), torch.autograd.grad(loss, new)[0].tolist()


def test_grpo_by_hand() -> None:
    """Ratio 1.5 with advantage 1 is held at 1.28; nothing pulls there any more."""
    loss, gradient = loss_of(ALGORITHMS["grpo"], [1, 0], [[math.log(1.5)], [0.0]])
    assert loss == pytest.approx(-0.14)
    assert gradient == pytest.approx([0.0, 0.5])


def test_dr_grpo_by_hand() -> None:
    """No length and no deviation: each of the three tokens weighs 1 / (2 rollouts × 4)."""
    loss, gradient = loss_of(ALGORITHMS["dr_grpo"], [1, 0], [[0.0, 0.0], [0.0]], constant=4)
    assert loss == pytest.approx(-0.0625)
    assert gradient == pytest.approx([-1 / 16, -1 / 16, 1 / 16])


def test_rloo_by_hand() -> None:
    loss, gradient = loss_of(ALGORITHMS["rloo"], [1, 0, 0], [[0.0], [0.0], [0.0]])
    assert loss == pytest.approx(0.0)
    assert gradient == pytest.approx([-1 / 3, 1 / 6, 1 / 6])


def test_gspo_by_hand() -> None:
    """Token ratios far out of the bounds, whose mean is within: nothing is clipped, and both tokens pull alike."""
    loss, gradient = loss_of(ALGORITHMS["gspo"], [1, 0], [[0.2, -0.2], [0.0]])
    assert loss == pytest.approx(0.0)
    assert gradient == pytest.approx([-0.25, -0.25, 0.5])


def test_ppo_by_hand() -> None:
    advantages, returns = gae([0.0, 1.0], [0.4, 0.6], discount=1.0, gae_lambda=0.5)
    assert advantages == pytest.approx([0.4, 0.4])
    assert returns == pytest.approx([0.8, 1.0])


def test_what_is_set_wins_and_the_rest_is_the_algorithms() -> None:
    own = chosen(TrainerTable(algorithm="gspo", clip_high=0.01, loss="token-mean"))
    assert (own.advantage, own.ratio, own.loss, own.clip_low, own.clip_high) == (
        "group",
        "rollout",
        "token-mean",
        3e-4,
        0.01,
    )
    critic = chosen(TrainerTable(algorithm="ppo", gae_lambda=0.95)).critic
    assert critic == Critic(gae_lambda=0.95)


def test_grpo_is_what_it_was() -> None:
    assert chosen(TrainerTable()) == Algorithm(
        advantage="group", ratio="token", loss="token-mean", clip_low=0.2, clip_high=0.28
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_configuration_shows_what_its_algorithm_decides(name: str) -> None:
    """And says the same when it is read again, as on resume."""
    config = with_algorithm(Config(trainer={"algorithm": name}))  # type: ignore[arg-type]
    shown = config.trainer.model_dump()
    assert all(shown[key] is not None for key in OVERRIDES)
    assert all((shown[key] is not None) == (name == "ppo") for key in OF_CRITICS)
    assert with_algorithm(config) == config == Config.model_validate(config.model_dump())
    assert chosen(config.trainer) == ALGORITHMS[name]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithms_estimator_is_registered(name: str) -> None:
    assert len(estimator(ALGORITHMS[name].advantage)([1.0, 0.0])) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "ppo", "advantage": "group"}, "trainer.advantage is 'group', which compares siblings"),
        ({"algorithm": "rloo", "gae_lambda": 0.9}, "trainer.gae_lambda is 0.9, and trainer.algorithm 'rloo' has no"),
        ({"value_clip": 0.1}, "trainer.value_clip is 0.1, and trainer.algorithm 'grpo' has no critic"),
        ({"group_size": 1}, "trainer.group_size is 1, and trainer.algorithm 'grpo' compares"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_algorithm(Config(trainer=settings))  # type: ignore[arg-type]
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("advantage", "group"),
        ("clip_low", 0.2),
        ("clip_high", 0.28),
        ("importance_cap", 2.0),
        ("kl_coefficient", 0.01),
        ("discount", 1.0),
        ("gae_lambda", 0.0),
        ("value_learning_rate", 0.0),
        ("value_clip", 0.2),
        ("critic_warmup_steps", 0),
    ],
)
def test_sft_refuses_what_it_would_not_read(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        with_algorithm(Config(trainer={"name": "sft", key: value}))  # type: ignore[arg-type]
    assert f"trainer.{key} is {value!r}, and trainer.name 'sft' would not read it" in str(refused.value)


def test_what_sft_would_not_read_may_stand_in_the_other_trainers_table() -> None:
    layer = {"local": {"trainer": {"kl_coefficient": 0.01, "clip_low": 0.1}}, "sft": {"trainer": {"epochs": 2}}}
    sft = with_algorithm(resolve(("file", layer), ("flags", {"trainer": {"name": "sft"}})))
    assert (sft.trainer.epochs, sft.trainer.kl_coefficient, sft.trainer.clip_low) == (2, 0.0, None)
    local = with_algorithm(resolve(("file", layer)))
    assert (local.trainer.epochs, local.trainer.kl_coefficient, local.trainer.clip_low) == (1, 0.01, 0.1)


def test_sft_has_its_own_algorithm_whatever_is_named() -> None:
    """Groups of one do, and what it decides is written out and read again."""
    config = with_algorithm(Config(trainer={"name": "sft", "algorithm": "ppo", "group_size": 1}))  # type: ignore[arg-type]
    assert chosen(config.trainer) == SFT
    assert (config.trainer.loss, algorithm_name(config.trainer)) == ("token-mean", "sft")
    assert with_algorithm(config) == config
    assert (SFT.learns_from, ALGORITHMS["grpo"].learns_from) == ("successes", "differences")
    assert SFT not in ALGORITHMS.values()


def test_sft_by_hand() -> None:
    """Two successes of one task share its weight; the gradient by each log probability is minus what it weighs."""
    logprobs = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64).log().requires_grad_()
    weights = token_weights([1, 1, 1], ["a1", "a2", "b"], mean=SFT.loss, shares={"a1": 0.5, "a2": 0.5, "b": 1.0})
    assert weights == [0.25, 0.25, 0.5]
    loss = likelihood_loss(logprobs, weights=torch.tensor(weights, dtype=torch.float64)).loss
    assert loss.item() == pytest.approx(2.25 * math.log(2))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-0.25, -0.25, -0.5]


def test_ppo_takes_groups_of_one() -> None:
    assert chosen(TrainerTable(algorithm="ppo", group_size=1)).critic == Critic()
