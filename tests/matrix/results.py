"""Rows of the support matrix as they ran, and the file of one column: docs/matrix/newest.json, oldest.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

OUTCOMES = ("trains", "refused", "not seen")
LEFT_OUT = "left out"
"""Not run in this column; the note says why."""
FAILED = "failed"
PACKAGES = (
    "langgraph",
    "langgraph-prebuilt",
    "langgraph-checkpoint",
    "langchain-core",
    "langchain",
    "langchain-openai",
    "langchain-anthropic",
    "langchain-google-genai",
    "deepagents",
    "langgraph-supervisor",
    "langgraph-swarm",
    "langgraph-bigtool",
    "langgraph-reflection",
    "trustcall",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row in one column."""

    section: str
    name: str
    outcome: str = "trains"
    note: str = ""
    turns: Mapping[str, int] = field(default_factory=dict)
    """Role to number of turns of all rollouts of the row."""

    @classmethod
    def named(cls, args: Sequence[Any], keywords: Mapping[str, Any]) -> Row:
        """What the marker `row` says.

        Raises:
            ValueError: it says something else than section, name, outcome and note.
        """
        row = cls(section=args[0], name=args[1], **keywords)
        if len(args) != 2 or row.outcome not in OUTCOMES:
            raise ValueError(f"row{tuple(args)}, outcome {row.outcome!r}: give section, name, outcome= of {OUTCOMES}.")
        return row

    def left_out(self, why: str) -> Row:
        return replace(self, outcome=LEFT_OUT, note=why)

    def failed(self) -> Row:
        return replace(self, outcome=FAILED)

    def with_turns(self, turns: Mapping[str, int]) -> Row:
        return replace(self, turns=dict(sorted(turns.items())))


def write(target: Path, rows_by_test: Mapping[str, Row]) -> None:
    """Write one column: versions, and the rows by test, in the order in which they ran."""
    rows = {test: asdict(rows_by_test[test]) for test in rows_by_test}
    versions = {name: version for name in PACKAGES if (version := installed(name))}
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": versions, "rows": rows}, indent=1, ensure_ascii=False)
    target.write_text(text + "\n", encoding="utf-8")


def read(source: Path) -> tuple[dict[str, str], dict[str, Row]]:
    """(versions, rows by test) of one column."""
    column = json.loads(source.read_text(encoding="utf-8"))
    return column["versions"], {test: Row(**row) for test, row in column["rows"].items()}


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
