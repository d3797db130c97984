"""Staleness counts updates since the oldest trained token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult
from agenttrain.sample.staleness import staleness


def test_it_counts_from_the_oldest_token(result: Callable[..., RolloutResult]) -> None:
    (sample,) = result().samples
    assert staleness(sample, 6) == 1
    assert staleness(sample, 8) == 3


def test_a_sample_newer_than_the_trainer_is_refused(result: Callable[..., RolloutResult]) -> None:
    with pytest.raises(SampleError, match="sampled at weight version 6, and the trainer is at 5"):
        staleness(result().samples[0], 5)
