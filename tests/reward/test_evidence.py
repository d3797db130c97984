"""reward/evidence.py: what a verifier saw becomes evidence that a record can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import RewardError
from agenttrain.part import Part
from agenttrain.records import Task
from agenttrain.reward.evidence import MOST_BYTES, MOST_BYTES_OF_ALL, cut_text, evidence_in
from agenttrain.reward.score import score


def test_what_a_verifier_saw_is_kept_with_its_part() -> None:
    """In JSON's types: a tuple is a list."""
    seen = {
        "exit_code": 1,
        "output": "1 failed",
        "checks": [{"name": "adds", "passed": False, "reason": "3 != 4"}],
        "tampering": ("conftest.py was changed",),
        "seconds": 0.5,
        "more": {"list": [1, None, True]},
    }
    reward = score(
        {"tests": Part(lambda state: {"score": 0, "evidence": seen})},
        task=Task(id="t", input={}),
        state={},
        timeout_s=5,
    )
    assert reward.parts[0].evidence == {**seen, "tampering": ["conftest.py was changed"]}
    assert evidence_in("v", None) == {}


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ("text", "Verifier 'v' answered with evidence 'text', and a mapping is expected."),
        ({"a": {1, 2}}, "Verifier 'v' answered with evidence['a'] {1, 2}, which JSON doesn't hold."),
        ({"a": [0, float("nan")]}, "Verifier 'v' answered with evidence['a'][1] nan, which JSON doesn't hold."),
        ({"a": {"b": b"x"}}, "Verifier 'v' answered with evidence['a']['b'] b'x', which JSON doesn't hold."),
        ({1: "a"}, "Verifier 'v' answered with evidence {1: 'a'}, which JSON doesn't hold."),
        ({"exit_code": "1"}, "Verifier 'v' answered with evidence {'exit_code': '1'}. It holds"),
        ({"exit_code": True}, "Verifier 'v' answered with evidence {'exit_code': True}. It holds"),
        ({"output": None}, "Verifier 'v' answered with evidence {'output': None}. It holds"),
        ({"checks": [{"name": "a"}]}, "Verifier 'v' answered with evidence {'checks': [{'name': 'a'}]}. It holds"),
        ({"checks": "a"}, "Verifier 'v' answered with evidence {'checks': 'a'}. It holds"),
        ({"tampering": [1]}, "Verifier 'v' answered with evidence {'tampering': [1]}. It holds"),
    ],
)
def test_what_a_record_can_not_hold_is_refused(evidence: Any, said: str) -> None:
    """By the verifier's name and the place."""
    with pytest.raises(RewardError) as caught:
        evidence_in("v", evidence)
    assert str(caught.value).startswith(said)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    """The mark says how much is missing; where a program fails, its end tells why."""
    kept = evidence_in("v", {"output": "a" * 3000 + "b" * 3000})["output"]
    assert kept == "a" * 2032 + "… 1936 bytes left out …" + "b" * 2032
    assert cut_text("a" * MOST_BYTES) == "a" * MOST_BYTES


def test_a_long_list_says_how_many_more_there_were() -> None:
    """A mark of the entries' own shape; of checks whether the others passed."""
    checks = [{"name": str(n), "passed": n != 450, "reason": ""} for n in range(500)]
    kept = evidence_in("v", {"checks": checks, "tampering": ["x"] * 201, "d": {str(n): n for n in range(202)}})
    assert kept["checks"][:200] == checks[:200]
    assert kept["checks"][200:] == [{"name": "… and 300 more", "passed": False, "reason": ""}]
    assert kept["tampering"] == ["x"] * 200 + ["… and 1 more"]
    assert len(kept["d"]) == 201
    assert kept["d"]["…"] == "and 2 more"


def test_many_long_texts_share_the_room() -> None:
    """100 of them: 655 bytes each."""
    kept = evidence_in("v", {"checks": [{"name": "n", "passed": True, "reason": "x" * 9000} for _ in range(100)]})
    assert {len(check["reason"].encode()) for check in kept["checks"]} == {len(cut_text("x" * 9000, 327).encode())}
    assert len(json.dumps(kept, ensure_ascii=False).encode()) < MOST_BYTES_OF_ALL


def test_what_an_agent_nests_deep_raises_nothing() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert "… nested deeper" in json.dumps(evidence_in("v", {"answer": deep}), ensure_ascii=False)


@given(st.text(st.characters(codec=None), max_size=300), st.integers(64, 400))
def test_a_cut_text_is_never_longer_than_it_may_be(text: str, most: int) -> None:
    """Whatever signs it is made of, lone surrogates too; a short one is whole."""
    kept = cut_text(text, most)
    assert len(kept.encode()) <= most
    if len(text.encode(errors="replace")) <= most and text.isprintable():
        assert kept == text


def test_a_number_too_long_to_be_written_down_raises_nothing() -> None:
    kept = evidence_in("v", {"answer": 10**5000, "other": 10**2000})
    assert kept == {"answer": "a whole number of thousands of digits", "other": 10**2000}
