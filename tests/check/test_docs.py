"""docs/check.md and the codes say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agenttrain.check.finding import CODES, Code, error, warning

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<code>\w+)` \| (?P<severity>.*?) \| (?P<cause>.*?) \| (?P<fix>.*) \|$", re.MULTILINE)


def test_the_table_of_codes() -> None:
    """Every code, in order, with severity, cause and fix."""
    rows = ROW.finditer((ROOT / "docs" / "check.md").read_text())
    written = {row["code"]: Code(severity=row["severity"], cause=row["cause"], fix=row["fix"]) for row in rows}
    assert list(written.items()) == list(CODES.items())


def test_every_code_is_used() -> None:
    """By some line that makes a finding of it."""
    source = "".join(path.read_text() for path in (ROOT / "src" / "agenttrain" / "check").glob("*_findings.py"))
    source += (ROOT / "src" / "agenttrain" / "check" / "prepared.py").read_text()
    source += (ROOT / "src" / "agenttrain" / "doctor" / "policy.py").read_text()  # passed on with its own code
    assert [code for code in CODES if f'"{code}"' not in source] == []


def test_a_finding_has_its_codes_fix_unless_it_has_one_of_its_own() -> None:
    found = error("memory", "here", "much")
    assert (found.severity, found.fix) == ("error", "As the finding says.")
    assert warning("memory", "here", "much", fix="Less.").fix == "Less."
    with pytest.raises(KeyError):
        error("no_such_code", "here", "x")
