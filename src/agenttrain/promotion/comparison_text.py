"""What differs between two evaluations, in the words and tables of report.md, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from agenttrain.promotion.comparison import Compared

SHOWN = "shown"
"""Of a slice whose difference is shown, however many slices were looked at."""


def as_dict(compared: Compared) -> dict[str, Any]:
    """As JSON: `pass_at_k` by k as text, `shown` beside each slice."""
    return {
        **asdict(compared),
        "slices": [{**asdict(each), SHOWN: each.is_shown} for each in compared.slices],
        "pass_at_k": {str(k): asdict(each) for k, each in compared.pass_at_k.items()},
        "notes": list(compared.notes),
    }


def difference_rows(compared: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Label and figures of everything that one side measured, success first and pass@k after it.

    Cost is left out where it is the tokens, as without prices of one's own.

    Args:
        compared: as `as_dict` gives it.
    """
    for measure, each in compared["measures"].items():
        if measure == "cost" and _is_same(each, compared["measures"]["tokens"]):
            continue
        if each["base"] is not None or each["other"] is not None:
            yield measure.replace("_", " "), each
        if measure == "success":
            yield from ((f"pass@{k}", passes) for k, passes in compared["pass_at_k"].items() if k != "1")


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one["base"], one["other"]) == (other["base"], other["other"])


def verdict_line(compared: Mapping[str, Any]) -> str:
    """Whether success is shown to differ. Example: "B: shown to be better than A in success, +0.166 (+0.130 to …)"."""
    found = compared["measures"]["success"]["difference"]
    value, interval = figures(found)
    said = "shown to be better than" if found["low"] > 0 else "shown to be worse than" if found["high"] < 0 else ""
    against = said or "not shown to be better or worse than"
    return f"{compared['other']}: {against} {compared['base']} in success, {value} ({interval})"


def difference_lines(compared: Mapping[str, Any]) -> list[str]:
    """The table of all measures besides success, for report.md; what only one side measured is not in it."""
    lines = ["| after less before | difference | 95 % interval |", "|---|---|---|"]
    for label, each in difference_rows(compared):
        if each["difference"] is not None and label != "success":
            value, interval = figures(each["difference"])
            lines.append(f"| {label} | {value} | {interval}{left_out(each['n_left_out'])} |")
    return [*lines, "", smallest_effect_line(compared), ""]


def smallest_effect_line(compared: Mapping[str, Any]) -> str:
    """What the number of tasks is good for, by how much they differed."""
    n = compared["n_tasks"]
    return (
        f"{n} task{'s that vary' if n > 1 else ' that varies'} like these can show a difference in success of "
        f"{compared['smallest_effect']:.3f} or more (paired, as measured; 95 %, "
        "power 80 %)."
    )


def figures(difference: Mapping[str, float]) -> tuple[str, str]:
    """The value and its interval in words. Example: ("+0.166", "+0.130 to +0.202")"""
    value, low, high = (difference[key] for key in ("value", "low", "high"))
    form = "+" + form_of(max(abs(value), abs(low), abs(high)))
    return format(value, form), f"{low:{form}} to {high:{form}}"


def form_of(value: float) -> str:
    """How a number of that size is written. Example: 0.5 -> ".3f", 143.2 -> ".1f", 0.0002 -> ".2g"."""
    size = abs(value)
    return ",.0f" if size >= 1000 else ".1f" if size >= 10 else ".3f" if size >= 0.01 or not size else ".2g"


def slice_figures(one: Mapping[str, Any]) -> str:
    """A slice's interval, and whether it is shown. Example: "+0.100 to +0.900, shown"."""
    interval = figures(one["difference"])[1]
    return f"{interval}, {SHOWN}" if one[SHOWN] else interval


def left_out(n_tasks: int) -> str:
    """Example: " (3 tasks left out)"; nothing where all tasks count."""
    return f" ({n_tasks} task{'s' if n_tasks > 1 else ''} left out)" if n_tasks else ""
