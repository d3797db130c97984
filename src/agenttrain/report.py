"""What a run's records add up to: report.json with product.md's keys, and report.md for people.

Pure: takes records and numbers, returns a dict and a text. It reads no clock and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agenttrain.promotion.comparison import Compared
from agenttrain.promotion.comparison_text import as_dict, difference_lines, slice_figures
from agenttrain.promotion.parts_text import parts_lines
from agenttrain.trajectory.prefix_breaks import BREAKS_IN_WORDS, RESPELLED_IN_WORDS, in_words

MANY_STEPS = 6
"""So many steps are still named singly behind an alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What stands at the head of a report."""

    run_id: str
    graph: str
    trainer: str
    engine: str
    seed: int
    base: str
    n_parameters: int
    replaces: str
    n_train: int
    n_held_out: int
    n_trained_parameters: int | None = None
    """None: nothing is trained."""
    algorithm: str | None = None
    """None: nothing is trained."""
    adapter: Mapping[str, Any] | None = None
    """Settings of what is trained beside a frozen base. None: the model's own weights are."""
    external_calls: Mapping[str, int] | None = None
    """External tool to how often it really ran in the run's rollouts. None: none is permitted to."""


def fit_report(
    facts: RunFacts,
    *,
    baseline: Mapping[str, Any],
    trained: Mapping[str, Any],
    compared: Compared,
    tokens: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    wall_s: Mapping[str, float],
    cpu_hours: float,
    gpu_hours: float,
    lives: int,
    alarms: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """report.json of a fit.

    Args:
        compared: the baseline and the held-out tasks after training.
    """
    difference = compared.measures["success"].difference
    assert difference is not None  # success is always measured
    return {
        **_head(facts),
        "baseline": dict(baseline),
        "trained": dict(trained),
        "difference": {
            "success": difference.value,
            "ci95": [difference.low, difference.high],
            "tasks": difference.n_tasks,
        },
        "compared": as_dict(compared),
        "tokens": dict(tokens),
        "logprob_gap": logprob_gap(steps),
        "wall_s": {key: round(value, 3) for key, value in wall_s.items()},
        "cost": {"cpu_hours": cpu_hours, "gpu_hours": gpu_hours, "per_success": per_success(trained)},
        "steps": len(steps),
        **_successes(steps),
        "lives": lives,
        "alarms": [dict(alarm) for alarm in alarms],
    }


def eval_report(
    facts: RunFacts,
    *,
    result: Mapping[str, Any],
    wall_s: float,
    cpu_hours: float,
    gpu_hours: float,
    alarms: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """report.json of an eval."""
    return {
        **_head(facts),
        "result": dict(result),
        "wall_s": {"total": round(wall_s, 3), "evaluate": round(wall_s, 3)},
        "cost": {"cpu_hours": cpu_hours, "gpu_hours": gpu_hours, "per_success": per_success(result)},
        "alarms": [dict(alarm) for alarm in alarms],
    }


def logprob_gap(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over trained tokens and maximum of |engine - trainer| log probability, over the steps that measured it."""
    told = [row for row in steps if "logprob_gap_mean" in row]
    weighed = [(row["logprob_gap_mean"], row.get("tokens_trained", 0.0)) for row in told]
    n = sum(weight for _, weight in weighed)
    return {
        "mean": sum(value * weight for value, weight in weighed) / n if n else 0.0,
        "max": float(np.max([row.get("logprob_gap_max", 0.0) for row in steps], initial=0.0)),  # a NaN stays one
    }


def _successes(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was learned from, where that is successes alone."""
    told = [row for row in steps if "successes" in row]
    if not told:
        return {}
    sums = {key: sum(int(row[key]) for row in told) for key in ("successes", "distinct_successes")}
    return {"learned_from": sums}


def per_success(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """What one success took in evaluation. None: there was none, or it was not measured."""
    n_successes = summary["success"] * summary["rollouts"]
    if not n_successes:
        return {"tokens": None, "tool_calls": None, "seconds": None}
    return {
        key: None if summary[key] is None else summary[key] * summary["rollouts"] / n_successes
        for key in ("tokens", "tool_calls", "seconds")
    }


def fit_text(report: Mapping[str, Any]) -> str:
    """report.md of a fit."""
    base, after, difference = report["baseline"], report["trained"], report["difference"]
    low, high = difference["ci95"]
    tokens, gap, wall = report["tokens"], report["logprob_gap"], report["wall_s"]
    lines = [
        f"# {report['run_id']}",
        "",
        verdict(report),
        "",
        f"| on {report['tasks']['held_out']} held-out tasks ({_sampling(base)}) | before | after |",
        "|---|---|---|",
        *(_row(label, base[key], after[key]) for key, label in (*_SHOWN, *_gates(base))),
        *(_row(f"pass@{k}", rate, after["pass_at_k"][k]) for k, rate in base.get("pass_at_k", {}).items() if k != "1"),
        "",
        f"Difference in success: {difference['success']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} "
        "(paired bootstrap over tasks).",
        "",
        *difference_lines(report["compared"]),
        *_slices(base["by_slice"], after["by_slice"], report["compared"]["slices"]),
        *parts_lines({"before": base.get("reward_parts", {}), "after": after.get("reward_parts", {})}),
        "## How it was trained",
        f"- policy: {report['model']['base']}, {report['model']['parameters']:,} parameters"
        f"{_trained(report['model'])}, "
        f"in place of {report['model']['replaces']}",
        f"- {report['steps']} steps of {_algorithm(report)} by the {report['trainer']} trainer "
        f"on the {report['engine']} engine, "
        f"seed {report['seed']}, {report['tasks']['train']} training tasks{_in_lives(report['lives'])}",
        f"- tokens sampled {tokens['sampled']:,} = trained {tokens['trained']:,} + frozen {tokens['frozen']:,} "
        f"+ dropped {tokens['dropped']:,}; drifted {tokens['drifted']}",
        *(f"  - dropped {count:,}: {cause}" for cause, count in sorted(tokens["dropped_by_cause"].items())),
        *_history_lines(tokens["prefix_breaks"], tokens.get("respelled", {})),
        *_external_lines(report.get("external_calls", {})),
        f"- log probability, engine against trainer: mean {gap['mean']:.1e}, max {gap['max']:.1e}",
        f"- {wall['total']:.0f} s: rollouts {wall['rollout']:.0f}, training {wall['train']:.0f}, "
        f"evaluation {wall['evaluate']:.0f}, publishing {wall['sync']:.1f}",
        "",
        *_alarm_lines(report["alarms"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _history_lines(breaks: Mapping[str, int], respelled: Mapping[str, int]) -> list[str]:
    """Where prompts did not go on as the calls before them ended, and what was done."""
    lines = []
    if breaks:
        why = in_words(breaks, BREAKS_IN_WORDS)
        lines.append(f"- prefix breaks, each a new trajectory with its history as context: {why}")
    if respelled:
        how = in_words(respelled, RESPELLED_IN_WORDS)
        lines.append(f"- turns after a reply that the template would write otherwise, kept as it was sampled: {how}")
    return lines


def _external_lines(calls: Mapping[str, int]) -> list[str]:
    """What rollouts did to the world, as they were permitted to."""
    said = ", ".join(f"{name} {n:,}" for name, n in calls.items())
    return [f"- external tools that really ran: {said}"] if said else []


def eval_text(report: Mapping[str, Any]) -> str:
    """report.md of an eval."""
    result = report["result"]
    lines = [
        f"# {report['run_id']}",
        "",
        f"| {report['model']['base']} on {result['tasks']} tasks ({_sampling(result)}) | |",
        "|---|---|",
        *(f"| {label} | {_number(result[key])} |" for key, label in (*_SHOWN, *_gates(result))),
        *(f"| pass@{k} | {_number(rate)} |" for k, rate in result.get("pass_at_k", {}).items() if k != "1"),
        "",
        *parts_lines({"": result.get("reward_parts", {})}),
        *_external_lines(report.get("external_calls", {})),
        *_alarm_lines(report["alarms"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence that says whether it got better, and how sure that is."""
    low, high = report["difference"]["ci95"]
    before, after = report["baseline"]["success"], report["trained"]["success"]
    moved = f"success on held-out tasks went from {before:.3f} to {after:.3f}"
    if not report["tokens"]["trained"]:
        return f"Nothing was trained, for the alarms below say why: {moved}."
    if low > 0:
        return f"The agent got better: {moved}, and the whole 95 % interval of the difference is above 0."
    if high < 0:
        return f"The agent got worse: {moved}, and the whole 95 % interval of the difference is below 0."
    return f"No difference is shown: {moved}, and the 95 % interval of the difference holds 0."


_SHOWN = (
    ("success", "success"),
    ("reward", "reward"),
    ("turns", "turns"),
    ("tool_calls", "tool calls"),
    ("invalid_tool_calls", "invalid tool calls"),
    ("tokens", "tokens"),
    ("policy_failures", "policy failures"),
    ("unfinished", "cut by a limit"),
    ("environment_failures", "environment failures"),
)
_SHOWN_OF_GATES = (("gates_closed", "closed by a gate"), ("safety_violations", "safety violations"))


def _gates(summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Rows of gates, where some are declared."""
    return tuple((key, label) for key, label in _SHOWN_OF_GATES if summary[key] is not None)


def _head(facts: RunFacts) -> dict[str, Any]:
    return {
        "run_id": facts.run_id,
        "graph": facts.graph,
        "trainer": facts.trainer,
        **({} if facts.algorithm is None else {"algorithm": facts.algorithm}),
        "engine": facts.engine,
        "seed": facts.seed,
        "model": _model(facts),
        "tasks": {"train": facts.n_train, "held_out": facts.n_held_out},
        **({} if facts.external_calls is None else {"external_calls": dict(facts.external_calls)}),
    }


def _model(facts: RunFacts) -> dict[str, Any]:
    model = {"base": facts.base, "parameters": facts.n_parameters, "replaces": facts.replaces}
    if facts.n_trained_parameters is None:
        return model
    adapter = dict(facts.adapter) if facts.adapter is not None else None
    return {**model, "trained_parameters": facts.n_trained_parameters, "adapter": adapter}


def _trained(model: Mapping[str, Any]) -> str:
    """What of a model was trained, in words."""
    if model.get("adapter") is None:
        return ""
    return f" ({model['trained_parameters']:,} of a LoRA adapter of rank {model['adapter']['rank']} trained)"


def _algorithm(report: Mapping[str, Any]) -> str:
    """Its name, and of supervised fine-tuning on how much."""
    if "learned_from" not in report:
        return str(report["algorithm"])
    n, distinct = (report["learned_from"][key] for key in ("successes", "distinct_successes"))
    return f"supervised fine-tuning on {n:,} verified successes of the base ({distinct:,} without copies of a sibling)"


def _row(label: str, before: Any, after: Any) -> str:
    return f"| {label} | {_number(before)} | {_number(after)} |"


def _cell(text: str) -> str:
    """Text of a user's own that must stay in its cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def _number(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _in_lives(lives: int) -> str:
    return f", in {lives} lives: the run was stopped and resumed" if lives > 1 else ""


def _sampling(summary: Mapping[str, Any]) -> str:
    if summary["temperature"] is None:
        return "its models as they are set"
    return "greedy" if summary["temperature"] == 0 else f"sampled at {summary['temperature']:g}"


def _slices(before: Mapping[str, Any], after: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of slices; one that holds every task has no interval of its own."""
    if not before:
        return []
    intervals = {(each["key"], each["value"]): slice_figures(each) for each in compared}
    lines = ["| slice | tasks | before | after | 95 % interval of the difference |", "|---|---|---|---|---|"]
    for key, values in before.items():
        for value, one in values.items():
            later = after.get(key, {}).get(value, {})
            name, interval = _cell(f"{key} = {value}"), intervals.get((key, value), "")
            lines.append(
                f"| {name} | {one['tasks']} | {one['success']:.3f} | {later.get('success', 0):.3f} | {interval} |"
            )
    return [*lines, ""]


def _alarm_lines(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a code and severity, by the message of its first; the steps name them all."""
    if not alarms:
        return ["No alarms."]
    steps: dict[tuple[str, str], list[int]] = {}
    first: dict[tuple[str, str], str] = {}
    for alarm in alarms:
        key = (alarm["severity"], alarm["code"])
        steps.setdefault(key, []).append(alarm["step"])
        first.setdefault(key, alarm["message"])
    return ["## Alarms", *(f"- {key[0]}, {_steps(steps[key])}: {message}" for key, message in first.items())]


def _steps(steps: Sequence[int]) -> str:
    """Example: [3] -> "step 3", [1, 2, 3] -> "steps 1, 2, 3", [1, … 20] -> "20 steps from 1 to 20"."""
    each = sorted(set(steps))
    if len(each) == 1:
        return f"step {each[0]}"
    if len(each) > MANY_STEPS:
        return f"{len(each)} steps from {each[0]} to {each[-1]}"
    return f"steps {', '.join(map(str, each))}"
