"""A Sample and the trainer's weight version become its staleness: how many updates old its oldest token is."""

from __future__ import annotations

from agenttrain.errors import SampleError
from agenttrain.records import Sample


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
