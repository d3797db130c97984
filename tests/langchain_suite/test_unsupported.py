"""docs/langchain-tests.md lists exactly what the suites leave out; runs after them."""

from __future__ import annotations

import inspect
from pathlib import Path

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

TABLE = Path(__file__).parents[2] / "docs" / "langchain-tests.md"
SUITES = {
    "TestChatModel": ("unit", ChatModelUnitTests),
    "TestServedPolicy": ("integration", ChatModelIntegrationTests),
    "TestServedPolicyByJsonSchema": ("integration", ChatModelIntegrationTests),
}


def listed(suite: str) -> dict[str, str]:
    """Test to what the suite says of it, for the rows of one suite."""
    rows = [line.strip("|").split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in row] for row in rows[2:]]
    return {test: says for name, test, says, why in cells if name == suite and why}


def test_the_table_lists_what_was_left_out(outcomes: dict[tuple[str, str], str]) -> None:
    """Every suite that ran whole left out what the table lists, and one that ran in part nothing else."""
    for name in {name for name, _ in outcomes if name in SUITES}:
        suite, standard = SUITES[name]
        seen = {test: reason for (ran, test), reason in outcomes.items() if ran == name}
        skipped = {test: reason for test, reason in seen.items() if reason}
        tests = {test for test, _ in inspect.getmembers(standard, inspect.isfunction) if test.startswith("test_")}
        expected = listed(suite)
        assert skipped == (expected if tests <= seen.keys() else {t: expected[t] for t in skipped})


def test_the_table_names_tests_that_there_are() -> None:
    """In the installed langchain-tests."""
    for suite, standard in set(SUITES.values()):
        assert listed(suite)
        assert [test for test in listed(suite) if not hasattr(standard, test)] == []
