"""Tables of parts become lines for people: each part with a bar for every bin, the evaluations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

WIDTH = 15
"""Of a bar that holds all."""


def parts_lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A block of text.

    Args:
        tables: heading, such as "before", to the table of an evaluation; all of one set of parts. Empty ones give no
            line.
    """
    names = list(next(iter(tables.values()), {}))
    if not names:
        return []
    lines = ["## Parts of the reward", "```"]
    for n, name in enumerate(names):
        lines += [""] if n else []
        lines += _part_lines(name, {heading: table[name] for heading, table in tables.items()})
    return [*lines, "```", ""]


def _part_lines(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    first = next(iter(rows.values()))
    weight = "gate" if first["weight"] is None else f"weight {first['weight']:g}"
    said = [
        _counted("mean", rows, lambda row: "none" if row["mean"] is None else f"{row['mean']:.3f}"),
        *([_counted("closed", rows, lambda row: f"{row['closed']} of {row['n']}")] if "closed" in first else []),
        *(
            [_counted("left out", rows, lambda row: str(row["errors"]))]
            if any(r["errors"] for r in rows.values())
            else []
        ),
    ]
    lines = [f"{name}: {first['kind']}, {weight}; {'; '.join(said)}"]
    if first["histogram"] is None:
        return lines
    labels = bin_labels(first["histogram"]["edges"])
    wide = max(map(len, labels))
    lines += (
        [f"  {'':{wide}}  {'  '.join(f'{heading:<{WIDTH + 7}}' for heading in rows)}".rstrip()] if len(rows) > 1 else []
    )
    for n, label in enumerate(labels):
        bars = "  ".join(_bar(row["histogram"]["counts"][n], row["n"]) for row in rows.values())
        lines.append(f"  {label:>{wide}}  {bars}".rstrip())
    return lines


def _counted(what: str, rows: Mapping[str, Mapping[str, Any]], shown: Any) -> str:
    """Example: "mean 0.250 before, 0.750 after"; of a single evaluation "mean 0.250"."""
    if len(rows) == 1:
        return f"{what} {shown(next(iter(rows.values())))}"
    return f"{what} " + ", ".join(f"{shown(row)} {heading}" for heading, row in rows.items())


def _bar(count: int, n: int) -> str:
    """[WIDTH + 7] a bar and the share. Example: 1 of 4 -> "████             25 % "."""
    if not n:
        return f"{'none':<{WIDTH + 7}}"
    filled = "█" * round(WIDTH * count / n)
    filled = filled or ("▏" if count else "")  # few is not none
    return f"{filled:<{WIDTH}} {100 * count / n:>3.0f} % "


def bin_labels(edges: Sequence[float]) -> list[str]:
    """Example: [0, 0.5, 1] -> ["0", "1"]; [0, 0.1, 0.2] -> ["0 to 0.1", "0.1 to 0.2"]; [2.5, 3.5] -> ["3"]"""
    if list(edges) == [0.0, 0.5, 1.0]:
        return ["0", "1"]
    if len(edges) == 2:
        return [f"{sum(edges) / 2:.4g}"]
    return [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
