"""Samples and the weights that a step trained become their staleness: how many updates old the oldest token is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agenttrain.errors import SampleError
from agenttrain.records import Sample, StepResult


def staleness(sample: Sample, trainer_version: int) -> int:
    """The trainer's version less the oldest version that sampled a trained token, at least 0.

    Raises:
        SampleError: the sample is newer than the trainer, so the two count different things.

    Example: sampled at versions 3 to 5, trainer at 5 -> 2
    """
    oldest, newest = sample.extra_fields["min_global_steps"], sample.extra_fields["max_global_steps"]
    if newest > trainer_version:
        raise SampleError(
            f"Rollout {sample.extra_fields['rollout_id']} was sampled at weight version {newest}, and the trainer is "
            f"at {trainer_version}. Publish weights before sampling with them, or resume from the matching checkpoint."
        )
    return int(trainer_version - oldest)


def step_staleness(step: StepResult) -> tuple[int, ...]:
    """[samples] of a step, which trained the version before the one that it published.

    Raises:
        SampleError: a sample is newer than the weights that were trained.
    """
    return tuple(staleness(sample, step.weight_version - 1) for sample in step.samples)


def staleness_metrics(ages: Sequence[int]) -> Mapping[str, float]:
    """Mean and maximum over the samples of a step; empty when it trained none."""
    if not ages:
        return {}
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
