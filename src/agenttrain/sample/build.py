"""A rollout and its trajectories become Samples: what a trainer may train on.

A rollout whose status may not be trained, or that has no reward, gives none: a missing reward is never 0. Only
trajectories with a trained token become samples, so the last one always has one (veRL reads the reward and the
advantage of a rollout from its last row). All rows of a rollout have routed experts, or none has (veRL looks at the
first alone). How a sample's reward is turned into an advantage is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from agenttrain.errors import SampleError
from agenttrain.records import Reward, Rollout, Sample, Status, Trajectory

TRAINED_STATUSES: Final[frozenset[Status]] = frozenset({"completed", "truncated", "budget_exhausted", "policy_failure"})


def may_be_trained(rollout: Rollout) -> bool:
    """Whether the status and the reward of a rollout allow training on it."""
    return rollout.status in TRAINED_STATUSES and rollout.reward is not None


def build_samples(rollout: Rollout, trajectories: Sequence[Trajectory]) -> tuple[Sample, ...]:
    """One Sample per trajectory with a trained token, in the order of the trajectories.

    Returns:
        Empty when the status may not be trained, when there is no reward, or when nothing was trained in it.

    Raises:
        SampleError: a trajectory of another rollout.
    """
    if not may_be_trained(rollout) or rollout.reward is None:
        return ()
    _check_owner(rollout, trajectories)
    taught = [each for each in trajectories if any(each.response_mask)]
    if any(each.routed_experts is None for each in taught):
        taught = [replace(each, routed_experts=None) for each in taught]
    return tuple(_sample(rollout, rollout.reward, each) for each in taught)


def _check_owner(rollout: Rollout, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.rollout_id != rollout.id:
            raise SampleError(
                f"Trajectory {trajectory.index} is of rollout {trajectory.rollout_id} and was given with {rollout.id}. "
                "Build the samples of each rollout from its own trajectories."
            )


def _sample(rollout: Rollout, reward: Reward, trajectory: Trajectory) -> Sample:
    versions = [v for v, trained in zip(trajectory.weight_versions, trajectory.response_mask, strict=True) if trained]
    return Sample(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.response_mask,
        response_logprobs=trajectory.response_logprobs,
        routed_experts=trajectory.routed_experts,
        reward_score=reward.score,
        num_turns=len(trajectory.spans),
        metrics={
            "seconds": rollout.seconds,
            "n_tool_calls": float(rollout.n_tool_calls),
            "n_invalid_tool_calls": float(rollout.n_invalid_tool_calls),
        },
        extra_fields={
            "rollout_id": rollout.id,
            "task_id": rollout.task_id,
            "trajectory": trajectory.index,
            "group_id": rollout.group_id,
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "reward_extra_info": {part.name: part.score for part in reward.parts},
            "status": rollout.status,
        },
    )
