"""veRL's metrics of a step to the figures that the local trainer reports, and those that veRL doesn't give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
        By veRL's manner of names: logprob_gap_mean and logprob_gap_max over the fresh rows' trained tokens (0 without
        any), and nll over all.
    """
    gaps: list[float] = []
    likely: list[float] = []
    for row, o, r, mask in zip(rows, own, recorded, masks, strict=True):
        at = mask.bool()
        likely += r[at].tolist()
        if row.oldest_version == weight_version:
            gaps += (o - r).abs()[at].tolist()
    return {
        f"{OWN}logprob_gap_mean": math.fsum(gaps) / max(1, len(gaps)),
        f"{OWN}logprob_gap_max": max(gaps, default=0.0),
        f"{OWN}nll": -math.fsum(likely) / max(1, len(likely)),
    }


def merged(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of several calls as veRL reports those of one: lists, one after the other."""
    found: dict[str, Any] = {}
    for output in outputs:
        for name, value in output.items():
            found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return found
