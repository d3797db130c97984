"""What was fixed before a step's updates, in figures: distance to the reference, engine against trainer, the critic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from agenttrain.config import TrainerTable
from agenttrain.trainer.batches import Lesson, old_logprobs
from agenttrain.trainer.loss import k1, k3


def measured_metrics(kept: Sequence[Lesson], settings: TrainerTable) -> dict[str, float]:
    """Figures of a step over its trained tokens; those of what was not measured are left out.

    Returns:
        kl_mean: the estimator that `trainer.kl` names, against the policy at the run's start.
        importance_mean, importance_capped: mean weight that corrects for the engine, and the share held at the cap.
        value_mean, value_explained: what the critic expected, and the share of the returns' variance it explains.
    """
    rows = [row for lesson in kept for row in lesson.rows]
    metrics: dict[str, float] = {}
    distances = [
        (k1 if settings.kl == "k1" else k3)(old_logprobs(sample, measured), measured.reference_logprobs)
        for sample, measured in rows
        if measured.reference_logprobs is not None
    ]
    if distances:
        metrics["kl_mean"] = _mean(distances)
    weights = [measured.importance for _, measured in rows if measured.importance is not None]
    if weights and settings.importance_cap is not None:
        metrics["importance_mean"] = _mean(weights)
        metrics["importance_capped"] = _mean([(row >= settings.importance_cap).float() for row in weights])
    values = [measured.values for _, measured in rows if measured.values is not None]
    returns = [measured.returns for _, measured in rows if measured.returns is not None]
    if values and returns:
        metrics["value_mean"] = _mean(values)
        metrics["value_explained"] = _explained(torch.cat(values), torch.cat(returns))
    return metrics


def _mean(rows: Sequence[torch.Tensor]) -> float:
    numbers = torch.cat(list(rows)).tolist()
    return math.fsum(numbers) / len(numbers)


def _explained(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - variance of the error / variance of the returns; 0 where the returns are all alike."""
    spread = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
