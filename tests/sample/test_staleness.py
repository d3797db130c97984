"""Staleness counts updates since the oldest trained token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult, StepResult
from agenttrain.sample.staleness import staleness, staleness_metrics, step_staleness


def test_it_counts_from_the_oldest_token(result: Callable[..., RolloutResult]) -> None:
    (sample,) = result().samples
    assert staleness(sample, 6) == 1
    assert staleness(sample, 8) == 3


def test_a_sample_newer_than_the_trainer_is_refused(result: Callable[..., RolloutResult]) -> None:
    with pytest.raises(SampleError, match="sampled at weight version 6, and the trainer is at 5"):
        staleness(result().samples[0], 5)


def test_a_step_trained_the_version_before_the_one_it_published(result: Callable[..., RolloutResult]) -> None:
    """Sampled at 5 and 6, trained at 6 and published as 7: one update old."""
    step = StepResult(
        step=3, weight_version=7, metrics={}, trained_rollout_ids=(), dropped={}, samples=result().samples
    )
    assert step_staleness(step) == (1,)


def test_a_steps_figures() -> None:
    assert staleness_metrics([0, 1, 2, 3]) == {"staleness_mean": 1.5, "staleness_max": 3.0}
    assert staleness_metrics([]) == {}
