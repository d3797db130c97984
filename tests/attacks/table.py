"""The markers of all attacks become docs/attacks.md: `python tests/attacks/table.py` writes it.

The text around the tables stands in that file; what is between its marks is made here.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "attacks.md"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"
OUTCOMES = ("contained", "reported", "contained and reported")
KINDS = (
    "reading outside",
    "writing outside",
    "privileges",
    "network",
    "processes that outlive",
    "resources",
    "test files and settings",
    "the running judge",
    "answers",
    "whole rollouts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One row."""

    kind: str
    name: str
    tried: str
    outcome: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.outcome not in OUTCOMES:
            raise ValueError(f"{self} is of no kind of {KINDS}, or its outcome none of {OUTCOMES}.")


def all_attacks() -> list[Attack]:
    """Those of every module here, in the order in which they stand."""
    names = sorted(path.stem for path in FOLDER.glob("test_*.py") if path.stem != "test_documented")
    return [each for name in names for each in attacks_of(importlib.import_module(f"attacks.{name}"))]


def attacks_of(module: ModuleType) -> Iterator[Attack]:
    """Those that the tests of a module are marked with, on the test or on a parameter of it; each once."""
    found = {}
    for function in list(vars(module).values()):
        for mark in getattr(function, "pytestmark", ()) if callable(function) else ():
            for each in marks_in(mark):
                found[each.kind, each.name] = each
    yield from found.values()


def marks_in(mark: Any) -> Iterator[Attack]:
    if mark.name == "attack":
        yield Attack(**mark.kwargs)
    elif mark.name == "parametrize":
        for parameter in mark.args[1]:
            for inner in getattr(parameter, "marks", ()):
                if inner.name == "attack":
                    yield Attack(**inner.kwargs)


def tables(attacks: list[Attack]) -> str:
    """A count, and a table for each kind."""
    counts = Counter(each.kind for each in attacks)
    lines = [f"{len(attacks)} attacks: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}.", ""]
    for kind in KINDS:
        lines += [
            f"### {kind.capitalize()} ({counts[kind]})",
            "",
            "| attack | what is tried | outcome |",
            "|---|---|---|",
        ]
        lines += [f"| {each.name} | {each.tried} | {each.outcome} |" for each in attacks if each.kind == kind]
        lines.append("")
    return "\n".join(lines)


def document(text: str, attacks: list[Attack]) -> str:
    """A text with the tables between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables(attacks)}{END}{after}"


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8"), all_attacks()), encoding="utf-8")
