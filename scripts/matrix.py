#!/usr/bin/env python3
"""The support matrix: runs its rows in this environment, and writes the tables from what ran.

    python scripts/matrix.py newest|oldest    # runs tests/matrix, writes docs/matrix/<column>.json
    python scripts/matrix.py table            # writes the tables of docs/any-graph.md and README.md

Which column an environment is follows from what is installed in it: constraints.txt pins the newest,
tests/matrix/oldest.txt the oldest (scripts/test_full.sh matrix makes that one).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "tests")  # in the place of this folder, whose matrix.py would stand for tests/matrix

from matrix.results import FAILED, LEFT_OUT, PACKAGES, Row, read  # noqa: E402

COLUMNS = ("newest", "oldest")
FOLDER = ROOT / "docs" / "matrix"
DOCS, README = ROOT / "docs" / "any-graph.md", ROOT / "README.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
SECTIONS = (
    "How a node calls the model",
    "Where the model lives",
    "Tools",
    "Structured answers",
    "LangGraph",
    "Apart from its siblings",
)
"""The order of those named here; others follow as they come, and what can't be trained is last."""
LAST = "What can't be trained"
COUNTED = {
    "trains": "train",
    "refused": "refused by name",
    "not seen": "not seen, and an alarm says so",
    LEFT_OUT: "only with newer packages",
}
SEVERITY = ("trains", "refused", "not seen", LEFT_OUT, FAILED)
Named = tuple[str, str]


def main(arguments: list[str]) -> int:
    match arguments:
        case [column] if column in COLUMNS:
            return run(column)
        case ["table"]:
            for path, text in tables().items():
                path.write_text(text, encoding="utf-8")
            return 0
    print("Usage: python scripts/matrix.py newest|oldest|table", file=sys.stderr)
    return 2


def run(column: str) -> int:
    """Run every row here, and write the column; fails when a row fails."""
    target = FOLDER / f"{column}.json"
    asked = [sys.executable, "-m", "pytest", "tests/matrix", "--ignore=tests/matrix/test_documented.py"]
    if column == "oldest":  # which warns of what newer versions took away
        asked += ["-W", "default"]
    ended = subprocess.run(asked, cwd=ROOT, env={**os.environ, "AGENTTRAIN_MATRIX": str(target)}).returncode
    failed = [row.name for row in read(target)[1].values() if row.outcome == FAILED]
    print(f"{target}: {len(read(target)[1])} tests, {len(failed)} failed {failed or ''}", file=sys.stderr)
    return ended


def tables() -> dict[Path, str]:
    """File to its text with the tables in it."""
    versions, rows = {}, {}
    for column in COLUMNS:
        versions[column], by_test = read(FOLDER / f"{column}.json")
        rows[column] = by_name(by_test)
    return {
        DOCS: between(DOCS.read_text(encoding="utf-8"), full_table(versions, rows)),
        README: between(README.read_text(encoding="utf-8"), short_table(versions, rows)),
    }


def by_name(by_test: Mapping[str, Row]) -> dict[Named, Row]:
    """Section and name to a row; one that several tests run has the turns of all, and the worst outcome."""
    rows: dict[Named, Row] = {}
    for row in by_test.values():
        place = row.section, row.name
        if place not in rows:
            rows[place] = row
            continue
        worst = max(rows[place], row, key=lambda each: SEVERITY.index(each.outcome))
        rows[place] = worst.with_turns(Counter(rows[place].turns) + Counter(row.turns))
    return rows


def full_table(versions: Mapping[str, Mapping[str, str]], rows: Mapping[str, Mapping[Named, Row]]) -> str:
    newest, oldest = rows["newest"], rows["oldest"]
    lines = [*_version_lines(versions)]
    for section in sections(newest):
        lines += ["", f"### {section}", ""]
        lines += [f"| | langgraph {versions['newest']['langgraph']} | {versions['oldest']['langgraph']} | turns | |"]
        lines += ["|---|---|---|---|---|"]
        for place, row in newest.items():
            if place[0] == section:
                cells = [row.name, row.outcome, _older(oldest.get(place), row), _turns(row.turns), row.note]
                lines.append(_line(cells))
    return "\n".join(lines)


def short_table(versions: Mapping[str, Mapping[str, str]], rows: Mapping[str, Mapping[Named, Row]]) -> str:
    heads = [f"langgraph {versions[column]['langgraph']}" for column in COLUMNS]
    lines = [_line(["rows of", *heads]), "|---|---|---|"]
    for section in sections(rows["newest"]):
        counts = [_counted(row for place, row in rows[column].items() if place[0] == section) for column in COLUMNS]
        lines.append(_line([section, *counts]))
    return "\n".join(lines)


def sections(rows: Mapping[Named, Row]) -> list[str]:
    seen = list(dict.fromkeys(section for section, _ in rows))
    rest = sorted(section for section in seen if section not in (*SECTIONS, LAST))
    return [section for section in (*SECTIONS, *rest, LAST) if section in seen]


def between(text: str, table: str) -> str:
    """A text with the table between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    made, n = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)
    if n != 1:
        raise ValueError(f"{BEGIN} and {END} stand {n} times in a file, and once is needed.")
    return made


def _version_lines(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    by_package = [(name, *(versions[column].get(name, "not installed") for column in COLUMNS)) for name in PACKAGES]
    return [_line(["", *COLUMNS]), "|---|---|---|", *(_line(cells) for cells in by_package)]


def _older(row: Row | None, newest: Row) -> str:
    if row is None:
        return "not run"
    if row.outcome == LEFT_OUT:
        return f"– ({row.note})"
    return row.outcome if row.note == newest.note else f"{row.outcome}: {row.note}"


def _turns(turns: Mapping[str, int]) -> str:
    return ", ".join(f"{turns[role]} {role}" for role in ("trained", "frozen", "auxiliary") if turns.get(role))


def _counted(rows: Iterable[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    said = [f"{counts[outcome]} {word}" for outcome, word in COUNTED.items() if counts[outcome]]
    return ", ".join([*said, *([f"{counts[FAILED]} FAILED"] if counts[FAILED] else [])])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
