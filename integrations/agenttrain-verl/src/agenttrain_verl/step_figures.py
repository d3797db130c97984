"""veRL's metrics of a step to the figures that the local trainer reports, and those that veRL doesn't give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from agenttrain.trainer.loss import k3

from agenttrain_verl.rows import Row

OWN = "agenttrain/"
"""Before the names of what is measured here, among veRL's metrics."""
OF_VERL = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "clip_fraction": "actor/pg_clipfrac",
    "value_loss": "critic/vf_loss",
}
"""Our figures to veRL's. veRL's share of clipped tokens is a mean over passes, ours one over tokens."""


def step_metrics(of_verl: Mapping[str, float]) -> dict[str, float]:
    """The figures of a step's updates under the local trainer's names; those of what there was not are left out.

    Args:
        of_verl: what veRL's step filled, with what is measured here.
    """
    found = {name: float(of_verl[key]) for name, key in OF_VERL.items() if key in of_verl}
    return found | {key.removeprefix(OWN): float(n) for key, n in of_verl.items() if key.startswith(OWN)}


def gap_figures(
    rows: Sequence[Row],
    *,
    own: Sequence[torch.Tensor],
    recorded: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    weight_version: int,
) -> dict[str, float]:
    """Engine against trainer on trained tokens, before the first update, and how likely the engine thought them.

    Args:
        rows: [rows]
        own: [rows][T] the trainer's log probabilities.
        recorded: [rows][T] the engine's.
        masks: [rows][T]
        weight_version: that the step began with. A row with an older one counts in `nll` alone.

    Returns:
        By veRL's manner of names: logprob_gap_mean and logprob_gap_max over the fresh rows' trained tokens (none of
        them without any), and nll over all.
    """
    gaps: list[float] = []
    likely: list[float] = []
    for row, o, r, mask in zip(rows, own, recorded, masks, strict=True):
        at = mask.bool()
        likely += r[at].tolist()
        if row.oldest_version == weight_version:
            gaps += (o - r).abs()[at].tolist()
    nll = {f"{OWN}nll": -math.fsum(likely) / max(1, len(likely))}
    if not gaps:
        return nll
    largest = float(torch.tensor(gaps, dtype=torch.float64).max())  # a NaN stays one
    return {f"{OWN}logprob_gap_mean": math.fsum(gaps) / len(gaps), f"{OWN}logprob_gap_max": largest, **nll}


def measured_figures(
    masks: Sequence[torch.Tensor],
    *,
    old: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor] | None = None,
    importance: Sequence[torch.Tensor] | None = None,
    cap: float = math.inf,
    values: Sequence[torch.Tensor] | None = None,
    returns: Sequence[torch.Tensor] | None = None,
) -> dict[str, float]:
    """What stays fixed through a step's updates, over its trained tokens, as the local trainer tells it.

    Args:
        masks: [rows][T]; all others are of the same shape. None: not measured.
        old: log probabilities that ratios are taken against.
        reference: the policy's at the run's start.
        importance: weights that correct for the engine, of which none is above `cap`.
        values: what the critic expected.
        returns: what it is held to.

    Returns:
        kl_mean, importance_mean, importance_capped, value_mean and value_explained, without those not measured.

    Source: `agenttrain.local.measured.measured_metrics`.
    """

    def trained(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([row[mask.bool()] for row, mask in zip(rows, masks, strict=True)]).double()

    found: dict[str, float] = {}
    if reference is not None:
        found["kl_mean"] = float(k3(trained(old), trained(reference)).mean())
    if importance is not None:
        weights = trained(importance)
        found |= {
            "importance_mean": float(weights.mean()),
            "importance_capped": float((weights >= cap).double().mean()),
        }
    if values is not None and returns is not None:
        expected, held_to = trained(values), trained(returns)
        spread = float(held_to.var(correction=0))
        error = float((held_to - expected).var(correction=0))
        found |= {"value_mean": float(expected.mean()), "value_explained": 1.0 - error / spread if spread else 0.0}
    return {OWN + name: number for name, number in found.items()}


def merged(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of several calls as veRL reports those of one: lists, one after the other."""
    found: dict[str, Any] = {}
    for output in outputs:
        for name, value in output.items():
            found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return found
