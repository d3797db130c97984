"""Advantages of veRL's rows: a rollout counts once in its group, and its walk goes over all of its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from agenttrain.errors import TrainerError
from agenttrain.testing import tiny_model
from agenttrain.trainer.advantage import group_advantages, leave_one_out_advantages, own_rewards
from agenttrain.trainer.algorithms import Critic
from agenttrain.trainer.batches import Measured, lessons
from agenttrain.trainer.credit import credited
from parity_samples import made_up, with_credit
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl_in_process import Memory, put_rows

from agenttrain_verl import rows as rows_module
from agenttrain_verl.credit import Known, advantages_and_returns, credited_parts, deviation_factors, known
from agenttrain_verl.rows import Row


def row(rollout: str, group: str, reward: float, *, trajectory: int = 0, n_trained: int = 2) -> Row:
    return Row(
        key=f"{group}_{rollout}_{trajectory}",
        rollout_id=rollout,
        group_id=group,
        trajectory=trajectory,
        n_ids=9,
        n_trained=n_trained,
        reward=reward,
        oldest_version=0,
    )


ROWS = [row("a", "g", 1.0), row("a", "g", 1.0, trajectory=1), row("a", "g", 1.0, trajectory=2), row("b", "g", 0.0)]
MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 1, 0]])


def test_a_rollout_of_three_rows_counts_once_in_its_group() -> None:
    """Rewards 1 and 0 against the mean of the others: +1 on each row of a, -1 on b, as veRL's own rloo does not say."""
    with known(Known(rows=ROWS, estimate=leave_one_out_advantages)):
        advantages, returns = advantages_and_returns(torch.zeros(4, 3), MASK)
    assert advantages.tolist() == [[1, 0, 1], [1, 1, 0], [0, 1, 1], [-1, -1, 0]]
    assert torch.equal(advantages, returns)


def test_padding_gets_nothing() -> None:
    """It is in no group."""
    with known(Known(rows=[*ROWS, None], estimate=leave_one_out_advantages)):
        advantages, _ = advantages_and_returns(torch.zeros(5, 3), torch.cat([MASK, torch.zeros(1, 3)]))
    assert advantages[-1].tolist() == [0, 0, 0]


def test_verls_own_grpo_is_ours_times_a_factor() -> None:
    """Two rewards, 1 and 0: veRL's ±0.7071, in units of the group's own deviation ±1."""
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": torch.tensor([[0, 0, 1.0]] * 3 + [[0, 0, 0.0]]), "response_mask": MASK},
            batch_size=4,
        ),
        non_tensor_batch={"uid": np.array(["g"] * 4, dtype=object)},
    )
    keys = ["g_0_0", "g_0_1", "g_0_2", "g_1_0"]
    theirs = compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"]
    ours = theirs * deviation_factors(ROWS)["g"]
    torch.testing.assert_close(ours, torch.tensor([[1.0, 0, 1], [1, 1, 0], [0, 1, 1], [-1, -1, 0]]))
    assert group_advantages([1.0, 0.0]) == [1.0, -1.0]


def test_a_group_of_equal_rewards_keeps_its_numbers() -> None:
    """Nothing is divided by nothing."""
    assert deviation_factors([row("a", "g", 1.0), row("b", "g", 1.0), row("c", "h", 0.0)]) == {"g": 1.0, "h": 1.0}


def test_it_is_what_verl_finds_by_its_name() -> None:
    """In this process, once the module is imported."""
    assert get_adv_estimator_fn("agenttrain") is advantages_and_returns


def test_rows_of_nobody_are_refused() -> None:
    """An estimator that guesses whose rows are whose would count some twice."""
    with pytest.raises(TrainerError, match="doesn't say which rollouts its rows are of"):
        advantages_and_returns(torch.zeros(4, 3), MASK)


@pytest.mark.parametrize("has_credit", [False, True])
def test_walks_with_a_critic_are_those_of_the_local_trainer(tmp_path: Path, has_credit: bool) -> None:
    """Rollouts of up to three trajectories whose turns took turns; discount and lambda below 1; with credit or not."""
    made = made_up(tiny_model(tmp_path / "model"), n_groups=3, n_siblings=3, temperature=1.0)
    made = with_credit(made) if has_credit else made
    kept = lessons(made, own_rewards, compares=False).kept
    generator = torch.Generator().manual_seed(0)
    values = [
        [torch.randn(sum(sample.response_mask), generator=generator) for sample in lesson.samples] for lesson in kept
    ]
    measured = [
        replace(lesson, measured=tuple(Measured(values=v) for v in own))
        for lesson, own in zip(kept, values, strict=True)
    ]
    expected = credited(measured, Critic(discount=0.9, gae_lambda=0.8))

    queue = Memory()
    batch = put_rows(queue, made, max_length=1024)
    with queue.in_place():
        rows = rows_module.rows_of(batch)
    masks = [queue.rows[each.key]["response_mask"] for each in rows]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    laid = torch.zeros(mask.shape)
    laid[mask.bool()] = torch.cat([each for own in values for each in own])
    parts = credited_parts(kept)
    assert bool(parts) == has_credit
    with known(Known(rows=rows, estimate=own_rewards, values=laid, parts=parts)):
        advantages, returns = advantages_and_returns(laid, mask, config=SimpleNamespace(gamma=0.9, lam=0.8))
    each = [found for lesson in expected for found in lesson.measured]
    torch.testing.assert_close(advantages[mask.bool()], torch.cat([found.advantages for found in each]))
    torch.testing.assert_close(returns[mask.bool()], torch.cat([found.returns for found in each]))
    assert len(rows) > len(kept)
