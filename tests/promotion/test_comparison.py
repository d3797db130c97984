"""promotion/comparison.py: what differs between two evaluations, by measure and slice, and which are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.errors import TaskError
from agenttrain.promotion.compare import paired_difference
from agenttrain.promotion.comparison import LostPlaces, compared, lost_places, mean_bound, means_of, ratio_bound
from agenttrain.promotion.comparison_text import as_dict, difference_lines, figures
from agenttrain.promotion.measures import Evaluation
from agenttrain.records import Reward, Rollout, Task


def evaluation(name: str, *successes: str, kinds: str = "", **values: Any) -> Evaluation:
    """A task for each text: a repeat for each of its signs, 1 a success, 0 none, x failed to the end."""
    tasks = tuple(
        Task(id=f"t{n:03}", input={"n": n}, metadata={"kind": kinds[n]} if kinds else {}) for n in range(len(successes))
    )
    rollouts = tuple(
        Rollout(
            id=f"t{n:03}-{repeat}",
            task_id=f"t{n:03}",
            phase="eval",
            step=0,
            sibling=repeat,
            attempt=0,
            status="environment_failure" if sign == "x" else "completed",
            reward=None if sign == "x" else Reward(score=float(sign), parts=()),
            success=sign == "1",
            n_turns=2,
            n_sampled_ids=10 + n,
            ended_at=1.0 + n,
        )
        for n, signs in enumerate(successes)
        for repeat, sign in enumerate(signs)
    )
    given: dict[str, Any] = {
        "name": name,
        "run_id": name,
        "phase": "eval",
        "tasks": tasks,
        "repeats": max(map(len, successes)),
        "temperature": 0.0,
        "seed": 0,
        "rollouts": rollouts,
        "hashes": {"graph": "g", "verifier": "v", "renderer": "r"},
    }
    return Evaluation(**{**given, **values})


def test_differences_by_hand() -> None:
    """Of four tasks two are gained; the reward of the one that failed to the end is left out, and counted."""
    seen = compared(evaluation("a", "0", "0", "1", "0"), evaluation("b", "1", "1", "1", "x"))
    assert (seen.base, seen.other, seen.n_tasks, seen.notes, seen.pass_at_k) == ("a", "b", 4, (), {})
    success, reward, turns = (seen.measures[name] for name in ("success", "reward", "turns"))
    assert (success.base, success.other, success.n_left_out) == (0.25, 0.75, 0)
    assert success.difference is not None
    assert (success.difference.value, success.difference.n_tasks) == (0.5, 4)
    assert (reward.base, reward.other, reward.n_left_out) == (pytest.approx(1 / 3), 1.0, 1)
    assert (turns.base, turns.other) == (2.0, 2.0)
    safety = seen.measures["safety_violations"]
    assert (safety.base, safety.other, safety.difference, safety.n_left_out) == (None, None, None, 4)


def test_what_one_side_did_not_measure_has_no_difference() -> None:
    """A chat model that tells no tokens, against a policy: base's own mean stands, and nothing beside it."""
    base, other = evaluation("a", "0", "1"), evaluation("b", "0", "1", answered_by="chat model")
    untold = replace(other, rollouts=tuple(replace(each, tokens_told=False) for each in other.rollouts))
    for measure in ("tokens", "cost"):
        seen = compared(base, untold).measures[measure]
        assert (seen.base, seen.other, seen.difference, seen.n_left_out) == (10.5, None, None, 2)
    assert means_of(untold)["tokens"] is None


def test_a_slice_is_shown_only_where_all_slices_at_once_exclude_0() -> None:
    """20 tasks of x that all gain, 20 of y of which 5 gain: alone y excludes 0, among two slices it does not."""
    kinds = "x" * 20 + "y" * 20
    base = evaluation("a", *["0"] * 40, kinds=kinds)
    other = evaluation("b", *["1"] * 20, *["1"] * 5, *["0"] * 15, kinds=kinds)
    x, y = compared(base, other).slices
    assert [(each.key, each.value, each.n_tasks, each.base, each.other) for each in (x, y)] == [
        ("kind", "x", 20, 0.0, 1.0),
        ("kind", "y", 20, 0.0, 0.25),
    ]
    assert (x.is_shown, x.simultaneous.low > 0.6) == (True, True)
    assert y.difference.low > 0 > y.simultaneous.low
    assert not y.is_shown


def test_a_key_whose_only_value_holds_every_task_is_no_slice() -> None:
    assert compared(evaluation("a", "0", "1", kinds="xx"), evaluation("b", "1", "1", kinds="xx")).slices == ()


def test_pass_at_k_is_compared_up_to_the_repeats_that_both_have() -> None:
    """a: 1 of 4 and 0 of 4; b: 1 of 2 and 2 of 2. pass@2: 0.5 and 0 against 1 and 1."""
    seen = compared(evaluation("a", "1000", "0000"), evaluation("b", "10", "11"))
    assert list(seen.pass_at_k) == [1, 2]
    assert [(each.base, each.other) for each in seen.pass_at_k.values()] == [(0.125, 0.75), (0.25, 1.0)]
    assert seen.notes == ("repeats: 4 in a, 2 in b",)


def test_what_else_is_not_the_same_is_noted() -> None:
    base = evaluation("a", "0", tables={"limits": {"turns": 4}})
    changed = evaluation(
        "b",
        "0",
        temperature=0.7,
        seed=3,
        hashes={"graph": "h", "verifier": "v", "renderer": "s"},
        tables={"limits": {"turns": 8}},
    )
    assert compared(base, changed).notes == (
        "temperature: 0 in a, 0.7 in b",
        "seed: 0 in a, 3 in b",
        "graph: its files changed between a and b",
        "renderer: messages become tokens otherwise in a and b",
        "[limits]: not the same in a and b",
    )


def test_other_tasks_contents_or_verifiers_are_refused_with_the_next_step() -> None:
    base = evaluation("a", "0", "1")
    with pytest.raises(TaskError, match=r"Only one of a and b evaluated 1 of the tasks \(t002\)\. .* --split"):
        compared(base, evaluation("b", "0", "1", "1"))
    other = evaluation("b", "0", "1")
    edited = replace(other, tasks=(other.tasks[0], replace(other.tasks[1], reference="new")))
    with pytest.raises(TaskError, match=r"other contents under 1 of the same task ids \(t001\)\. Run agenttrain eval"):
        compared(base, edited)
    with pytest.raises(TaskError, match=r"scored by different verifiers \(v and w\)"):
        compared(base, replace(other, hashes={"verifier": "w"}))


def test_the_split_of_a_task_is_of_no_weight() -> None:
    """eval --tasks FILE evaluates rows of any split."""
    other = evaluation("b", "0", "1")
    moved = replace(other, tasks=tuple(replace(each, split="held_out") for each in other.tasks))
    assert compared(evaluation("a", "0", "1"), moved).n_tasks == 2


def test_the_smallest_effect_goes_by_how_much_the_tasks_varied() -> None:
    """50 tasks: by their number alone 0.28; a tenth of them gained shows far less."""
    base = evaluation("a", *["0"] * 50)
    assert compared(base, evaluation("b", *["0"] * 50)).smallest_effect == pytest.approx(0.2802, abs=1e-4)
    assert compared(base, evaluation("b", *["1"] * 5, *["0"] * 45)).smallest_effect == pytest.approx(0.1225, abs=1e-4)


@given(st.permutations(range(12)), st.integers(1, 3))
@settings(max_examples=5, deadline=None)
def test_order_of_tasks_and_copies_of_repeats_change_nothing(order: list[int], copies: int) -> None:
    """A task is one observation, however often it is repeated, and wherever it stands."""
    signs = ["00", "01", "11", "10", "00", "01"] * 2
    base, other = evaluation("a", *signs), evaluation("b", *reversed(signs))
    turned = replace(base, tasks=tuple(base.tasks[n] for n in order), rollouts=tuple(reversed(base.rollouts)))
    plain = compared(base, other, n_resamples=50)
    assert compared(turned, other, n_resamples=50).measures == plain.measures
    copied = evaluation("a", *(each * copies for each in signs)), evaluation("b", *(s * copies for s in signs[::-1]))
    assert compared(*copied, n_resamples=50).measures["success"] == plain.measures["success"]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=30))
@settings(max_examples=10, deadline=None)
def test_sides_turn_and_a_simultaneous_interval_holds_the_single_one(pairs: list[tuple[bool, bool]]) -> None:
    kinds = "xy" * len(pairs)
    base = evaluation("a", *(str(int(a)) for a, _ in pairs), kinds=kinds)
    other = evaluation("b", *(str(int(b)) for _, b in pairs), kinds=kinds)
    there, back = compared(base, other, n_resamples=100), compared(other, base, n_resamples=100)
    one, turned = there.measures["success"].difference, back.measures["success"].difference
    assert one is not None
    assert turned is not None
    assert (one.low, one.high) == (pytest.approx(-turned.high), pytest.approx(-turned.low))
    for each in there.slices:
        assert each.simultaneous.low <= each.difference.low <= each.difference.high <= each.simultaneous.high


def test_bounds_of_a_mean_and_of_a_ratio() -> None:
    """Tokens are 10 to 49. Twice as many in each task is a ratio of 2, and what 40 equal tasks leave open."""
    base = evaluation("a", *["0"] * 40)
    double = replace(
        base, rollouts=tuple(replace(each, n_sampled_ids=2 * each.n_sampled_ids) for each in base.rollouts)
    )
    bound = mean_bound(base, "tokens")
    assert bound is not None
    assert 29.5 + 1.645 * 11.69 / math.sqrt(40) == pytest.approx(bound, rel=0.03)
    assert ratio_bound(base, double, "tokens") == pytest.approx(2 + 2 * (1 - 0.05 ** (1 / 40)))
    one = evaluation("a", "0")
    assert (mean_bound(one, "tokens"), ratio_bound(one, one, "tokens")) == (math.inf, math.inf)
    assert (mean_bound(one, "safety_violations"), ratio_bound(base, base, "invalid_tool_calls")) == (None, None)


def test_as_json_it_comes_back_as_it_was() -> None:
    kinds = "xy"
    seen = as_dict(compared(evaluation("a", "01", "00", kinds=kinds), evaluation("b", "11", "01", kinds=kinds)))
    assert json.loads(json.dumps(seen)) == seen
    assert (set(seen["pass_at_k"]), seen["slices"][0]["shown"]) == ({"1", "2"}, False)
    assert seen.keys() == {
        field.name for field in dataclasses.fields(compared(evaluation("a", "0"), evaluation("b", "1")))
    }


def test_the_lines_of_a_report_leave_success_to_the_line_above() -> None:
    """Only what both measured; pass@k before the others."""
    lines = difference_lines(as_dict(compared(evaluation("a", "01", "00"), evaluation("b", "11", "01"))))
    assert [line.split(" | ")[0] for line in lines[2:-3]] == [
        *("| pass@2", "| reward", "| tokens", "| turns", "| tool calls", "| invalid tool calls", "| seconds"),
    ]
    assert lines[-2].startswith("2 tasks that vary like these can show a difference in success of ")


def test_places_that_base_lost_show_nothing_of_other() -> None:
    """Both lost to the environment, and gone from the store; what other lost counts as no success all the same."""
    base = evaluation("a", "x0", "11", "00", "xx")
    base = replace(base, rollouts=tuple(each for each in base.rollouts if each.id != "t002-1"))
    other = evaluation("b", "10", "1x", "11", "11")
    lost = lost_places(base, other)
    assert lost is not None
    assert lost.difference == paired_difference(
        {"t000": [0], "t001": [1, 1], "t002": [0]}, {"t000": [0], "t001": [1, 0], "t002": [1]}
    )
    assert (lost.n, lost.difference.value) == (4, pytest.approx(1 / 6))
    assert lost_places(other, base) is not None
    assert lost_places(evaluation("c", "1", "0"), evaluation("d", "x", "1")) is None
    assert lost_places(evaluation("e", "x", "x"), evaluation("f", "1", "1")) == LostPlaces(n=2, difference=None)


def test_an_environment_that_only_failed_base_is_no_improvement() -> None:
    """Both policies do alike, and 15 of base's 300 places were lost: strictly counted other looks better."""
    base, other = evaluation("a", *["x"] * 15, *["1"] * 285), evaluation("b", *["1"] * 300)
    strict, lost = compared(base, other).measures["success"].difference, lost_places(base, other)
    assert strict is not None
    assert strict.low > 0
    assert lost is not None
    assert lost.difference is not None
    assert lost.difference.low < 0 == lost.difference.value


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (0.166, 0.13, 0.202, ("+0.166", "+0.130 to +0.202")),
        (-1234.5, -2000, 3, ("-1,234", "-2,000 to +3")),
        (12.34, -1, 30, ("+12.3", "-1.0 to +30.0")),
        (0.0002, 0.0001, 0.0003, ("+0.0002", "+0.0001 to +0.0003")),
    ],
)
def test_figures_are_as_long_as_their_size_asks(value: float, low: float, high: float, said: tuple[str, str]) -> None:
    assert figures({"value": value, "low": low, "high": high}) == said
