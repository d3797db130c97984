"""docs/attacks.md is what the tests try."""

from __future__ import annotations

from collections import Counter

import pytest
from attacks.table import DOCUMENT, KINDS, Attack, all_attacks, document

MEND = "Run: python tests/attacks/table.py"


def test_the_tables_are_those_of_the_markers() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text, all_attacks()), MEND


def test_no_kind_is_without_attacks_and_no_two_have_one_name() -> None:
    attacks = all_attacks()
    assert {each.kind for each in attacks} == set(KINDS)
    assert [name for name, n in Counter((each.kind, each.name) for each in attacks).items() if n > 1] == []
    assert len(attacks) >= 40


def test_an_outcome_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="outcome none of"):
        Attack(kind="answers", name="a", tried="b", outcome="ignored")
