"""Optimizer steps to calls of veRL's update: each update's loss is its own, in as few calls as that takes."""

from __future__ import annotations

import math

import pytest
import torch
from agenttrain.config import resolve

from agenttrain_verl.algorithms import VerlAlgorithm, of
from agenttrain_verl.calls import anchored, calls_of, n_calls, sequence_weights
from agenttrain_verl.dealing import deal, seed_of
from agenttrain_verl.rows import Row


def algorithm(name: str) -> VerlAlgorithm:
    return of(resolve(("test", {"trainer": {"algorithm": name}})).trainer)


def rows(*counts: tuple[str, int]) -> list[Row]:
    """(rollout, trained token)s of a row each."""
    return [
        Row(
            key=f"{name}_{n}",
            rollout_id=name,
            group_id="g",
            trajectory=n,
            n_ids=9,
            n_trained=n_trained,
            reward=0.0,
            oldest_version=0,
        )
        for n, (name, n_trained) in enumerate(counts)
    ]


def calls(name: str, made: list[Row], *, minibatches: int, epochs: int = 1, has_distance: bool = False) -> list:
    deals = [deal(made, n_minibatches=minibatches, n_ranks=1, seed=seed_of(0, 1, e)) for e in range(epochs)]
    return calls_of(deals, made, algorithm(name), has_distance=has_distance)


MADE = rows(("a", 3), ("a", 1), ("b", 2), ("c", 5))


def test_one_mini_batch_is_one_call_for_all_epochs() -> None:
    """Nothing but the order of rows would differ."""
    (call,) = calls("grpo", MADE, minibatches=1, epochs=3)
    assert (call.epochs, call.n_updates, call.n_rows, call.n_rollouts) == (3, 3, 4, 3)
    assert set(call.factors.values()) == {1.0}


def test_mini_batches_of_an_epoch_are_one_call() -> None:
    """And each epoch, which deals anew, another."""
    made = calls("grpo", MADE, minibatches=2, epochs=2)
    assert [(call.epochs, call.n_updates) for call in made] == [(1, 2), (1, 2)]


def test_a_rollouts_weight_is_one_over_its_tokens_in_all_rows() -> None:
    """Three rollouts in one update: a has 4 tokens, b 2, c 5."""
    (call,) = calls("gspo", MADE, minibatches=1)
    assert call.factors == pytest.approx({"a": 1 / 12, "b": 1 / 6, "c": 1 / 15})


def test_a_constant_divides_by_the_rollouts_of_each_update() -> None:
    """Updates of two rollouts and of one: veRL divides both by two, so the one's advantage is doubled."""
    (call,) = calls("dr_grpo", MADE, minibatches=2)
    larger, smaller = call.updates
    assert (len(larger.rollout_ids), len(smaller.rollout_ids), call.n_rollouts) == (2, 1, 2)
    assert {call.factors[name] for name in larger.rollout_ids} == {1.0}
    assert {call.factors[name] for name in smaller.rollout_ids} == {2.0}


def test_a_distance_in_the_loss_takes_a_call_for_each_uneven_update() -> None:
    """No factor of an advantage reaches it."""
    made = calls("dr_grpo", MADE, minibatches=2, has_distance=True)
    assert [(call.n_rollouts, call.n_updates, set(call.factors.values())) for call in made] == [
        (2, 1, {1.0}),
        (1, 1, {1.0}),
    ]
    assert len(calls("dr_grpo", MADE[1:], minibatches=3, has_distance=True)) == 1


def test_ratios_of_rollouts_are_anchored_anew_before_each_update() -> None:
    """Two mini-batches, two epochs: four calls."""
    assert [call.n_updates for call in calls("gspo", MADE, minibatches=2, epochs=2)] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gspo"])
@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_schedule_is_told_how_many_calls_there_will_be(name: str, minibatches: int, epochs: int) -> None:
    """Wherever there are at least as many rollouts as mini-batches."""
    made = calls(name, MADE, minibatches=minibatches, epochs=epochs)
    assert len(made) == n_calls(algorithm(name), minibatches=minibatches, epochs=epochs)
    assert sum(call.n_updates for call in made) == minibatches * epochs


def test_an_anchor_is_the_rollouts_mean_away() -> None:
    """The docstring's rollout of two rows, beside another and a row of padding."""
    now = [torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, 9.0]), torch.tensor([-3.0]), torch.tensor([-7.0])]
    old = [torch.tensor([-1.2, -1.1]), torch.tensor([-2.0, 0.0]), torch.tensor([-3.5]), torch.tensor([0.0])]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([0])]
    found = anchored(now, old, masks, ["a", "a", "b", None])
    for each, expected in zip(found, ([-1.1, -1.1], [-2.1, 8.9], [-3.5], [-7.0]), strict=True):
        torch.testing.assert_close(each, torch.tensor(expected))


def test_a_weight_of_a_rollout_is_over_all_of_its_rows() -> None:
    """exp(0.2 + 0.1 + 0.3) for both rows of a; b is held at the cap; what is not trained weighs nothing."""
    own = [torch.tensor([0.2, 0.1]), torch.tensor([0.3, 5.0]), torch.tensor([3.0])]
    recorded = [torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([1])]
    a1, a2, b = sequence_weights(own, recorded, masks, ["a", "a", "b"], cap=2.0)
    assert a1.tolist() == pytest.approx([math.exp(0.6)] * 2)
    assert a2.tolist() == pytest.approx([math.exp(0.6), 0.0])
    assert b.tolist() == [2.0]
