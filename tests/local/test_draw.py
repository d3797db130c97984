"""Sampling: uniform numbers from a counter, and the inverse of the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agenttrain.local.draw import draw, uniforms


def test_the_first_number_of_seed_0_is_splitmix64s() -> None:
    """0xE220A8397B1DCDAF / 2**64, the published first output."""
    assert uniforms([0], [0])[0] == pytest.approx(0xE220A8397B1DCDAF / 2**64, abs=1e-15)


def test_numbers_are_uniform_and_differ_between_seeds_and_positions() -> None:
    numbers = uniforms(list(range(100)) * 100, [i // 100 for i in range(10_000)])
    assert len(set(numbers.tolist())) == 10_000
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_ids_follow_the_distribution() -> None:
    """20,000 draws from (0.1, 0.2, 0.3, 0.4): each share within four standard errors."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20_000, 4)
    ids, _ = draw(logits, temperatures=[1.0] * 20_000, seeds=list(range(20_000)), positions=[0] * 20_000)
    for token, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert abs(ids.count(token) / 20_000 - share) < 4 * math.sqrt(share * (1 - share) / 20_000)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    """Greedy takes the likeliest and gives its log probability at temperature 1."""
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    ids, logprobs = draw(logits, temperatures=[0.0, 0.5], seeds=[1, 1], positions=[0, 0])
    assert ids[0] == 1
    assert logprobs[0] == pytest.approx(1 - math.log(2 + math.e))
    assert logprobs[1] == pytest.approx(2 * logits[1, ids[1]].item() - math.log(2 + math.exp(2)))


def test_an_id_of_probability_0_is_never_drawn() -> None:
    logits = torch.full((5000, 4), -torch.inf)
    logits[:, 2] = 0.0
    ids, _ = draw(logits, temperatures=[1.0] * 5000, seeds=list(range(5000)), positions=[3] * 5000)
    assert set(ids) == {2}
