"""Samples hold what may be trained, and say where it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult, RoutedExperts
from agenttrain.sample.build import build_samples

Make = Callable[..., RolloutResult]


def test_a_sample_is_its_trajectory_with_the_reward(result: Make) -> None:
    made = result()
    (sample,) = made.samples
    assert sample.prompt_ids == (1, 2)
    assert sample.response_mask == (1, 1, 0, 0, 0, 1, 1)
    assert sample.response_logprobs == (-0.375, -0.5, 0.0, 0.0, 0.0, -1.0, -1.125)
    assert (sample.reward_score, sample.num_turns) == (0.75, 3)
    assert sample.metrics == {"seconds": 2.5, "n_tool_calls": 2.0, "n_invalid_tool_calls": 0.0}
    assert sample.extra_fields == {
        "rollout_id": "train-1-t-0-0",
        "task_id": "t",
        "trajectory": 0,
        "group_id": "train-1-t",
        "min_global_steps": 5,
        "max_global_steps": 6,
        "reward_extra_info": {"answer": 1.0},
        "status": "completed",
    }


@pytest.mark.parametrize("status", ["truncated", "budget_exhausted", "policy_failure"])
def test_a_rollout_that_was_cut_or_failed_by_the_policy_is_trained(result: Make, status: str) -> None:
    assert len(result(status=status).samples) == 1


@pytest.mark.parametrize("status", ["environment_failure", "aborted", "incomplete"])
def test_a_broken_rollout_gives_no_sample_even_with_a_reward(result: Make, status: str) -> None:
    assert result(status=status).samples == ()


def test_a_missing_reward_is_never_0(result: Make) -> None:
    assert result(reward=None).samples == ()


def test_a_trajectory_without_a_trained_token_gives_no_sample(result: Make) -> None:
    """veRL takes the reward from the last row, which must hold a trained token."""
    made = result()
    frozen = replace(made.trajectories[0], index=1, response_mask=(0,) * 7)
    samples = build_samples(made.rollout, [made.trajectories[0], frozen])
    assert [sample.extra_fields["trajectory"] for sample in samples] == [0]


def test_a_trajectory_of_another_rollout_is_refused(result: Make) -> None:
    made = result()
    with pytest.raises(SampleError, match="Trajectory 0 is of rollout other and was given with train-1-t-0-0"):
        build_samples(made.rollout, [replace(made.trajectories[0], rollout_id="other")])


def experts(n_ids: int) -> RoutedExperts:
    return RoutedExperts(start=0, n_layers=2, n_chosen=1, data=bytes(4 * (n_ids - 1)))


def test_all_rows_of_a_rollout_have_routed_experts_or_none_has(result: Make) -> None:
    """One trained trajectory without them takes them from the others; one that gives no sample does not."""
    made = result()
    told = replace(made.trajectories[0], routed_experts=experts(9))
    silent = replace(made.trajectories[0], index=1)
    frozen = replace(silent, index=2, response_mask=(0,) * 7)
    assert [sample.routed_experts for sample in build_samples(made.rollout, [told, frozen])] == [experts(9)]
    assert [sample.routed_experts for sample in build_samples(made.rollout, [told, silent])] == [None, None]
