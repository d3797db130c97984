"""The account adds up, and drift is found without the tree that made the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult, Turn
from agenttrain.sample.account import TokenAccount, drifted, token_account

Make = Callable[..., RolloutResult]


def stored(made: RolloutResult) -> dict[str, Turn]:
    return {turn.id: turn for turn in made.turns}


def test_each_sampled_token_is_trained_or_frozen_or_dropped(result: Make) -> None:
    made = result()
    assert token_account([made], made.samples) == TokenAccount(sampled=5, trained=4, frozen=1, dropped={}, masked=2)


def test_a_rollout_with_a_broken_status_is_dropped_by_it(result: Make) -> None:
    made = result(status="environment_failure", reward=None)
    account = token_account([made], [])
    assert account == TokenAccount(sampled=5, trained=0, frozen=1, dropped={"status environment_failure": 4}, masked=0)


def test_the_trainers_reason_is_the_cause(result: Make) -> None:
    account = token_account([result()], [], {"train-1-t-0-0": "all rewards of its group are equal"})
    assert account.dropped == {"all rewards of its group are equal": 4}


def test_a_superseded_span_is_dropped_though_its_row_is_trained(result: Make) -> None:
    made = result()
    (row,) = made.trajectories
    gone = replace(row.spans[0], trained=False, reason="dropped: superseded by a retry")
    row = replace(row, spans=(gone, *row.spans[1:]), response_mask=(0, 0, 0, 0, 0, 1, 1))
    samples = (replace(made.samples[0], response_mask=row.response_mask),)
    account = token_account([replace(made, trajectories=(row,))], samples)
    assert account == TokenAccount(sampled=5, trained=2, frozen=1, dropped={"superseded by a retry": 2}, masked=2)


def test_a_rollout_that_is_trained_twice_is_refused(result: Make) -> None:
    made = result()
    with pytest.raises(SampleError, match="Trajectory 0 of rollout train-1-t-0-0 was trained twice"):
        token_account([made], [*made.samples, *made.samples])


def test_a_trained_sample_without_a_result_is_refused(result: Make) -> None:
    with pytest.raises(SampleError, match="no result holds that trajectory"):
        token_account([], result().samples)


def test_a_sum_that_does_not_hold_is_refused() -> None:
    with pytest.raises(SampleError, match="sampled 5 tokens, and 3 trained"):
        TokenAccount(sampled=5, trained=3, frozen=1, dropped={}, masked=0)


def test_what_was_sampled_has_not_drifted(result: Make) -> None:
    made = result()
    assert drifted(made.samples, stored(made)) == 0


def test_a_mask_shifted_by_one_has_drifted(result: Make) -> None:
    made = result()
    shifted = replace(made.samples[0], response_mask=(0, 1, 1, 0, 0, 0, 1))
    assert drifted([shifted], stored(made)) == 1


def test_a_log_probability_set_to_0_has_drifted(result: Make) -> None:
    made = result()
    invented = replace(made.samples[0], response_logprobs=(0.0, *made.samples[0].response_logprobs[1:]))
    assert drifted([invented], stored(made)) == 1


def test_a_trained_frozen_token_has_drifted_even_with_its_own_log_probability(result: Make) -> None:
    made = result()
    (sample,) = made.samples
    logprobs = (*sample.response_logprobs[:3], -6 / 8, *sample.response_logprobs[4:])
    trained = replace(sample, response_mask=(1, 1, 0, 1, 0, 1, 1), response_logprobs=logprobs)
    assert drifted([trained], stored(made)) == 1


def test_a_changed_id_has_drifted_with_all_that_was_sampled_after_it(result: Make) -> None:
    made = result()
    changed = replace(made.samples[0], response_ids=(99, *made.samples[0].response_ids[1:]))
    assert drifted([changed], stored(made)) == 3


def test_a_moved_prompt_has_drifted(result: Make) -> None:
    made = result()
    moved = replace(made.samples[0], prompt_ids=(1, 2, 2))
    assert drifted([moved], stored(made)) == 4
