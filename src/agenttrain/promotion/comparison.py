"""Two evaluations of the same tasks become what differs between them: every measure, every slice, pass@k.

All intervals are of the mean over tasks of other less base, a task being one observation with its repeats averaged.
A task that one side has no value of is left out of that measure and counted. Nothing here is decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agenttrain.effect import smallest_effect_seen
from agenttrain.errors import TaskError
from agenttrain.promotion.compare import (
    CONFIDENCE,
    Difference,
    Values,
    paired_difference,
    pass_at_k,
    task_differences,
    task_means,
    upper_bound,
    upper_bound_of_ratio,
)
from agenttrain.promotion.measures import MEASURES, Evaluation, Measure, measured
from agenttrain.promotion.summary import ks_of, slices
from agenttrain.records import Task

UNIT_RANGES: tuple[Measure, ...] = ("success", "reward", "turns", "tool_calls", "invalid_tool_calls", "tokens")
"""Measures in which a task may differ by 1 even where none was seen to; safety violations too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureDifference:
    """One measure of two evaluations."""

    measure: Measure
    base: float | None
    """Mean over the tasks that both measured; over its own where only one did. None: not measured."""
    other: float | None
    difference: Difference | None
    """Other less base, 95 %. None: one side did not measure it."""
    n_left_out: int
    """Tasks that one side, or both, have no value of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDifference:
    """Success on the tasks that have one value of a metadata key."""

    key: str
    value: str
    n_tasks: int
    base: float
    other: float
    difference: Difference
    """95 %, by itself."""
    simultaneous: Difference
    """At 1 - 0.05 / slices: that all of these hold the truth at once has a chance of 95 %."""

    @property
    def is_shown(self) -> bool:
        """Whether a difference is shown, however many slices were looked at."""
        return self.simultaneous.low > 0 or self.simultaneous.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What differs between two evaluations of the same tasks."""

    base: str
    """Name of the evaluation that the other is held against."""
    other: str
    n_tasks: int
    measures: Mapping[Measure, MeasureDifference]
    """All of them, those that were not measured too."""
    slices: tuple[SliceDifference, ...]
    """Of metadata keys with at most 20 values; one that holds every task is none."""
    pass_at_k: Mapping[int, MeasureDifference]
    """Of success, by k; empty where either has one repeat only."""
    smallest_effect: float
    """The smallest difference in success that these tasks can show at 95 % with power 80 %."""
    notes: tuple[str, ...]
    """In words, what else is not the same: temperature, seed, repeats, graph …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPlaces:
    """Places where base's environment failed, or of which its run lost the rollout: they count as no success of base,
    and so for other, though nobody knows what base would have done there."""

    n: int
    difference: Difference | None
    """In success on all other places, 95 %. None: there is no other."""


def compared(base: Evaluation, other: Evaluation, *, seed: int = 0, n_resamples: int = 10_000) -> Compared:
    """What differs between two evaluations, with intervals.

    Args:
        seed: of the bootstrap's draws; equal ones give equal intervals.
        n_resamples: draws of each bootstrap.

    Raises:
        TaskError: other tasks, tasks of other contents, or another verifier.
    """
    refuse_incomparable(base, other)
    successes = measured(base, "success"), measured(other, "success")
    return Compared(
        base=base.name,
        other=other.name,
        n_tasks=len(base.tasks),
        measures={each: _of_measure(base, other, each, seed=seed, n_resamples=n_resamples) for each in MEASURES},
        slices=tuple(_slices(base.tasks, *successes, seed=seed, n_resamples=n_resamples)),
        pass_at_k={
            k: _difference("success", *_passes(successes, k), len(base.tasks), seed=seed, n_resamples=n_resamples)
            for k in ks_of(min(base.repeats, other.repeats))
        },
        smallest_effect=smallest_effect_seen(task_differences(*successes).tolist()),
        notes=tuple(_notes(base, other)),
    )


def lost_places(base: Evaluation, other: Evaluation, *, seed: int = 0, n_resamples: int = 10_000) -> LostPlaces | None:
    """What differs in success where base was measured; those of other still count as no success.

    Args:
        base, other: of the same tasks, as often repeated.

    Returns:
        None where base was measured in every place.
    """
    successes = {(each.task_id, each.sibling): float(each.success) for each in other.rollouts}
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for each in base.rollouts:
        if each.reward is not None:
            ours.setdefault(each.task_id, []).append(float(each.success))
            theirs.setdefault(each.task_id, []).append(successes.get((each.task_id, each.sibling), 0.0))
    n_lost = len(base.tasks) * base.repeats - sum(map(len, ours.values()))
    if not n_lost:
        return None
    found = paired_difference(ours, theirs, seed=seed, n_resamples=n_resamples) if ours else None
    return LostPlaces(n=n_lost, difference=found)


def means_of(evaluation: Evaluation) -> dict[Measure, float | None]:
    """Each measure's mean over the tasks that have a value of it. None: not measured."""
    return {measure: _mean(measured(evaluation, measure)) for measure in MEASURES}


def refuse_incomparable(base: Evaluation, other: Evaluation) -> None:
    """Refuse two evaluations that would be compared on different work.

    Raises:
        TaskError: other tasks, tasks of other contents, or another verifier.
    """
    ours, theirs = ({task.id: _contents(task) for task in each.tasks} for each in (base, other))
    one_sided = sorted(set(ours) ^ set(theirs))
    if one_sided:
        raise TaskError(
            f"Only one of {base.name} and {other.name} evaluated {len(one_sided)} of the tasks "
            f"({', '.join(one_sided[:3])}{' …' if len(one_sided) > 3 else ''}). Evaluate both on the same tasks: "
            "agenttrain eval with the same --tasks and --split."
        )
    changed = [task_id for task_id, contents in ours.items() if theirs[task_id] != contents]
    if changed:
        raise TaskError(
            f"{base.name} and {other.name} hold other contents under {len(changed)} of the same task ids "
            f"({', '.join(changed[:3])}{' …' if len(changed) > 3 else ''}). Run agenttrain eval again on today's tasks."
        )
    if base.hashes.get("verifier") != other.hashes.get("verifier"):
        raise TaskError(
            f"{base.name} and {other.name} were scored by different verifiers ({base.hashes.get('verifier')} and "
            f"{other.hashes.get('verifier')}). Run agenttrain eval again for the older one, with today's verifier."
        )


def ratio_bound(
    base: Evaluation, other: Evaluation, measure: Measure, *, seed: int = 0, n_resamples: int = 10_000
) -> float | None:
    """The 95 % upper bound (one-sided) of other's mean over base's mean, on the tasks that both measured.

    Returns:
        None where one side did not measure it, or base's mean is not above 0; infinite where too few tasks bound it.
    """
    ours, theirs = _common(measured(base, measure), measured(other, measure))
    if not ours:
        return None
    return upper_bound_of_ratio(task_means(ours), task_means(theirs), seed=seed, n_resamples=n_resamples)


def mean_bound(evaluation: Evaluation, measure: Measure, *, seed: int = 0, n_resamples: int = 10_000) -> float | None:
    """The 95 % upper bound (one-sided) of an evaluation's mean over tasks.

    Returns:
        None where it was not measured; infinite for a single task, which bounds nothing.
    """
    values = measured(evaluation, measure)
    if not values:
        return None
    return upper_bound(task_means(values), seed=seed, n_resamples=n_resamples)


def _contents(task: Task) -> tuple[object, ...]:
    """All of a task but its split, which is of no weight once it was evaluated."""
    return task.input, task.reference, task.metadata, task.context


def _of_measure(
    base: Evaluation, other: Evaluation, measure: Measure, *, seed: int, n_resamples: int
) -> MeasureDifference:
    values = measured(base, measure), measured(other, measure)
    return _difference(measure, *values, len(base.tasks), seed=seed, n_resamples=n_resamples)


def _difference(
    measure: Measure, base: Values, other: Values, n_tasks: int, *, seed: int, n_resamples: int
) -> MeasureDifference:
    ours, theirs = _common(base, other)
    least = 0.0 if measure in ("cost", "seconds") else 1.0
    return MeasureDifference(
        measure=measure,
        base=_mean(ours or base),
        other=_mean(theirs or other),
        difference=paired_difference(ours, theirs, least_span=least, seed=seed, n_resamples=n_resamples)
        if ours
        else None,
        n_left_out=n_tasks - len(ours),
    )


def _common(base: Values, other: Values) -> tuple[Values, Values]:
    """Of the tasks that both have."""
    both = base.keys() & other.keys()
    ours, theirs = ({id: values for id, values in each.items() if id in both} for each in (base, other))
    return ours, theirs


def _mean(values: Values) -> float | None:
    return float(task_means(values).mean()) if values else None


def _slices(
    tasks: Sequence[Task], base: Values, other: Values, *, seed: int, n_resamples: int
) -> Iterator[SliceDifference]:
    found = [
        (key, value, ids)
        for key, values in slices(tasks).items()
        for value, ids in values.items()
        if len(ids) < len(tasks)
    ]
    for key, value, ids in found:
        ours, theirs = ({id: each[id] for id in ids} for each in (base, other))
        alone = paired_difference(ours, theirs, seed=seed, n_resamples=n_resamples)
        at_once = 1 - (1 - CONFIDENCE) / len(found)
        yield SliceDifference(
            key=key,
            value=value,
            n_tasks=len(ids),
            base=float(task_means(ours).mean()),
            other=float(task_means(theirs).mean()),
            difference=alone,
            simultaneous=paired_difference(ours, theirs, confidence=at_once, seed=seed, n_resamples=n_resamples),
        )


def _passes(successes: tuple[Values, Values], k: int) -> tuple[Values, Values]:
    """Each task's pass@k, as its only value."""
    base, other = (
        {id: [pass_at_k(len(values), round(sum(values)), k)] for id, values in each.items()} for each in successes
    )
    return base, other


def _notes(base: Evaluation, other: Evaluation) -> Iterator[str]:
    """What is not the same, though it does not make the two incomparable."""
    for what in ("temperature", "repeats", "seed"):
        ours, theirs = getattr(base, what), getattr(other, what)
        if ours != theirs:
            yield f"{what}: {ours:g} in {base.name}, {theirs:g} in {other.name}"
    if base.hashes.get("graph") != other.hashes.get("graph"):
        yield f"graph: its files changed between {base.name} and {other.name}"
    if base.answered_by == other.answered_by == "policy" and base.hashes.get("renderer") != other.hashes.get(
        "renderer"
    ):
        yield f"renderer: messages become tokens otherwise in {base.name} and {other.name}"
    for table in ("limits", "cost"):
        if base.tables.get(table) != other.tables.get(table):
            yield f"[{table}]: not the same in {base.name} and {other.name}"
