"""promotion/compare.py: two evaluations on the same tasks become a difference with an interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.errors import TaskError
from agenttrain.promotion.compare import (
    Difference,
    Outcome,
    paired_difference,
    pass_at_k,
    strict_values,
    upper_bound,
    upper_bound_of_ratio,
)

Values = dict[str, list[float]]


def drawn(n_tasks: int, *, base: float, trained: float, seed: int, repeats: int = 1) -> tuple[Values, Values]:
    """Successes of two policies on as many tasks, independent of each other."""
    rng = np.random.default_rng(seed)
    chances = {"base": base, "trained": trained}
    made = {
        name: {f"t{i}": (rng.random(repeats) < chance).astype(float).tolist() for i in range(n_tasks)}
        for name, chance in chances.items()
    }
    return made["base"], made["trained"]


def test_the_difference_by_hand() -> None:
    """Repeats are averaged first: a rises by 0.5, b by 1, c falls by 0.5."""
    difference = paired_difference(
        {"a": [0, 1], "b": [0, 0], "c": [1]}, {"a": [1, 1], "b": [1], "c": [0, 1]}, n_resamples=1000
    )
    assert difference.value == pytest.approx(1 / 3)
    assert difference.n_tasks == 3
    assert difference.low < 1 / 3 < difference.high


def test_equal_seeds_give_equal_intervals_in_any_order_of_the_tasks() -> None:
    base, trained = drawn(40, base=0.4, trained=0.6, seed=1)
    turned = dict(reversed(base.items()))
    assert paired_difference(base, trained, seed=3) == paired_difference(turned, trained, seed=3)


def monte_carlo_error(error: float, n_resamples: int) -> float:
    """Four standard errors of the gap between two bootstraps' 2.5 % quantiles of a mean with that standard error.

    sqrt(p (1 - p) / n) over the normal density there, once for each bootstrap.
    """
    from scipy.stats import norm

    one = math.sqrt(0.025 * 0.975 / n_resamples) * error / float(norm.pdf(1.959964))
    return 4 * math.sqrt(2) * one


@pytest.mark.parametrize(("n_tasks", "repeats"), [(50, 1), (200, 2), (500, 4)])
def test_the_interval_agrees_with_scipys_paired_bootstrap(n_tasks: int, repeats: int) -> None:
    """scipy.stats.bootstrap, paired, at the levels of Hesterberg's table; within the two bootstraps' chance error.

    A bound lies on a grid of 1 / (tasks x repeats), so it may also be one step off.
    """
    from scipy import stats

    base, trained = drawn(n_tasks, base=0.5, trained=0.65, seed=2, repeats=repeats)
    seen = paired_difference(base, trained)
    ours, theirs = (np.array([np.mean(values[t]) for t in sorted(base)]) for values in (base, trained))
    t = stats.t.ppf(0.025, n_tasks - 1) * math.sqrt(n_tasks / (n_tasks - 1))
    independent = stats.bootstrap(
        (ours, theirs),
        lambda a, b, axis: b.mean(axis=axis) - a.mean(axis=axis),
        paired=True,
        method="percentile",
        vectorized=True,
        n_resamples=10_000,
        batch=1000,
        confidence_level=1 - 2 * stats.norm.cdf(t),
        rng=np.random.default_rng(9),
    ).confidence_interval
    error = (theirs - ours).std(ddof=1) / math.sqrt(n_tasks)
    allowed = monte_carlo_error(error, 10_000) + 1 / (n_tasks * repeats)
    assert seen.low == pytest.approx(independent.low, abs=allowed)
    assert seen.high == pytest.approx(independent.high, abs=allowed)


@pytest.mark.parametrize("confidence", [0.95, 0.995])
def test_the_interval_of_costs_agrees_with_scipys_paired_t_test(confidence: float) -> None:
    """300 tasks with skewed costs: within 4 % of its length of scipy.stats.ttest_rel's interval, at both ends."""
    from scipy import stats

    rng = np.random.default_rng(6)
    base, trained = rng.lognormal(4, 0.5, 300), 0.8 * rng.lognormal(4, 0.5, 300)
    seen = paired_difference(
        *({f"t{n:03}": [value] for n, value in enumerate(side)} for side in (base, trained)),
        confidence=confidence,
        least_span=0.0,
    )
    theirs = stats.ttest_rel(trained, base).confidence_interval(confidence)
    assert seen.low == pytest.approx(theirs.low, abs=0.04 * (theirs.high - theirs.low))
    assert seen.high == pytest.approx(theirs.high, abs=0.04 * (theirs.high - theirs.low))


@pytest.mark.slow
def test_the_upper_bound_of_a_mean_agrees_with_scipys_t_test_where_nothing_is_skewed() -> None:
    """400 normal costs: scipy.stats.ttest_1samp, one-sided; and a ratio to a constant is that bound divided by it."""
    from scipy import stats

    costs = np.random.default_rng(7).normal(100, 20, 400)
    theirs = stats.ttest_1samp(costs, 0.0, alternative="less").confidence_interval(0.95).high
    assert upper_bound(costs) == pytest.approx(theirs, abs=0.15)
    assert upper_bound_of_ratio(np.full(400, 50.0), costs) == pytest.approx(upper_bound(costs) / 50)


def test_the_upper_bound_of_a_skewed_mean_is_above_what_a_t_test_gives() -> None:
    """A long right tail moves it up, where percentiles would leave it too low."""
    from scipy import stats

    costs = np.random.default_rng(8).lognormal(0, 1, 60)
    assert upper_bound(costs) > stats.ttest_1samp(costs, 0.0, alternative="less").confidence_interval(0.95).high


def test_few_tasks_that_differ_give_bonett_and_prices_interval() -> None:
    """3 of 100 tasks lose and none gains: (-3 ± 1.96 sqrt(5 - 9/102)) / 102, by which a loss is not yet shown."""
    tasks = [f"t{n:03}" for n in range(100)]
    seen = paired_difference({t: [1] for t in tasks}, {t: [float(n >= 3)] for n, t in enumerate(tasks)})
    half = 1.959964 * math.sqrt(5 - 9 / 102) / 102
    assert (seen.value, seen.low) == (pytest.approx(-0.03), pytest.approx(-3 / 102 - half))
    assert seen.high == pytest.approx(-3 / 102 + half)
    assert seen.high > 0


def test_the_interval_agrees_with_the_normal_approximation() -> None:
    """mean ± 1.96 standard errors at 500 tasks."""
    base, trained = drawn(500, base=0.3, trained=0.5, seed=4)
    seen = paired_difference(base, trained)
    values = np.array([trained[t][0] - base[t][0] for t in base])
    half = 1.96 * values.std(ddof=1) / np.sqrt(500)
    assert seen.low == pytest.approx(seen.value - half, abs=0.005)
    assert seen.high == pytest.approx(seen.value + half, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("n_tasks", "repeats"), [(20, 1), (20, 4), (100, 1), (100, 4)])
def test_the_interval_covers_the_true_difference(n_tasks: int, repeats: int) -> None:
    """93 to 97 of 100 times, give or take 1.5, twice the chance error of 1000 evaluations (true difference 0.2)."""
    covered = 0
    for seed in range(1000):
        base, trained = drawn(n_tasks, base=0.4, trained=0.6, seed=seed, repeats=repeats)
        seen = paired_difference(base, trained, n_resamples=1000, seed=seed)
        covered += seen.low <= 0.2 + 1e-12 and seen.high >= 0.2 - 1e-12
    assert 915 <= covered <= 985


def test_more_repeats_of_the_same_tasks_do_not_count_as_more_tasks() -> None:
    """Each repeat copied ten times leaves the interval where it was."""
    base, trained = drawn(30, base=0.4, trained=0.6, seed=5)
    copies = ({t: v * 10 for t, v in values.items()} for values in (base, trained))
    assert paired_difference(base, trained) == paired_difference(*copies)


def test_one_task_shows_nothing() -> None:
    assert paired_difference({"a": [0]}, {"a": [1]}) == Difference(value=1.0, low=-1.0, high=1.0, n_tasks=1)


@pytest.mark.parametrize(("n_tasks", "shown"), [(2, False), (5, False), (6, True), (50, True)])
def test_equal_gains_on_few_tasks_are_no_proof(n_tasks: int, shown: bool) -> None:
    """As in a sign test, it takes six tasks that all improve."""
    tasks = [f"t{i}" for i in range(n_tasks)]
    seen = paired_difference({t: [0] for t in tasks}, {t: [1] for t in tasks})
    assert (seen.value, seen.high) == (1.0, 1.0)
    assert (seen.low > 0) is shown


def test_no_difference_at_all_has_an_interval_around_0() -> None:
    """100 tasks that all come out the same leave 1 - 0.025^(1/100) = 3.6 % open."""
    same = {f"t{i}": [1.0] for i in range(100)}
    seen = paired_difference(same, same)
    assert seen.value == 0.0
    assert (seen.low, seen.high) == (pytest.approx(-0.0362, abs=1e-4), pytest.approx(0.0362, abs=1e-4))


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8))
@settings(max_examples=50)
def test_the_interval_holds_the_value_and_turns_with_the_sides(pairs: dict[str, tuple[float, float]]) -> None:
    base = {task: [a] for task, (a, _) in pairs.items()}
    trained = {task: [b] for task, (_, b) in pairs.items()}
    there, back = (paired_difference(*sides, n_resamples=400) for sides in ((base, trained), (trained, base)))
    assert there.low <= there.value + 1e-9
    assert there.value <= there.high + 1e-9
    assert there.value == pytest.approx(-back.value)
    assert there.low == pytest.approx(-back.high)


@pytest.mark.parametrize(
    ("base", "trained", "words"),
    [
        ({}, {}, "no tasks to compare"),
        ({"a": [1.0]}, {"b": [1.0]}, "Only one of the two evaluations has 2 of the tasks"),
        ({"a": []}, {"a": [1.0]}, "Task 'a' has the values"),
        ({"a": [float("nan")]}, {"a": [1.0]}, "all finite"),
    ],
)
def test_evaluations_that_can_not_be_compared_are_refused(base: Values, trained: Values, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        paired_difference(base, trained)


def test_a_place_without_an_outcome_counts_as_missing() -> None:
    outcomes = [Outcome(task_id="a", repeat=1, value=1.0)]
    assert strict_values(outcomes, ["a", "b"], 2) == {"a": [0.0, 1.0], "b": [0.0, 0.0]}
    with pytest.raises(TaskError, match="task 'c', repeat 0"):
        strict_values([Outcome(task_id="c", repeat=0, value=1.0)], ["a"], 1)
    with pytest.raises(TaskError, match="repeats 0 to 0"):
        strict_values([Outcome(task_id="a", repeat=1, value=1.0)], ["a"], 1)


def test_pass_at_k_by_hand() -> None:
    """Of 4 repeats with 1 success, 3 of the 6 pairs hold it."""
    assert [pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 4, 1), pass_at_k(4, 1, 4)] == [0.5, 0.0, 1.0, 1.0]
    with pytest.raises(TaskError, match="pass@5 needs 5 repeats"):
        pass_at_k(4, 1, 5)
