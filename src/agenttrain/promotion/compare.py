"""Two evaluations on the same tasks become the difference between them, with a confidence interval.

A task is one observation, however often it is repeated: its repeats are averaged and stay together in every resample.
Evaluations on different tasks are refused, never silently joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agenttrain.errors import TaskError

CONFIDENCE = 0.95
FEW_DIFFER = 10
"""With fewer tasks that differ, resampling them alone tells too little."""

_CHUNK = 1_000_000
"""Draws held in memory at once."""

Values = Mapping[str, Sequence[float]]
"""Task id to the values of its repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one repeat of one task came to."""

    task_id: str
    repeat: int
    """From 0."""
    value: float
    """1 or 0 for success, else a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Trained less base, and the interval that holds the true difference in 95 % of evaluations."""

    value: float
    low: float
    high: float
    n_tasks: int


def strict_values(
    outcomes: Iterable[Outcome], task_ids: Sequence[str], n_repeats: int, *, missing: float = 0.0
) -> dict[str, list[float]]:
    """Every place of an evaluation, [tasks] × [repeats]: a place without an outcome counts as `missing`.

    Raises:
        TaskError: an outcome of a task or a repeat that the evaluation doesn't have.
    """
    values = {task_id: [missing] * n_repeats for task_id in task_ids}
    for outcome in outcomes:
        if outcome.task_id not in values or not 0 <= outcome.repeat < n_repeats:
            raise TaskError(
                f"An outcome belongs to task {outcome.task_id!r}, repeat {outcome.repeat}; the evaluation has "
                f"{len(task_ids)} tasks and repeats 0 to {n_repeats - 1}. Give the tasks that were evaluated."
            )
        values[outcome.task_id][outcome.repeat] = outcome.value
    return values


def paired_difference(
    base: Values,
    trained: Values,
    *,
    confidence: float = CONFIDENCE,
    least_span: float = 1.0,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """The mean over tasks of trained less base, with a bootstrap interval over tasks.

    The interval is the expanded percentile one: its levels are widened as Student's t asks for, without which the
    bootstrap is too narrow with few tasks. Resampling tells little where hardly any task differs: with fewer than
    `FEW_DIFFER` the interval also holds that of Bonett and Price, which counts a task that gains and one that loses
    besides. Where all tasks differ by the same amount there is nothing to resample; then it allows for the share of
    other tasks that so many equal ones leave open. One task shows nothing.

    Args:
        base, trained: the same tasks, each with at least one value; the number of repeats may differ.
        confidence: chance that the interval holds the true difference; more than 0.95 where several are looked at.
        least_span: the least that one more task may be taken to differ by, in the unit of the values.
        n_resamples: draws of the bootstrap.
        seed: of the draws; equal seeds give equal intervals.

    Raises:
        TaskError: no tasks, different tasks, a task without values, or a value that is not finite.

    Source: T. Hesterberg, "What Teachers Should Know about the Bootstrap", arXiv:1411.5279 (expanded percentile);
        D. G. Bonett and R. M. Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based
        on Paired Data", J. Educ. Behav. Stat. 37 (2012).

    Example: base {"a": [0], "b": [1]}, trained {"a": [1], "b": [1]} -> value 0.5
    """
    differences = task_differences(base, trained)
    value, tail = float(differences.mean()), (1 - confidence) / 2
    if np.ptp(differences) < 1e-12:
        span = _span(base, trained, least_span)
        low, high = _interval_of_equals(value, len(differences), span, tail)
    else:
        low, high = _expanded_percentile(differences, tail, n_resamples=n_resamples, seed=seed)
        if np.count_nonzero(np.abs(differences) > 1e-12) < FEW_DIFFER:
            least, most = _with_one_more_each_way(differences, least_span, tail)
            low, high = min(low, least), max(high, most)
    return Difference(value=value, low=low, high=high, n_tasks=len(differences))


def upper_bound(means: npt.NDArray[np.float64], *, n_resamples: int = 10_000, seed: int = 0) -> float:
    """The upper bound (one-sided, 95 %) of the mean of these tasks; infinite where they are too few to bound it.

    Args:
        means: [tasks] what each came to, averaged over its repeats.
    """
    bound = upper_bound_of_ratio(np.ones_like(means), means, n_resamples=n_resamples, seed=seed)
    assert bound is not None  # the mean of ones is above 0
    return bound


def upper_bound_of_ratio(
    base: npt.NDArray[np.float64], other: npt.NDArray[np.float64], *, n_resamples: int = 10_000, seed: int = 0
) -> float | None:
    """The upper bound (one-sided, 95 %) of the mean of `other` over that of `base`.

    A studentized bootstrap over tasks, which follows a long right tail better than percentiles do. Where all tasks have
    the same ratio, the share of others that so many equal ones leave open may have twice as much.

    Args:
        base, other: [tasks] of the same tasks in the same order, none below 0.

    Returns:
        None where base's mean is not above 0; infinite where the tasks are too few to bound it.

    Source: B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), section 12.5 (bootstrap-t).
    """
    n, tail = len(base), 1 - CONFIDENCE
    if base.mean() <= 0:
        return None
    ratio, error = _ratio_and_error(np.array([_moments(base, other).mean(axis=0)]), n)
    if n == 1:
        return math.inf
    least = 1e-6 * abs(float(ratio[0]))  # an error below it is one of floats: all tasks have the same ratio
    if error[0] <= least:
        return _interval_of_equals(float(ratio[0]), n, 2 * float(abs(ratio[0])), tail)[1]
    means = _resampled_means(_moments(base, other), n_resamples, seed)
    ratios, errors = _ratio_and_error(means, n)
    t = np.divide(ratios - ratio[0], errors, out=np.full(len(ratios), -math.inf), where=errors > least)
    return float(ratio[0] - np.quantile(t, tail, method="lower") * error[0])


def pass_at_k(n_repeats: int, n_successes: int, k: int) -> float:
    """The chance that at least one of k repeats succeeds, estimated without bias from n of them.

    Raises:
        TaskError: fewer repeats than k.

    Source: Chen et al., arXiv:2107.03374, equation 1.

    Example: pass_at_k(4, 1, 2) -> 0.5
    """
    if not 1 <= k <= n_repeats:
        raise TaskError(f"pass@{k} needs {k} repeats of each task, and there are {n_repeats}. Raise eval.repeats.")
    return 1.0 - math.comb(n_repeats - n_successes, k) / math.comb(n_repeats, k)


def task_differences(base: Values, trained: Values) -> npt.NDArray[np.float64]:
    """[tasks] trained less base, each averaged over its repeats, in the order of the task ids.

    Raises:
        TaskError: no tasks, different tasks, a task without values, or a value that is not finite.
    """
    one_sided = sorted(set(base) ^ set(trained))
    if one_sided:
        raise TaskError(
            f"Only one of the two evaluations has {len(one_sided)} of the tasks ({', '.join(one_sided[:3])} …). "
            "Compare evaluations on the same tasks: agenttrain eval with the same --tasks and --split."
        )
    if not base:
        raise TaskError("There are no tasks to compare. Evaluate at least one task in both.")
    return task_means(trained) - task_means(base)


def task_means(values: Values) -> npt.NDArray[np.float64]:
    """[tasks] each averaged over its repeats, in the order of the task ids.

    Raises:
        TaskError: a task without values, or a value that is not finite.
    """
    return np.array([_mean(values, task_id) for task_id in sorted(values)])


def _mean(values: Values, task_id: str) -> float:
    repeats = values[task_id]
    if not len(repeats) or not all(map(math.isfinite, repeats)):
        raise TaskError(
            f"Task {task_id!r} has the values {list(repeats)}. Give at least one, all finite; a place without a result "
            "counts as 0 for success."
        )
    return math.fsum(repeats) / len(repeats)


def _span(base: Values, trained: Values, least: float) -> float:
    """The range of the values that were seen, 0 among them, and at least `least`."""
    seen = [value for values in (base, trained) for repeats in values.values() for value in repeats]
    return max(least, max(*seen, 0.0) - min(*seen, 0.0))


def _interval_of_equals(value: float, n_tasks: int, span: float, tail: float) -> tuple[float, float]:
    """The interval when every task differs by the same value.

    With n equal tasks, up to 1 - tail^(1/n) of all tasks may differ otherwise (tail: 2.5 % on each side), by -span or
    span at worst. So it takes six tasks that all improve from 0 to 1 to exclude 0, as in a sign test.
    """
    if n_tasks == 1:
        return -span, span
    others = 1.0 - tail ** (1 / n_tasks)
    return value - others * (span + value), value + others * (span - value)


def _expanded_percentile(
    differences: npt.NDArray[np.float64], tail: float, *, n_resamples: int, seed: int
) -> tuple[float, float]:
    """Percentiles of the resampled means, at levels widened for n tasks."""
    level = _expanded(tail, len(differences))
    means = _resampled_means(differences, n_resamples, seed)
    low, high = np.quantile(means, [level, 1 - level])
    return float(low), float(high)


def _expanded(tail: float, n_tasks: int) -> float:
    """The level of a percentile that stands for `tail` with so many tasks, as Student's t asks for."""
    from scipy.special import ndtr, stdtrit

    return float(ndtr(math.sqrt(n_tasks / (n_tasks - 1)) * stdtrit(n_tasks - 1, tail)))


def _with_one_more_each_way(differences: npt.NDArray[np.float64], span: float, tail: float) -> tuple[float, float]:
    """The interval of a mean to which a task that gains all there is to gain, and one that loses it, were added."""
    from scipy.special import ndtri

    most = max(span, float(np.abs(differences).max()))
    n = len(differences) + 2
    mean = float(differences.sum()) / n
    variance = (float((differences**2).sum()) + 2 * most**2) / n - mean**2
    half = -float(ndtri(tail)) * math.sqrt(variance / n)
    return mean - half, mean + half


def _moments(base: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[tasks, 5] whose means a ratio of means and its error are made of."""
    return np.column_stack([base, other, base * base, base * other, other * other])


def _ratio_and_error(
    means: npt.NDArray[np.float64], n_tasks: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """[n] the ratio of means and its standard error by the delta method, from means of `_moments`; 0 where base is."""
    base, other, square, product, other_square = means.T
    ratio = np.divide(other, base, out=np.zeros_like(base), where=base > 0)
    variance = np.maximum(other_square - 2 * ratio * product + ratio**2 * square, 0.0)
    error = np.divide(np.sqrt(variance / n_tasks), base, out=np.zeros_like(base), where=base > 0)
    return ratio, error


def _resampled_means(values: npt.NDArray[np.float64], n_resamples: int, seed: int) -> npt.NDArray[np.float64]:
    """[n_resamples, …] means of as many of the first axis drawn with replacement."""
    n = len(values)
    distinct, counts = np.unique(values, axis=0, return_counts=True)
    if 4 * len(distinct) <= n:  # how often each was drawn says the same, and is drawn sooner
        orders = slice(None), slice(None, None, -1)  # from both ends, so that the sides of a difference may turn
        sizes = n_resamples - n_resamples // 2, n_resamples // 2
        return np.concatenate(
            [
                np.random.default_rng(seed).multinomial(n, counts[order] / n, size=size) @ distinct[order] / n
                for order, size in zip(orders, sizes, strict=True)
            ]
        )
    rng, rows = np.random.default_rng(seed), max(1, _CHUNK // values.size)
    chunks: list[Any] = []
    for start in range(0, n_resamples, rows):
        drawn = rng.integers(0, n, size=(min(rows, n_resamples - start), n), dtype=np.int32)
        chunks.append(values[drawn].mean(axis=1))
    return np.concatenate(chunks)
