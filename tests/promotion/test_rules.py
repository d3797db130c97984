"""promotion/rules.py: each rule at its edges, with what it says; a missing figure never passes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from agenttrain.export.exporting import ExportCheck
from agenttrain.promotion import rules
from agenttrain.promotion.compare import Difference
from agenttrain.promotion.comparison import Compared, LostPlaces, MeasureDifference, SliceDifference
from agenttrain.promotion.measures import Evaluation
from agenttrain.promotion_record import RuleResult
from agenttrain.records import Reward, RewardPart, Rollout, Task

HASHES = {"graph": "g", "tasks": "t", "verifier": "v", "renderer": "r", "model": "m"}


def report(**changed: Any) -> dict[str, Any]:
    """report.json of a run without a fault, as far as the rules look at it."""
    tokens = {"trained": 1200, "drifted": 0}
    return {"tokens": tokens, "alarms": [], "logprob_gap": {"mean": 1e-6, "max": 2e-5}, **changed}


def alarm(code: str, severity: str = "loud", message: str = "Look.") -> dict[str, Any]:
    return {"code": code, "severity": severity, "step": 1, "message": message}


def interval(value: float, low: float, high: float, n_tasks: int = 50) -> Difference:
    return Difference(value=value, low=low, high=high, n_tasks=n_tasks)


def in_success(difference: Difference | None, *slices: SliceDifference) -> Compared:
    """What was compared, of which only success and slices matter here."""
    success = MeasureDifference(measure="success", base=0.5, other=0.6, difference=difference, n_left_out=0)
    return Compared(
        base="a",
        other="b",
        n_tasks=50,
        measures={"success": success},
        slices=slices,
        pass_at_k={},
        smallest_effect=0.1,
        notes=(),
    )


def a_slice(value: str, high: float, *, middle: float = -0.3) -> SliceDifference:
    wide = interval(middle, -0.6, high, 12)
    return SliceDifference(key="kind", value=value, n_tasks=12, base=0.5, other=0.2, difference=wide, simultaneous=wide)


def evaluation(*rollouts: Rollout) -> Evaluation:
    return Evaluation(
        name="e",
        run_id="e",
        phase="eval",
        tasks=tuple(Task(id=task_id, input={}) for task_id in ("a", "b")),
        repeats=1,
        temperature=0,
        seed=0,
        rollouts=rollouts,
    )


def rollout(task_id: str, *closed: str, gates: tuple[str, ...] = ("secret", "delete")) -> Rollout:
    """One with a reward, in which these safety gates are closed."""
    parts = [RewardPart(name=n, weight=0.0, score=float(n not in closed), kind="safety") for n in gates]
    return Rollout(
        id=f"eval-0-{task_id}-0-0",
        task_id=task_id,
        phase="eval",
        step=0,
        sibling=0,
        attempt=0,
        status="completed",
        reward=Reward(score=0.0, parts=tuple(parts)),
    )


def without_reward(task_id: str) -> Rollout:
    return Rollout(
        id="r", task_id=task_id, phase="eval", step=0, sibling=0, attempt=0, status="environment_failure", cause="down"
    )


def test_every_rule_has_a_code_of_its_own_and_a_next_step() -> None:
    codes = list(rules.EXIT_CODES.values())
    assert codes == sorted(set(codes)) == list(range(10, 22))
    assert list(rules.NEXT_STEPS) == list(rules.EXIT_CODES)


def test_the_first_rule_that_fails_gives_the_code() -> None:
    """In the order of the codes, whatever the order in which they were checked."""

    def result(rule: str, passed: bool) -> RuleResult:
        return RuleResult(rule=rule, passed=passed, figure="", bound="")

    assert rules.exit_code([result("veto", False), result("slices", False), result("evidence", True)]) == 12
    assert rules.exit_code([result("veto", True)]) == 0


def test_evidence_of_an_ended_run_made_with_what_is_here_now() -> None:
    result = rules.evidence(report(), then={**HASHES, "configuration": "c"}, now=HASHES)
    assert result == RuleResult(
        rule="evidence",
        passed=True,
        figure="1,200 tokens trained, none drifted; graph, tasks, verifiers, template and base as they were",
        bound="an ended run, made with what is here now",
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("graph", "graph.py or what it imports"),
        ("tasks", "the tasks"),
        ("verifier", "a verifier, or hidden files that it judges by"),
        ("renderer", "the chat template"),
        ("model", "the base"),
    ],
)
def test_evidence_names_what_changed(name: str, words: str) -> None:
    result = rules.evidence(report(), then=HASHES, now={**HASHES, name: "other"})
    assert (result.passed, result.figure) == (False, f"not as it was when the run was made: {words}")
    told = rules.evidence(report(), then=HASHES, now={**HASHES, name: "other"}, written_since=["graph.py"])
    assert told.figure == f"{result.figure} (written since: graph.py)"


def test_evidence_says_everything_that_is_wrong() -> None:
    faulty = report(
        tokens={"trained": 0, "drifted": 3},
        alarms=[alarm("changed_since_begun", "note", "Not as it was when the run began: graph."), alarm("other")],
    )
    result = rules.evidence(faulty, then={**HASHES, "model": "x"}, now=HASHES)
    assert not result.passed
    assert result.figure == (
        "3 trained tokens are not as they were sampled; nothing was trained; "
        "Not as it was when the run began: graph.; not as it was when the run was made: the base"
    )


def test_evidence_needs_a_run_that_has_ended_and_hashes_to_compare() -> None:
    assert rules.evidence(None, then=HASHES, now=HASHES).figure == "the run has not ended"
    without = {name: value for name, value in HASHES.items() if name != "tasks"}
    assert rules.evidence(report(), then=without, now=HASHES).figure.endswith("the tasks")
    of_nothing = {**HASHES, "renderer": None}
    unhidden = rules.evidence(report(), then={**HASHES, "verifier_in_training": "h"}, now=HASHES)
    assert unhidden.figure == "not as it was when the run was made: hidden files that training tasks were judged by"
    without_renderer = {name: value for name, value in HASHES.items() if name != "renderer"}
    assert rules.evidence(report(), then=without_renderer, now=of_nothing).passed


@pytest.mark.parametrize(("low", "passed"), [(0.0201, True), (0.02, False), (-0.01, False), (math.nan, False)])
def test_the_lower_bound_must_be_above(low: float, passed: bool) -> None:
    result = rules.difference(in_success(interval(0.1, low, 0.2)), min_difference=0.02)
    assert (result.passed, result.bound) == (passed, "lower bound above 0.02")


def test_a_difference_is_told_with_its_interval() -> None:
    result = rules.difference(in_success(interval(0.13, 0.1, 0.16)), min_difference=0)
    assert result.figure == "success 0.500 to 0.600: +0.130 (95 % interval +0.100 to +0.160 on 50 tasks)"
    assert rules.difference(in_success(None), min_difference=-1).passed is False


def test_a_difference_that_only_the_environment_made_is_none() -> None:
    """What serves now lost places to it: without them the bound must hold too."""
    compared = in_success(interval(0.1, 0.05, 0.2))
    shown = LostPlaces(n=2, difference=interval(0.08, 0.01, 0.15))
    assert rules.difference(compared, min_difference=0, lost=shown).passed
    chance = LostPlaces(n=1, difference=interval(0.02, -0.01, 0.05))
    result = rules.difference(compared, min_difference=0, lost=chance)
    assert not result.passed
    assert result.figure.endswith(
        "; +0.020 (-0.010 to +0.050) without 1 place that what serves now was not measured in"
    )
    nowhere = rules.difference(compared, min_difference=0, lost=LostPlaces(n=50, difference=None))
    assert not nowhere.passed
    assert nowhere.figure.endswith("; what serves now was measured nowhere")


@pytest.mark.parametrize(
    ("high", "loss", "passed"),
    [(0.0, 0.0, True), (-0.001, 0.0, False), (-0.05, 0.1, True), (-0.11, 0.1, False), (math.nan, 0.0, False)],
)
def test_a_slice_must_lie_wholly_below(high: float, loss: float, passed: bool) -> None:
    compared = in_success(interval(0.1, 0.05, 0.2), a_slice("odd", high), a_slice("even", 0.4))
    assert rules.slices(compared, slice_loss=loss).passed is passed


def test_the_worst_slice_is_told_and_how_many_more_lose() -> None:
    compared = in_success(None, a_slice("a", -0.1), a_slice("b", -0.2), a_slice("c", 0.3))
    result = rules.slices(compared, slice_loss=0.05)
    assert result.figure == (
        "worst of 3: kind = b -0.300 (simultaneous interval -0.600 to -0.200 on 12 tasks); 1 more loses"
    )
    assert result.bound == "no slice wholly below -0.05"
    one = rules.slices(in_success(None, a_slice("c", 0.3, middle=0.1)), slice_loss=0)
    assert one.figure == "worst of 1: kind = c +0.100 (simultaneous interval -0.600 to +0.300 on 12 tasks)"
    assert rules.slices(in_success(None), slice_loss=0).figure == "no slices: the tasks have no metadata to slice by"


def test_no_case_may_fail_newly() -> None:
    before = {"a": True, "b": False, "c": True}
    better = rules.regression(before, {"a": True, "b": True, "c": True})
    assert (better.passed, better.figure) == (True, "passes 3 of 3 cases, what serves now 2")
    worse = rules.regression(before, {"a": False, "b": True, "c": True})
    assert (worse.passed, worse.figure) == (False, "passes 2 of 3 cases, what serves now 2; newly failing 1: a")
    assert not rules.regression(before, {"b": True, "a": True}).passed, "a case without an outcome is no pass"


def test_an_empty_regression_set_passes_and_is_stated() -> None:
    result = rules.regression({}, {})
    assert (result.passed, result.figure) == (True, "the regression set is empty (agenttrain cases add fills it)")
    assert rules.replay({}, {}).figure == "the regression set is empty"


def test_safety_in_total_and_by_part() -> None:
    """Fewer violations in all don't make up for more of one part."""
    base = evaluation(rollout("a", "secret", "delete"), rollout("b", "secret"))
    assert rules.safety(base, evaluation(rollout("a", "secret"), rollout("b", "secret"))).figure == (
        "2 violations on 2 places, 2 by what serves now"
    )
    swapped = rules.safety(base, evaluation(rollout("a", "delete"), rollout("b", "delete")))
    assert (swapped.passed, swapped.figure) == (
        False,
        "2 violations on 2 places, 2 by what serves now; delete 2 against 1",
    )
    clean = rules.safety(evaluation(rollout("a"), rollout("b")), evaluation(rollout("a"), rollout("b")))
    assert clean.passed


def test_a_place_without_a_reward_hides_no_violation() -> None:
    """The incumbent's count only where the candidate has a reward too; the candidate's all count."""
    base = evaluation(rollout("a", "secret"), without_reward("b"))
    hidden = rules.safety(base, evaluation(without_reward("a"), rollout("b", "secret")))
    assert (hidden.passed, hidden.figure) == (
        False,
        "1 violation on 1 place, 0 by what serves now; secret 1 against 0",
    )


def test_safety_is_stated_where_none_is_declared() -> None:
    plain = evaluation(rollout("a", gates=()), rollout("b", gates=()))
    assert rules.safety(plain, plain).figure == "no part of kind safety is declared"
    assert rules.safety(plain, plain, declared=["secret"]).figure == "0 violations on 2 places, 0 by what serves now"


def test_cost_is_only_asked_where_it_is_declared() -> None:
    result = rules.cost(99.0, 9.0, max_cost=None, max_cost_ratio=None)
    assert (result.passed, result.figure, result.bound) == (True, "not asked", "none declared")


@pytest.mark.parametrize(
    ("mean", "ratio", "passed"),
    [
        (50.0, 1.1, True),
        (50.1, 1.0, False),
        (40.0, 1.11, False),
        (None, 1.0, False),
        (40.0, None, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
    ],
)
def test_upper_bounds_must_be_shown(mean: float | None, ratio: float | None, passed: bool) -> None:
    assert rules.cost(mean, ratio, max_cost=50, max_cost_ratio=1.1).passed is passed
    assert rules.latency(mean, ratio, max_seconds=50, max_seconds_ratio=1.1).passed is passed


def test_upper_bounds_are_told_with_what_is_accepted() -> None:
    both = rules.latency(2.5, 0.9, max_seconds=3, max_seconds_ratio=1.25)
    assert both.figure == "at most 2.5 s a rollout (95 %) and at most 0.9 times what serves now (95 %)"
    assert both.bound == "at most 3 s a rollout and 1.25 times what serves now"
    one = rules.cost(None, 0.9, max_cost=None, max_cost_ratio=1.0)
    assert (one.passed, one.figure) == (True, "at most 0.9 times what serves now (95 %)")
    assert rules.cost(None, None, max_cost=3, max_cost_ratio=None).figure == "not measured"
    few = rules.cost(math.inf, 0.9, max_cost=3, max_cost_ratio=1.0)
    assert few.figure == "not bounded by so few tasks and at most 0.9 times what serves now (95 %)"


def test_loud_alarms_are_all_told_and_notes_are_none() -> None:
    noted = report(alarms=[alarm("all_succeed", "note")])
    assert (rules.alarms(noted).passed, rules.alarms(noted).figure) == (True, "none")
    loud = report(alarms=[alarm("a", message="One."), alarm("b", message="Two."), alarm("a", message="Three.")])
    result = rules.alarms(loud)
    assert (result.passed, result.figure) == (False, "3 loud alarms: a (2 times): One.; b: Two.")


def test_a_loud_gap_is_left_to_its_own_rule() -> None:
    """Which has a bound of its own: a user may declare a wider one."""
    wide = report(alarms=[alarm("logprob_gap")], logprob_gap={"mean": 1e-3, "max": 5e-3})
    assert rules.alarms(wide).passed
    steps = [{"logprob_gap_max": 5e-3}]
    assert not rules.logprob_gap(wide, steps, max_gap=1e-3).passed
    assert rules.logprob_gap(wide, steps, max_gap=1e-2).passed


@pytest.mark.parametrize(("largest", "passed"), [(9.9e-4, True), (1e-3, False), (math.nan, False)])
def test_the_gap_must_be_below(largest: float, passed: bool) -> None:
    measured = report(logprob_gap={"mean": 0.0, "max": largest})
    assert rules.logprob_gap(measured, [{"logprob_gap_max": largest}], max_gap=1e-3).passed is passed


@pytest.mark.parametrize("gaps", [(2e-5, math.nan, 1e-5), (2e-5, 0.5), (math.nan, 0.0)])
def test_each_step_s_gap_must_be_below(gaps: tuple[float, ...]) -> None:
    """Also one that the report doesn't have, and one that is no number: the alarm of either is left to this rule."""
    steps = [{"step": 0}, *({"logprob_gap_max": gap} for gap in gaps)]
    assert not rules.logprob_gap(report(), steps, max_gap=1e-3).passed


@pytest.mark.parametrize("steps", [[], [{"step": 1}], [{"logprob_gap_max": None}]])
def test_a_gap_that_nobody_measured_is_no_pass(steps: list[dict[str, Any]]) -> None:
    """The report has 0 there, which nobody measured."""
    result = rules.logprob_gap(report(logprob_gap={"mean": 0.0, "max": 0.0}), steps, max_gap=1e-3)
    assert (result.passed, result.figure) == (False, "not measured")


def test_the_export_says_what_differs() -> None:
    same = ExportCheck(n_turns=5, n_same_tokens=5, n_near_ties=0, max_gap=2e-6, hash_same=True, why="")
    assert rules.export(same).figure == "5 of 5 turns the same, log probabilities within 2.0e-06"
    assert rules.export(same).passed
    tied = ExportCheck(n_turns=5, n_same_tokens=4, n_near_ties=1, max_gap=None, hash_same=True, why="")
    assert rules.export(tied).figure == "4 of 5 turns the same, 1 token as likely as another up to rounding"
    assert rules.export(tied).passed
    other = ExportCheck(n_turns=1, n_same_tokens=0, n_near_ties=0, max_gap=None, hash_same=False, why="Other bytes.")
    assert (rules.export(other).passed, rules.export(other).figure) == (False, "0 of 1 turn the same; Other bytes.")


def test_every_veto_is_told() -> None:
    assert (rules.veto(()).passed, rules.veto(()).figure) == (True, "none")
    assert (rules.veto(("a: no", "b: never")).passed, rules.veto(("a: no", "b: never")).figure) == (
        False,
        "a: no; b: never",
    )


def test_replay_looks_at_what_passed_in_the_gate_alone() -> None:
    in_gate = {"a": True, "b": False}
    assert rules.replay(in_gate, {"a": True, "b": False}).passed
    lost = rules.replay(in_gate, {"a": False, "b": True})
    assert (lost.passed, lost.figure) == (False, "passes 1 of 2 cases; failing now 1: a")
    assert not rules.replay(in_gate, {"b": True}).passed


def test_many_names_are_cut() -> None:
    names = dict.fromkeys("abcde", True)
    assert rules.regression(names, {}).figure.endswith("newly failing 5: a, b, c …")


def test_what_was_not_checked_is_no_pass() -> None:
    assert rules.unchecked("slices", "other tasks") == RuleResult(
        rule="slices", passed=False, figure="not checked: other tasks", bound=""
    )


def test_the_table_of_the_docs_is_that_of_the_rules() -> None:
    """Each rule's code, name and next step."""
    page = Path(__file__).parents[2] / "docs" / "promotion.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if re.match(r"\| \d\d \|", line)]
    found = [(int(code), name.strip("`"), step) for code, name, _, step in rows]
    assert found == [(code, rule, rules.NEXT_STEPS[rule]) for rule, code in rules.EXIT_CODES.items()]
