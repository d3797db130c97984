"""A canary that does as well is taken back with at most the false alarm, and one that does worse soon."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy.stats import hypergeom

from agenttrain.promotion.canary import ArmCount, bound_of_look, draws_canary, look_sizes, looked, next_look

INCUMBENT = 0.76
"""Success of the order desk's policy."""


def count(n: int, n_success: int) -> ArmCount:
    return ArmCount(n=n, n_success=n_success)


def test_the_same_conversation_is_drawn_alike_in_every_process() -> None:
    """By a hash: these are the ones in any process, on any machine."""
    drawn = [i for i in range(60) if draws_canary(f"thread-{i}", salt="a", share=0.1)]
    assert drawn == [7, 12, 31, 53, 56]


def test_a_new_canary_draws_anew_and_a_larger_share_keeps_what_it_had() -> None:
    names = [f"thread-{i}" for i in range(20_000)]
    by_salt = [{name for name in names if draws_canary(name, salt=salt, share=0.1)} for salt in "ab"]
    assert [0.09 < len(drawn) / len(names) < 0.11 for drawn in by_salt] == [True, True]
    assert 0.08 < len(by_salt[0] & by_salt[1]) / len(by_salt[0]) < 0.12
    assert by_salt[0] < {name for name in names if draws_canary(name, salt="a", share=0.2)}


def test_looks_grow_by_a_fifth() -> None:
    assert look_sizes(9, min_outcomes=10) == []
    assert look_sizes(60, min_outcomes=10) == [10, 12, 15, 18, 22, 27, 33, 40, 48, 58]
    assert look_sizes(4, min_outcomes=2) == [2, 3, 4]
    assert [next_look(n, min_outcomes=10) for n in (0, 9, 10, 11, 12)] == [10, 10, 12, 12, 15]


def test_the_parts_of_all_looks_add_up_to_the_false_alarm() -> None:
    assert bound_of_look(1, false_alarm=0.05) == pytest.approx(0.0075)
    assert math.fsum(bound_of_look(n, false_alarm=0.05) for n in range(1, 400)) == pytest.approx(0.05)


def test_a_look_is_fishers_exact_test() -> None:
    """The chance that so few of all successes fall to the canary, from the hypergeometric distribution."""
    look = looked(1, count(10, 3), count(90, 70), false_alarm=0.05)
    assert look.p == pytest.approx(hypergeom.cdf(3, 100, 73, 10))
    assert look.is_worse
    assert str(look) == (
        "succeeded in 3 of 10 (0.300), the incumbent in 70 of 90 (0.778) of the same time; "
        f"p = {look.p:.2g} at look 1, bound 0.0075"
    )
    assert not looked(1, count(10, 6), count(90, 70), false_alarm=0.05).is_worse


def test_a_canary_that_does_better_is_no_alarm_and_nothing_is_said_without_the_other_arm() -> None:
    assert looked(1, count(10, 10), count(90, 10), false_alarm=0.05).p == pytest.approx(1.0)
    assert not looked(1, count(10, 0), count(0, 0), false_alarm=0.4).is_worse


def taken_back_at(
    random: np.random.Generator, canary: float, *, n: int, incumbent: float = INCUMBENT, good_for: int = 0
) -> int | None:
    """How many outcomes of the canary it took; None: it was never taken back.

    Args:
        n: conversations, a tenth of them the canary's.
        good_for: outcomes of the canary in which it does as the incumbent.
    """
    is_canary = random.random(n) < 0.1
    seen = np.cumsum(is_canary)
    rate = np.where(is_canary & (seen > good_for), canary, incumbent)
    success = random.random(n) < rate
    n_canary, n_success = seen, np.cumsum(is_canary & success)
    n_others_success = np.cumsum(~is_canary & success)
    for number, size in enumerate(look_sizes(int(seen[-1]), min_outcomes=10), start=1):
        at = int(np.searchsorted(n_canary, size))
        p = hypergeom.cdf(n_success[at], at + 1, n_success[at] + n_others_success[at], size)
        if p <= bound_of_look(number, false_alarm=0.05):
            return size
    return None


@pytest.mark.slow
@pytest.mark.parametrize("success", [0.76, 0.3])
def test_one_that_does_as_well_is_rarely_taken_back(success: float) -> None:
    """At most 1 in 20 over 2,000 conversations: 1,000 of them, with a look at each size."""
    random = np.random.default_rng(0)
    found = [taken_back_at(random, success, n=2000, incumbent=success) for _ in range(1000)]
    assert sum(size is not None for size in found) <= 50


@pytest.mark.slow
@pytest.mark.parametrize(("success", "median"), [(0.5, 40), (0.3, 12)])
def test_one_that_does_worse_is_taken_back_soon(success: float, median: int) -> None:
    """Of the canary's conversations, in the middle of 300 canaries; all of them within 6,000 conversations."""
    random = np.random.default_rng(1)
    found = [taken_back_at(random, success, n=6000) for _ in range(300)]
    assert None not in found
    assert statistics.median(size or 0 for size in found) <= median
