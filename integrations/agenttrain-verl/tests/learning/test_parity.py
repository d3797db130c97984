"""The same rollouts through the local trainer and through veRL's: the same advantages, losses and gradients.

veRL's trainer runs in this process: its advantages, losses, FSDP2 engine and optimizer, agenttrain's Counted, and a
queue that is a dictionary. Rollouts have 1 to 3 trajectories, context and frozen spans in the middle of responses, and
recorded log probabilities so far from the model's that ratios are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.records import RolloutResult
from agenttrain.testing import tiny_model
from agenttrain.trainer.advantage import own_rewards
from parity_samples import made_up, with_credit
from parity_verl import LARGEST, compared, config_of, local_step, verl_step
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import trainer_base
from verl_in_process import InProcess

from agenttrain_verl import counted
from agenttrain_verl.plan import plan_of
from agenttrain_verl.rows import rows_of
from agenttrain_verl.step_figures import step_metrics

pytestmark = pytest.mark.filterwarnings("ignore")  # what veRL's engine and torch's FSDP warn of; ours stand elsewhere
GSPO = {"algorithm": "gspo", "clip_low": 0.02, "clip_high": 0.03}

CAP = {"importance_cap": 1.2, "learning_rate": 1e-3}
"""Ratios are taken against the trainer's own log probabilities then: only updates bring them to the bounds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def rollouts(model: Path) -> list[RolloutResult]:
    return made_up(model, temperature=0.9)


def differences(rollouts: list[RolloutResult], model: Path, trainer: Mapping[str, Any]) -> dict[str, float]:
    config = config_of(trainer)
    local = local_step(rollouts, config, model, step=1)
    assert 0.02 < local.figures["clip_fraction"] < 0.98
    verl = verl_step(rollouts, config, model, step=1)
    assert local.figures["updates"] == verl.figures["updates"] == len(verl.losses)
    return compared(local, verl)


@pytest.mark.parametrize(
    "trainer",
    [
        {"algorithm": "grpo"},
        {"algorithm": "dr_grpo", "minibatches": 3},
        {"algorithm": "rloo"},
        GSPO,
        {"algorithm": "grpo", "loss": "rollout-mean", **CAP},
        {**GSPO, **CAP, "epochs": 1},
    ],
    ids=["grpo", "dr_grpo", "rloo", "gspo", "rollout-mean with a cap", "gspo with a cap"],
)
def test_both_trainers_learn_the_same(rollouts: list[RolloutResult], model: Path, trainer: Mapping[str, Any]) -> None:
    """Each update's loss and gradient norm, over mini-batches and epochs, to 1e-5."""
    found = differences(rollouts, model, trainer)
    assert max(found.values()) < LARGEST, found


@pytest.mark.parametrize(
    "trainer",
    [{"algorithm": "grpo"}, {"algorithm": "dr_grpo", "minibatches": 3}, {"algorithm": "rloo"}, GSPO],
    ids=["grpo", "dr_grpo", "rloo", "gspo"],
)
def test_credit_by_node_and_turn_is_the_same_in_both(
    rollouts: list[RolloutResult], model: Path, trainer: Mapping[str, Any]
) -> None:
    """Turns of one row have advantages of their own, and veRL's grpo does not stand in their place."""
    credited = with_credit(rollouts)
    config = config_of({**trainer, "epochs": 1})
    verl = verl_step(credited, config, model, step=1)
    found = compared(local_step(credited, config, model, step=1), verl)
    assert max(found.values()) < LARGEST, found
    plain = verl_step(rollouts, config, model, step=1)
    last = rollouts[-1].rollout.task_id
    changed = {id for id, _ in verl.advantages if f"-{last}-" not in id}
    assert any(len({round(a, 6) for a in row}) > 1 for row in verl.advantages.values())
    assert {place: row for place, row in verl.advantages.items() if place[0] not in changed} == {
        place: row for place, row in plain.advantages.items() if place[0] not in changed
    }


@pytest.mark.parametrize(
    "trainer", [{"algorithm": "dr_grpo"}, {"algorithm": "rloo"}, GSPO], ids=["dr_grpo", "rloo", "gspo"]
)
def test_a_rollout_that_counts_for_each_of_its_rows_is_seen(
    rollouts: list[RolloutResult], model: Path, trainer: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that pass for rollouts of their own change the numbers by far more than parity allows."""

    def each_its_own(batch: KVBatchMeta) -> list[Any]:
        return [replace(row, rollout_id=row.key) for row in rows_of(batch)]

    monkeypatch.setattr(counted, "rows_of", each_its_own)
    config = config_of({**trainer, "minibatches": 1, "epochs": 1})
    local, verl = local_step(rollouts, config, model, step=1), verl_step(rollouts, config, model, step=1)
    assert abs(verl.norms[0] / local.norms[0] - 1) > 0.01


def test_verls_estimator_of_rows_would_be_seen(
    rollouts: list[RolloutResult], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for grpo, when its statistics are of rows."""

    def of_rows(data: Any, batch_keys: Any, **settings: Any) -> Any:
        return compute_advantage(data, **settings)

    monkeypatch.setattr(trainer_base, "compute_advantage_for_multi_trajectories", of_rows)
    config = config_of({"algorithm": "grpo", "minibatches": 1, "epochs": 1})
    local, verl = local_step(rollouts, config, model, step=1), verl_step(rollouts, config, model, step=1)
    assert abs(verl.norms[0] / local.norms[0] - 1) > 0.01


def test_a_critic_sees_each_rollout_once(rollouts: list[RolloutResult], model: Path, tmp_path: Path) -> None:
    """Its first loss is half the mean squared error of one mini-batch's tokens; the policy's figures are told too.

    veRL's critic is a model of its own, and the local trainer's a head of the policy, so that no more can be compared.
    """
    config = config_of({"algorithm": "ppo", "discount": 0.99, "gae_lambda": 0.9})
    plan = plan_of(config, model, n_tasks=5)
    trainer = InProcess(plan, own_rewards, tmp_path)
    trainer.rollout_order = [result.rollout.id for result in rollouts]
    figures = step_metrics(trainer.train(rollouts, step=1))
    first = trainer.dealt.deals[0].updates[0]
    errors = []
    for row in trainer.dealt.rows:
        if row.rollout_id in first.rollout_ids:
            stored = trainer.queue.rows[row.key]
            errors.append((stored["values"] - stored["returns"])[stored["response_mask"].bool()])
    half_mean_square = 0.5 * float((torch.cat(errors) ** 2).mean())
    losses = [loss for call in trainer.critic_wg.updates for loss in call["loss"]]
    assert len(losses) == 4
    assert losses[0] == pytest.approx(half_mean_square, rel=LARGEST)
    assert figures["value_loss"] == pytest.approx(sum(losses) / 4)
    assert figures["updates"] == 4
    advantages = torch.cat([torch.tensor(row) for row in trainer.advantages().values()])
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float((advantages**2).mean()) == pytest.approx(1, abs=1e-5)
