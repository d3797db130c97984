"""What a step reports: the local trainer's names for veRL's metrics, and what veRL doesn't measure."""

from __future__ import annotations

import math

import pytest
import torch

from agenttrain_verl.rows import Row
from agenttrain_verl.step_figures import gap_figures, measured_figures, merged, step_metrics


def row(name: str, version: int) -> Row:
    return Row(
        key=name,
        rollout_id=name,
        group_id="g",
        trajectory=0,
        n_ids=4,
        n_trained=2,
        reward=0.0,
        oldest_version=version,
    )


def test_the_gap_is_over_fresh_trained_tokens() -> None:
    """An older row counts in nll alone, a masked token nowhere."""
    found = gap_figures(
        [row("a", 1), row("b", 0)],
        own=[torch.tensor([-1.0, -9.0, -2.0]), torch.tensor([-5.0])],
        recorded=[torch.tensor([-1.5, 0.0, -2.25]), torch.tensor([-1.0])],
        masks=[torch.tensor([1, 0, 1]), torch.tensor([1])],
        weight_version=1,
    )
    assert found == {
        "agenttrain/logprob_gap_mean": 0.375,
        "agenttrain/logprob_gap_max": 0.5,
        "agenttrain/nll": pytest.approx(4.75 / 3),
    }


def test_without_a_fresh_token_there_is_no_gap() -> None:
    """As in the local trainer: what nobody measured is not 0."""
    told = [torch.tensor([-1.0])]
    found = gap_figures([row("a", 0)], own=told, recorded=told, masks=[torch.tensor([1])], weight_version=3)
    assert found == {"agenttrain/nll": 1.0}


def test_a_gap_that_is_no_number_is_the_largest() -> None:
    own = [torch.tensor([-1.0, float("nan"), -1.0])]
    recorded, masks = [torch.tensor([-1.0, -1.0, -1.0])], [torch.tensor([1, 1, 1])]
    found = gap_figures([row("a", 0)], own=own, recorded=recorded, masks=masks, weight_version=0)
    assert math.isnan(found["agenttrain/logprob_gap_max"])


def test_figures_have_our_names() -> None:
    """And what there was not is left out."""
    of_verl = {
        "actor/loss": 0.5,
        "actor/grad_norm": 2.0,
        "actor/pg_clipfrac": 0.25,
        "agenttrain/updates": 4,
        "perf/x": 1,
    }
    assert step_metrics(of_verl) == {"loss": 0.5, "grad_norm": 2.0, "clip_fraction": 0.25, "updates": 4.0}


def test_metrics_of_calls_stand_in_a_line() -> None:
    """One number or a list of them for each."""
    assert merged([{"loss": [1.0, 2.0], "lr": [3.0]}, {"loss": [4.0], "mfu": 0.5}]) == {
        "loss": [1.0, 2.0, 4.0],
        "lr": [3.0],
        "mfu": [0.5],
    }


def test_what_is_fixed_through_a_step_is_told_of_trained_tokens() -> None:
    """One masked token that would change every figure."""
    told = torch.tensor([0.5, 2.0, 7.0])
    found = measured_figures(
        [torch.tensor([1, 1, 0])],
        old=[torch.tensor([0.5, 0.5, 0.0]).log()],
        reference=[torch.tensor([0.25, 0.5, 1.0]).log()],
        importance=[told],
        cap=2.0,
        values=[torch.tensor([0.0, 1.0, 9.0])],
        returns=[torch.tensor([1.0, 3.0, 0.0])],
    )
    assert found == {
        "agenttrain/kl_mean": pytest.approx(0.1931 / 2, abs=1e-4),
        "agenttrain/importance_mean": 1.25,
        "agenttrain/importance_capped": 0.5,
        "agenttrain/value_mean": 0.5,
        "agenttrain/value_explained": 0.75,
    }
