"""The matrix that people read is the one that ran: docs/matrix/newest.json, docs/any-graph.md and README.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from matrix.results import Row, read

ROOT = Path(__file__).parents[2]
MEND = "Run: python scripts/matrix.py newest && python scripts/matrix.py table"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix_script", ROOT / "scripts" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_that_ran_stand_in_the_newest_column(rows_run: dict[str, Row], rows_collected: set[str]) -> None:
    """Each row that ran in this session has its place there, and of the files of this session none is missing."""
    _, written = read(ROOT / "docs" / "matrix" / "newest.json")
    assert {test: written.get(test) for test in rows_run} == rows_run, MEND
    files = {test.partition("::")[0] for test in rows_collected}
    gone = [test for test in written if test.partition("::")[0] in files and test not in rows_collected]
    assert gone == [], MEND


def test_the_tables_are_those_of_the_columns(matrix: ModuleType) -> None:
    for path, text in matrix.tables().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what the columns say. {MEND}"


def test_no_row_failed(matrix: ModuleType) -> None:
    for column in matrix.COLUMNS:
        _, rows = read(matrix.FOLDER / f"{column}.json")
        assert [row.name for row in rows.values() if row.outcome == "failed"] == []


def test_a_row_of_several_tests_has_the_worst_outcome(matrix: ModuleType) -> None:
    one = Row(section="s", name="n", turns={"trained": 1})
    two = Row(section="s", name="n", outcome="refused", note="why", turns={"trained": 1, "frozen": 2})
    assert matrix.by_name({"a": one, "b": two}) == {("s", "n"): two.with_turns({"trained": 2, "frozen": 2})}


def test_a_table_stands_between_its_marks(matrix: ModuleType) -> None:
    text = f"before {matrix.BEGIN}old{matrix.END} after"
    assert matrix.between(text, "new") == f"before {matrix.BEGIN}\nnew\n{matrix.END} after"
    with pytest.raises(ValueError, match="once is needed"):
        matrix.between("no marks", "new")


def test_a_rows_outcome_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="outcome 'works'"):
        Row.named(("s", "n"), {"outcome": "works"})
