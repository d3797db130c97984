"""A model call's span becomes the tokens that it sampled, where they stand and what training made of them; and back.

A span, by its id or by its turn's id, leads to a range of one trajectory's response, and a position in a trajectory
leads to the call that sampled it. Everything comes from the run folder: no trace backend is asked, and a run that was
not traced is joined by its turns' ids. Invariant: the range holds exactly the ids of the turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.capture.store import StoreView
from agenttrain.errors import RunError
from agenttrain.figures import why_untrained
from agenttrain.records import (
    Rollout,
    RolloutResult,
    Sample,
    StepResult,
    TrainedSample,
    Trajectory,
    Turn,
    TurnSpan,
)
from agenttrain.sample.staleness import step_staleness
from agenttrain.telemetry import TrainedRollout

NO_IDS = "auxiliary: the user's own model answered, and its ids are not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRange:
    """The tokens of one model call: where they stand, and what training made of them."""

    turn: Turn
    trajectory: int | None
    """Index in the rollout. None: the call has no ids, or its rollout has not ended."""
    start: int
    end: int
    """Half open, in positions of the trajectory's response_ids."""
    reason: str
    """Why these tokens were not trained; empty: they were."""
    step: int | None = None
    """That trained them. None: no step did."""
    staleness: int | None = None
    """Of the trained sample."""
    weight_version: int | None = None
    """Of the weights that the step published."""
    advantages: tuple[float, ...] = ()
    """[end - start] as the loss saw them; empty: not trained, or the trainer did not tell."""

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        turn, versions = self.turn, self.turn.weight_versions
        return {
            "turn": turn.id,
            "rollout": turn.rollout_id,
            "trace_id": turn.trace_id,
            "span_id": turn.span_id,
            "node": turn.site.node,
            "role": turn.role,
            "role_reason": turn.role_reason,
            "trajectory": self.trajectory,
            "start": self.start,
            "end": self.end,
            "sampled_at_versions": [versions[0], versions[-1]] if versions else None,
            "trained": not self.reason,
            "mask_reason": self.reason,
            "step": self.step,
            "weight_version": self.weight_version,
            "staleness": self.staleness,
            "advantages": list(self.advantages),
            "response_ids": list(turn.response_ids),
            "response_logprobs": list(turn.response_logprobs),
        }


class TraceJoin:
    """Both directions, for one run."""

    def __init__(self, view: StoreView, steps: Sequence[Mapping[str, Any]]) -> None:
        """Take the run's records.

        Args:
            steps: rows of metrics.jsonl, which say what steps count and which weights they published.
        """
        self._view, self._steps = view, steps
        self._versions = {row["step"]: row["weight_version"] for row in steps}
        self._lives = {row["step"]: row["life"] for row in steps}

    def of_call(self, id: str) -> SampledRange:
        """Where the tokens of a call stand.

        Args:
            id: of the turn, or of the call's span.

        Raises:
            RunError: no call of the run has that id.
        """
        turn = self._view.turn(id) or self._view.turn_of_span(id)
        if turn is None:
            raise RunError(
                f"No model call has the id {id!r}: it is neither a turn's id (rollout#index) nor a span's (16 "
                "hexadecimal digits) in this run. agenttrain inspect RUN ROLLOUT --json lists both."
            )
        return self._of_turn(turn)

    def of_token(self, rollout_id: str, trajectory: int, position: int) -> SampledRange | None:
        """Where the call stands that sampled a token. None: nobody sampled it, it is context.

        Args:
            position: in the trajectory's response_ids.

        Raises:
            RunError: there is no such trajectory or position.
        """
        paths = {path.index: path for path in self._view.trajectories(rollout_id)}
        if trajectory not in paths or not 0 <= position < len(paths[trajectory].response_ids):
            known = ", ".join(f"{i}:0 to {i}:{len(path.response_ids) - 1}" for i, path in paths.items()) or "none"
            raise RunError(f"Rollout {rollout_id} has no token {trajectory}:{position}. Its response tokens: {known}.")
        for span in paths[trajectory].spans:
            if span.start <= position < span.end:
                return self.of_call(span.turn_id)
        return None

    def _of_turn(self, turn: Turn) -> SampledRange:
        if turn.role == "auxiliary":
            return _without_place(turn, NO_IDS)
        found = _place_of(turn, self._view.trajectories(turn.rollout_id))
        if found is None:
            return _without_place(turn, "the call has no ids, or its rollout has not ended")
        path, span = found
        trained = self._trained(path) if span.trained else None
        if trained is None:
            reason = span.reason or self._why_untrained(turn.rollout_id)
            return SampledRange(turn=turn, trajectory=path.index, start=span.start, end=span.end, reason=reason)
        return SampledRange(
            turn=turn,
            trajectory=path.index,
            start=span.start,
            end=span.end,
            reason="",
            step=trained.step,
            staleness=trained.staleness,
            weight_version=self._versions.get(trained.step),
            advantages=trained.advantages[span.start : span.end],
        )

    def _trained(self, path: Trajectory) -> TrainedSample | None:
        """The sample of a trajectory as a step that counts trained it."""
        for trained in self._view.trained(path.rollout_id):
            place = trained.sample.extra_fields["trajectory"]
            if place == path.index and self._lives.get(trained.step) == trained.life:
                return trained
        return None

    def _why_untrained(self, rollout_id: str) -> str:
        rollout = self._view.rollout(rollout_id)
        if rollout.phase != "train":
            return f"{rollout.phase}: evaluations are not trained"
        known = why_untrained([rollout], self._steps, ())
        return f"dropped: {known.get(rollout_id, 'no step that counts was handed it')}"


def trained_by_group(step: StepResult, results: Sequence[RolloutResult]) -> dict[str, list[TrainedRollout]]:
    """Group id to what an update's spans tell of its trained rollouts, from a step and the rollouts it was made of."""
    samples: defaultdict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(step.samples):
        samples[sample.extra_fields["rollout_id"]].append(place)
    ages = step_staleness(step)
    groups: dict[str, list[TrainedRollout]] = {}
    for rollout in (result.rollout for result in results):
        if rollout.id in samples:
            trained = _trained_rollout(rollout, samples[rollout.id], step, ages)
            groups.setdefault(rollout.group_id, []).append(trained)
    return groups


def _trained_rollout(rollout: Rollout, places: Sequence[int], step: StepResult, ages: Sequence[int]) -> TrainedRollout:
    weighed = [_total_advantage(step.samples[place], step.advantages[place]) for place in places if step.advantages]
    n_tokens = sum(sum(step.samples[place].response_mask) for place in places)
    return TrainedRollout(
        rollout_id=rollout.id,
        ids=(rollout.trace_id, rollout.span_id),
        staleness=max(ages[place] for place in places),
        n_tokens=n_tokens,
        advantage=sum(weighed) / n_tokens if weighed else None,
    )


def _total_advantage(sample: Sample, advantages: Sequence[float]) -> float:
    return sum(advantage for advantage, kept in zip(advantages, sample.response_mask, strict=True) if kept)


def _place_of(turn: Turn, paths: Sequence[Trajectory]) -> tuple[Trajectory, TurnSpan] | None:
    for path in paths:
        for span in path.spans:
            if span.turn_id == turn.id:
                return path, span
    return None


def _without_place(turn: Turn, reason: str) -> SampledRange:
    return SampledRange(turn=turn, trajectory=None, start=0, end=0, reason=reason)
