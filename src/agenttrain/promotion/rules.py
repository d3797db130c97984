"""What a policy must show before it may serve: each rule holds a few figures against a bound, and says both in words.

Nothing here measures, asks or writes. A figure that is missing, or is no number, never passes. The first rule that
fails, in the order of `EXIT_CODES`, gives the exit code of `agenttrain promote`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agenttrain.promotion.comparison import Compared, LostPlaces, SliceDifference
from agenttrain.promotion.measures import Evaluation
from agenttrain.promotion_record import RuleResult
from agenttrain.records import Rollout

if TYPE_CHECKING:
    from agenttrain.export.exporting import ExportCheck

EXIT_CODES: Mapping[str, int] = {
    "evidence": 10,
    "difference": 11,
    "slices": 12,
    "regression": 13,
    "safety": 14,
    "cost": 15,
    "latency": 16,
    "alarms": 17,
    "logprob_gap": 18,
    "export": 19,
    "veto": 20,
    "replay": 21,
}
"""Every rule, in the order in which they are told."""

NEXT_STEPS: Mapping[str, str] = {
    "evidence": "end a stopped run with agenttrain fit --resume RUN; where something changed, undo the edit, or start "
    "a new run with what is here now: agenttrain fit GRAPH",
    "difference": "fit anew on more training tasks or for more steps; where the interval is wide, with more held-out "
    "tasks, and where eval.temperature is above 0 also with more eval.repeats (greedy repeats are all the same)",
    "slices": "look at that slice (agenttrain inspect RUN --phase held_out), and add training tasks of its kind",
    "regression": "train on tasks like the case; agenttrain cases remove takes out one that is wrong; what the "
    "candidate did on it",
    "safety": "look at the violations (agenttrain inspect RUN --phase held_out); let the part weigh more in training",
    "cost": "shorten what it samples with a cost part or tighter [limits], or declare another bound in [promotion]",
    "latency": "shorten what it does with a cost part or tighter [limits], or declare another bound in [promotion]",
    "alarms": "report.md tells them all; mend their causes, then fit again",
    "logprob_gap": "engine and trainer do not compute the same: agenttrain doctor; mend it, then fit again",
    "export": "these are not the weights that were measured: put policy/ back as fit wrote it, or fit again",
    "veto": "ask those whose plugin it is; mend what it names, then promote again",
    "replay": "what served before serves again; what was done on the cases",
}
"""What to do when a rule fails."""

IN_WORDS: Mapping[str, str] = {
    "graph": "graph.py or what it imports",
    "tasks": "the tasks",
    "verifier": "a verifier, or hidden files that it judges by",
    "verifier_in_training": "hidden files that training tasks were judged by",
    "renderer": "the chat template",
    "model": "the base",
}
"""What each hash of a run's provenance is of."""
MOST_NAMED = 3
"""Tasks or cases named in one figure."""


def exit_code(results: Sequence[RuleResult]) -> int:
    """0 when all rules hold, else that of the first that fails in the order of `EXIT_CODES`."""
    return min((EXIT_CODES[result.rule] for result in results if not result.passed), default=0)


def evidence(
    report: Mapping[str, Any] | None,
    *,
    then: Mapping[str, str | None],
    now: Mapping[str, str | None],
    written_since: Sequence[str] = (),
) -> RuleResult:
    """The run ended and trained something, exactly what was sampled, and what it was made with is what is here now.

    Args:
        report: report.json. None: the run has not ended.
        then, now: name to hash, as `prepare.provenance` has them: when the run was made, and today.
        written_since: names of the graph's files that were written after the run was made.
    """
    faults = ["the run has not ended"] if report is None else _faults(report)
    made_with = {name: value for name, value in then.items() if name != "configuration"}  # which is the run's own
    changed = [IN_WORDS.get(name, name) for name in {**now, **made_with} if made_with.get(name) != now.get(name)]
    if changed:
        since = f" (written since: {', '.join(written_since[:MOST_NAMED])})" if written_since else ""
        faults.append(f"not as it was when the run was made: {', '.join(changed)}{since}")
    trained = report["tokens"]["trained"] if report is not None else 0
    sound = f"{trained:,} tokens trained, none drifted; graph, tasks, verifiers, template and base as they were"
    return _result("evidence", not faults, "; ".join(faults) or sound, "an ended run, made with what is here now")


def _faults(report: Mapping[str, Any]) -> list[str]:
    """What of an ended run makes its figures no evidence."""
    tokens = report["tokens"]
    faults = [f"{tokens['drifted']:,} trained tokens are not as they were sampled"] if tokens["drifted"] != 0 else []
    if not tokens["trained"]:
        faults.append("nothing was trained")
    return faults + [alarm["message"] for alarm in report["alarms"] if alarm["code"] == "changed_since_begun"]


def difference(compared: Compared, *, min_difference: float, lost: LostPlaces | None = None) -> RuleResult:
    """Success is shown to be better than what serves now, and not because the environment failed that.

    Args:
        lost: places that what serves now was not measured in. None: there is none.
    """
    success = compared.measures["success"]
    bound, found = f"lower bound above {min_difference:g}", success.difference
    if found is None:
        return _result("difference", False, "not measured", bound)
    figure = (
        f"success {success.base:.3f} to {success.other:.3f}: {found.value:+.3f} (95 % interval {found.low:+.3f} to "
        f"{found.high:+.3f} on {_tasks(found.n_tasks)})"
    )
    passed = found.low > min_difference
    if lost is not None:
        figure += f"; {_where_measured(lost)}"
        passed = passed and lost.difference is not None and lost.difference.low > min_difference
    return _result("difference", passed, figure, bound)


def _where_measured(lost: LostPlaces) -> str:
    found = lost.difference
    if found is None:
        return "what serves now was measured nowhere"
    return (
        f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f}) without {_counted(lost.n, 'place')} that what "
        "serves now was not measured in"
    )


def slices(compared: Compared, *, slice_loss: float) -> RuleResult:
    """No slice is shown to lose success, however many slices are looked at."""
    bound = f"no slice wholly below {-slice_loss:+g}" if slice_loss else "no slice wholly below 0"
    if not compared.slices:
        return _not_asked("slices", "no slices: the tasks have no metadata to slice by", bound)
    lost = [each for each in compared.slices if not each.simultaneous.high >= -slice_loss]
    told = lost or [min(compared.slices, key=lambda each: each.simultaneous.high)]
    worst = min(told, key=lambda each: each.simultaneous.high)
    more = f"; {len(lost) - 1} more {'loses' if len(lost) == 2 else 'lose'}" if len(lost) > 1 else ""
    return _result("slices", not lost, f"worst of {len(compared.slices)}: {_slice(worst)}{more}", bound)


def _slice(each: SliceDifference) -> str:
    wide = each.simultaneous
    return (
        f"{each.key} = {each.value} {wide.value:+.3f} (simultaneous interval {wide.low:+.3f} to {wide.high:+.3f} "
        f"on {_tasks(each.n_tasks)})"
    )


def regression(before: Mapping[str, bool], after: Mapping[str, bool]) -> RuleResult:
    """No case that what serves now passes is failed.

    Args:
        before, after: case to whether it is passed, by what serves now and by the candidate; the same cases.
    """
    bound = "no case newly failing"
    if not before:
        return _not_asked("regression", "the regression set is empty (agenttrain cases add fills it)", bound)
    newly = [case for case, passes in before.items() if passes and not after.get(case, False)]
    figure = f"passes {sum(map(bool, after.values()))} of {_cases(len(before))}, what serves now {sum(before.values())}"
    return _result("regression", not newly, figure + _named("newly failing", newly), bound)


def safety(base: Evaluation, other: Evaluation, *, declared: Sequence[str] = ()) -> RuleResult:
    """No safety part is violated more often than by what serves now, each by itself and all together.

    A place where the candidate has no reward says nothing of either; one where only the incumbent has none counts
    against the candidate.

    Args:
        declared: names of the graph's parts of kind safety.
    """
    bound = "not more violations than by what serves now"
    ours, theirs = _gates(base), _gates(other)
    names = sorted({*declared, *(name for gates in (*ours.values(), *theirs.values()) for name in gates)})
    if not names:
        return _not_asked("safety", "no part of kind safety is declared", bound)
    before, after = (_violations(gates, theirs.keys()) for gates in (ours, theirs))
    worse = [name for name in ("", *names) if after[name] > before[name]]
    figure = f"{_counted(after[''], 'violation')} on {_counted(len(theirs), 'place')}, {before['']} by what serves now"
    parts = [f"{name} {after[name]} against {before[name]}" for name in worse if name]
    return _result("safety", not worse, "; ".join([figure, *parts]), bound)


def _gates(evaluation: Evaluation) -> dict[tuple[str, int], dict[str, bool]]:
    """Place to its safety parts and whether each is closed, where there is a reward."""
    return {(each.task_id, each.sibling): _closed(each) for each in evaluation.rollouts if each.reward is not None}


def _closed(rollout: Rollout) -> dict[str, bool]:
    parts = rollout.reward.parts if rollout.reward is not None else ()
    return {part.name: part.is_closed for part in parts if part.kind == "safety"}


def _violations(gates: Mapping[tuple[str, int], Mapping[str, bool]], places: Any) -> Counter[str]:
    """Part to its violations at these places, and under "" the places with any."""
    found = Counter[str]()
    for place in places:
        closed = [name for name, is_closed in gates.get(place, {}).items() if is_closed]
        found.update(closed)
        found[""] += bool(closed)
    return found


def cost(
    mean: float | None, ratio: float | None, *, max_cost: float | None, max_cost_ratio: float | None
) -> RuleResult:
    """A rollout is shown not to cost more than was declared; arguments as in `_bounded`."""
    return _bounded("cost", "", (mean, max_cost), (ratio, max_cost_ratio))


def latency(
    mean: float | None, ratio: float | None, *, max_seconds: float | None, max_seconds_ratio: float | None
) -> RuleResult:
    """A rollout is shown not to take longer than was declared; arguments as in `_bounded`."""
    return _bounded("latency", " s", (mean, max_seconds), (ratio, max_seconds_ratio))


def _bounded(
    rule: str, unit: str, mean: tuple[float | None, float | None], ratio: tuple[float | None, float | None]
) -> RuleResult:
    """Two upper bounds, each against what it may be at most.

    Args:
        mean, ratio: (95 % upper bound or None where it was not measured, the most that was declared or None), of the
            candidate's mean and of its ratio to what serves now.
    """
    asked = [
        (measured, most, text)
        for (measured, most), text in ((mean, f"{{:.3g}}{unit} a rollout"), (ratio, "{:.3g} times what serves now"))
        if most is not None
    ]
    if not asked:
        return _not_asked(rule, "not asked", "none declared")
    figures = [_upper(measured, text) for measured, _, text in asked]
    bounds = [text.format(most) for _, most, text in asked]
    passed = all(measured is not None and measured <= most for measured, most, _ in asked)
    return _result(rule, passed, " and ".join(figures), f"at most {' and '.join(bounds)}")


def _upper(measured: float | None, text: str) -> str:
    """An upper bound in words, also one that is none."""
    if measured is None:
        return "not measured"
    return f"at most {text.format(measured)} (95 %)" if math.isfinite(measured) else "not bounded by so few tasks"


def alarms(report: Mapping[str, Any]) -> RuleResult:
    """No loud alarm in the run; a loud log-probability gap is left to the rule of that name, which has a bound."""
    loud = [alarm for alarm in report["alarms"] if alarm["severity"] == "loud" and alarm["code"] != "logprob_gap"]
    told: dict[str, list[Mapping[str, Any]]] = {}
    for alarm in loud:
        told.setdefault(alarm["code"], []).append(alarm)
    each = [f"{code}{_times(len(of_code))}: {of_code[0]['message']}" for code, of_code in told.items()]
    figure = f"{_counted(len(loud), 'loud alarm')}: {'; '.join(each)}" if loud else "none"
    return _result("alarms", not loud, figure, "no loud alarm")


def logprob_gap(report: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], *, max_gap: float) -> RuleResult:
    """Engine and trainer gave the trained tokens the same log probabilities, up to rounding.

    Args:
        steps: metrics.jsonl, which says whether it was measured; a step of which it is no number is told.
    """
    bound = f"below {max_gap:g}"
    gaps = [row["logprob_gap_max"] for row in steps if row.get("logprob_gap_max") is not None]
    if not gaps:
        return _result("logprob_gap", False, "not measured", bound)
    largest = float(np.max([*gaps, report["logprob_gap"]["max"]]))  # a NaN is the largest
    return _result("logprob_gap", largest < max_gap, f"{largest:.1e} at most, engine against trainer", bound)


def export(check: ExportCheck) -> RuleResult:
    """The weights that would serve are those that were measured: loaded anew they answer the same."""
    figure = f"{check.n_same_tokens} of {_counted(check.n_turns, 'turn')} the same"
    if check.n_near_ties:
        figure += f", {_counted(check.n_near_ties, 'token')} as likely as another up to rounding"
    if check.max_gap is not None:
        figure += f", log probabilities within {check.max_gap:.1e}"
    return _result(
        "export", check.passed, f"{figure}; {check.why}" if check.why else figure, "reloaded, the same answers"
    )


def veto(vetoes: Sequence[str]) -> RuleResult:
    """No plugin has anything against it; all their reasons are told."""
    return _result("veto", not vetoes, "; ".join(vetoes) or "none", "no veto")


def replay(in_gate: Mapping[str, bool], served: Mapping[str, bool]) -> RuleResult:
    """What serves by the ledger passes every case that the candidate passed in the gate.

    Args:
        in_gate, served: case to whether it is passed; the same cases.
    """
    bound = "every case that passed in the gate"
    if not in_gate:
        return _not_asked("replay", "the regression set is empty", bound)
    lost = [case for case, passes in in_gate.items() if passes and not served.get(case, False)]
    figure = f"passes {sum(map(bool, served.values()))} of {_cases(len(in_gate))}"
    return _result("replay", not lost, figure + _named("failing now", lost), bound)


def unchecked(rule: str, why: str) -> RuleResult:
    """A rule that nothing could be held against, which is no pass."""
    return _result(rule, False, f"not checked: {why}", "")


def _result(rule: str, passed: bool, figure: str, bound: str) -> RuleResult:
    return RuleResult(rule=rule, passed=bool(passed), figure=figure, bound=bound)


def _not_asked(rule: str, figure: str, bound: str) -> RuleResult:
    """A rule that holds since there is nothing to ask."""
    return RuleResult(rule=rule, passed=True, figure=figure, bound=bound, asked=False)


def _named(what: str, names: Sequence[str]) -> str:
    """Example: "newly failing", ["a", "b", "c", "d"] -> "; newly failing 4: a, b, c …"."""
    shown = f"{', '.join(names[:MOST_NAMED])}{' …' if len(names) > MOST_NAMED else ''}"
    return f"; {what} {len(names)}: {shown}" if names else ""


def _times(n: int) -> str:
    return f" ({n} times)" if n > 1 else ""


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _tasks(n: int) -> str:
    return _counted(n, "task")


def _cases(n: int) -> str:
    return _counted(n, "case")
