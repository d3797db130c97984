"""What a rollout left becomes what its span and the metrics tell: how it ended, its reward, what kept its sandbox
apart, where its tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agenttrain import telemetry
from agenttrain.reward.tampering import tampering_of
from agenttrain.trajectory.places import token_places

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from agenttrain.records import RolloutResult


def describe(result: RolloutResult, span: Span | None) -> None:
    """Tell how a rollout ended.

    Args:
        span: of the rollout. None: it was given up and has none any more; only the metrics are told.
    """
    rollout, reward = result.rollout, result.rollout.reward
    telemetry.reward_event(
        span,
        score=None if reward is None else reward.score,
        status=rollout.status,
        success=rollout.success,
        parts={} if reward is None else {part.name: part.score for part in reward.parts},
    )
    isolation = rollout.isolation
    telemetry.sandbox_attributes(
        span,
        backend="" if isolation is None else isolation.backend,
        unenforced=() if isolation is None else isolation.unenforced,
        n_tampering=len(tampering_of(rollout)),
    )
    telemetry.rollout_tokens(
        span,
        phase=rollout.phase,
        tokens=token_places(result.turns, result.trajectories, may_be_trained=bool(result.samples)),
        n_trajectories=len(result.trajectories),
        n_auxiliary=sum(turn.role == "auxiliary" for turn in result.turns),
        weight_versions=[version for turn in result.turns for version in _ends(turn.weight_versions)],
    )


def _ends(versions: Sequence[int]) -> Sequence[int]:
    """The first and the last: a call's versions only rise."""
    return (versions[0], versions[-1]) if versions else ()
