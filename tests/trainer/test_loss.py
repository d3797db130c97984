"""The clipped loss and the weight of each token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import SampleError
from agenttrain.trainer.loss import (
    LossMean,
    PolicyLoss,
    clipped_loss,
    importance_weights,
    k1,
    k3,
    likelihood_loss,
    rollout_ratio,
    token_ratio,
    token_weights,
    value_loss,
)


def loss_of(logprobs: torch.Tensor, old: list[float], advantages: list[float], weights: list[float]) -> PolicyLoss:
    return clipped_loss(
        token_ratio(logprobs, torch.tensor(old, dtype=logprobs.dtype)),
        advantages=torch.tensor(advantages, dtype=logprobs.dtype),
        weights=torch.tensor(weights, dtype=logprobs.dtype),
        clip_low=0.2,
        clip_high=0.28,
    )


def test_one_token_above_the_bound() -> None:
    """Ratio 1.5, advantage 2: held at 1.28, no gradient."""
    logprobs = torch.tensor([np.log(1.5)], dtype=torch.float64, requires_grad=True)
    out = loss_of(logprobs, [0.0], [2.0], [1.0])
    assert out.loss.item() == pytest.approx(-2.56)
    assert out.n_clipped == 1
    assert torch.autograd.grad(out.loss, logprobs)[0].item() == 0.0


def test_a_ratio_on_the_harmless_side_is_free() -> None:
    """Ratio 0.5 with a positive advantage, and 1.5 with a negative one: both pull, and neither is clipped."""
    logprobs = torch.tensor([np.log(0.5), np.log(1.5)], dtype=torch.float64, requires_grad=True)
    out = loss_of(logprobs, [0.0, 0.0], [1.0, -1.0], [0.5, 0.5])
    assert out.loss.item() == pytest.approx(-(0.5 - 1.5) / 2)
    assert out.n_clipped == 0
    assert torch.autograd.grad(out.loss, logprobs)[0].tolist() == pytest.approx([-0.25, 0.75])


def test_equals_numpy_by_hand() -> None:
    rng = np.random.default_rng(0)
    new, old, adv = rng.normal(-1, 0.5, 50), rng.normal(-1, 0.5, 50), rng.normal(0, 1, 50)
    weights = np.full(50, 1 / 50)
    ratio = np.exp(new - old)
    expected = -np.sum(np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.28) * adv) * weights)
    logprobs = torch.tensor(new, requires_grad=True)
    out = loss_of(logprobs, old.tolist(), adv.tolist(), weights.tolist())
    assert out.loss.item() == pytest.approx(expected)
    free = ~(((adv > 0) & (ratio > 1.28)) | ((adv < 0) & (ratio < 0.8)))
    gradient = torch.autograd.grad(out.loss, logprobs)[0].numpy()
    np.testing.assert_allclose(gradient, np.where(free, -ratio * adv * weights, 0.0), atol=1e-12)
    assert out.n_clipped == int((~free).sum())


def test_weights_by_hand() -> None:
    assert token_weights([2, 1, 1], ["a", "a", "b"]) == [0.25, 0.25, 0.25]
    assert token_weights([2, 1, 1], ["a", "a", "b"], mean="rollout-mean") == pytest.approx([1 / 6, 1 / 6, 1 / 2])


def test_a_rollout_may_count_as_less_than_one() -> None:
    """Over all of its trajectories; the weights of all tokens still sum to 1, but for "constant"."""
    n, names, shares = [2, 1, 1], ["a", "a", "b"], {"a": 0.5}
    assert token_weights(n, names, shares=shares) == pytest.approx([1 / 5, 1 / 5, 2 / 5])
    assert token_weights(n, names, mean="rollout-mean", shares=shares) == pytest.approx([1 / 9, 1 / 9, 2 / 3])
    constant = token_weights(n, names, mean="constant", constant=5, shares=shares)
    assert constant == pytest.approx([0.5 / 7.5, 0.5 / 7.5, 1 / 7.5])


def test_the_likelihood_by_hand() -> None:
    logprobs = torch.tensor([0.5, 0.125]).log()
    assert likelihood_loss(logprobs, weights=torch.tensor([0.5, 0.5])).loss.item() == pytest.approx(2 * math.log(2))


def test_a_constant_takes_the_place_of_lengths() -> None:
    weights = token_weights([2, 1, 1], ["a", "a", "b"], mean="constant", constant=5)
    assert weights == pytest.approx([1 / 10] * 3)
    assert token_weights([2, 9], ["a", "b"], mean="constant", constant=5) == pytest.approx([1 / 10] * 2)


def test_a_rollouts_ratio_is_the_geometric_mean_and_pulls_on_all_its_tokens() -> None:
    """Against the ratio written in one piece: exp(mean of log ratios)."""
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    new = torch.tensor([-0.6, -2.0], dtype=torch.float64, requires_grad=True)
    whole = (new - old).mean().exp()
    each = rollout_ratio(new, (new - old).mean().detach().expand(2))
    assert each.tolist() == pytest.approx([1.2214028, 1.2214028])
    assert each.tolist() == pytest.approx([whole.item()] * 2)
    ours, theirs = torch.autograd.grad(each.mean(), new)[0], torch.autograd.grad(whole, new)[0]
    assert ours.tolist() == pytest.approx(theirs.tolist())


def test_distances_by_hand() -> None:
    """Policy 0.5, reference 0.25."""
    new = torch.tensor([np.log(0.5)], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([np.log(0.25)], dtype=torch.float64)
    assert k1(new, reference).item() == pytest.approx(np.log(2))
    assert k3(new, reference).item() == pytest.approx(0.5 + np.log(2) - 1)
    assert torch.autograd.grad(k3(new, reference).sum(), new)[0].item() == pytest.approx(1 - 0.5)


def test_the_mean_of_both_distances_is_the_divergence() -> None:
    """Over three outcomes by their chance: k1 as a loss has no gradient, and k3 that of KL(reference, policy)."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    new, reference = logits.log_softmax(0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    chances = new.detach().exp()
    divergence = float((chances * (new.detach() - reference)).sum())
    assert (chances * k1(new, reference)).sum().item() == pytest.approx(divergence)
    assert (chances * k3(new, reference)).sum().item() == pytest.approx(divergence)
    by_k1 = torch.autograd.grad((chances * k1(new, reference)).sum(), logits, retain_graph=True)[0]
    assert by_k1.tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    by_k3 = torch.autograd.grad((chances * k3(new, reference)).sum(), logits, retain_graph=True)[0]
    backward = torch.autograd.grad((reference.exp() * (reference - new)).sum(), logits)[0]
    assert by_k3.tolist() == pytest.approx(backward.tolist())


def test_a_value_that_moved_too_far_is_held() -> None:
    """Value 1.5, old 1, return 2: held at 1.2, whose error is the worse; there is no gradient then."""
    values = torch.tensor([1.5, 1.1], dtype=torch.float64, requires_grad=True)
    loss = value_loss(
        values,
        old_values=torch.ones(2, dtype=torch.float64),
        returns=torch.full((2,), 2.0, dtype=torch.float64),
        weights=torch.tensor([1.0, 1.0], dtype=torch.float64),
        clip=0.2,
    )
    assert loss.item() == pytest.approx(0.32 + 0.405)
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0.0, -0.9])


def test_weights_against_the_engine_are_capped_from_above_only() -> None:
    trainer, engine = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.1, 0.2]).log()
    assert importance_weights(trainer, engine, 2.0).tolist() == pytest.approx([2.0, 0.5])


def test_a_rollout_without_trained_tokens_is_not_counted() -> None:
    assert token_weights([2, 0], ["a", "b"], mean="rollout-mean") == [0.5, 0.0]
    with pytest.raises(SampleError, match="None of 2 trajectories"):
        token_weights([0, 0], ["a", "b"])


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from(["token-mean", "rollout-mean"]),
)
def test_splitting_a_rollout_changes_no_weight(parts: list[list[int]], mean: LossMean) -> None:
    """The tokens of a rollout weigh the same in one trajectory as in several; all weights sum to 1."""
    whole = token_weights([sum(p) for p in parts], [str(i) for i in range(len(parts))], mean=mean)
    split = token_weights([n for p in parts for n in p], [str(i) for i, p in enumerate(parts) for _ in p], mean=mean)
    assert split == pytest.approx([w for w, p in zip(whole, parts, strict=True) for _ in p])
    assert sum(w * n for w, n in zip(split, (n for p in parts for n in p), strict=True)) == pytest.approx(1.0)
