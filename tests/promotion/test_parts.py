"""promotion/parts.py and parts_text.py: how each part of the reward was spread, before and after."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.part import GATES, Part
from agenttrain.promotion.parts import gates_closed, reward_parts
from agenttrain.promotion.parts_text import bin_labels, parts_lines
from agenttrain.records import PartKind, Reward, RewardPart, Rollout


def verifier(state: Any) -> float:
    return 1.0


def rollouts(name: str, *scores: float | str | None, kind: PartKind = "outcome") -> list[Rollout]:
    """One a score: a text is the error of a part that was left out, None a rollout without a reward."""
    return [
        Rollout(
            id=f"r{n}",
            task_id=f"t{n}",
            phase="eval",
            step=0,
            sibling=0,
            attempt=0,
            status="completed",
            reward=None if score is None else Reward(score=0.0, parts=(part_of(name, score, kind),)),
        )
        for n, score in enumerate(scores)
    ]


def part_of(name: str, score: float | str, kind: PartKind) -> RewardPart:
    if isinstance(score, str):
        return RewardPart(name=name, score=0.0, weight=0.0, kind=kind, error=score)
    return RewardPart(name=name, score=score, kind=kind)


def test_a_part_is_told_with_its_spread() -> None:
    """Of those that answered; what was left out is counted, and a rollout without a reward is in neither."""
    declared = {"style": Part(verifier, 0.5, kind="process", low=0.0, high=1.0, on_error="leave_out")}
    (table,) = reward_parts(declared, rollouts("style", 0.0, 0.1, 0.25, 1.0, "hung", None, kind="process"))
    assert table == {
        "style": {
            "kind": "process",
            "weight": 0.5,
            "low": 0.0,
            "high": 1.0,
            "n": 4,
            "mean": pytest.approx(0.3375),
            "errors": 1,
            "histogram": {
                "edges": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
                "counts": [1, 1, 1, 0, 0, 0, 0, 0, 0, 1],
            },
        }
    }


@pytest.mark.parametrize(
    ("part", "before", "after", "edges", "counts"),
    [
        (Part(verifier), [0, 1, 1], [1, 1, 1], [0.0, 0.5, 1.0], ([1, 2], [0, 3])),
        (Part(verifier, low=0), [0.0], [], [0.0, 0.5, 1.0], ([1, 0], [0, 0])),
        (Part(verifier), [3, 3], [3], [2.5, 3.5], ([2], [1])),
        (Part(verifier), [0], [20], [float(n) for n in range(0, 21, 2)], ([1, *[0] * 9], [*[0] * 9, 1])),
        (
            Part(verifier, low=0, high=10),
            [0, 1],
            [1],
            [float(n) for n in range(11)],
            ([1, 1, *[0] * 8], [0, 1, *[0] * 8]),
        ),
        (Part(verifier, low=2.0, high=2.0), [2.0], [2.0], [1.5, 2.5], ([1], [1])),
    ],
)
def test_the_bins_are_the_same_before_and_after(part: Part, before: Any, after: Any, edges: Any, counts: Any) -> None:
    """Of the declared bounds, else of what both have seen; two where all is 0 or 1."""
    tables = reward_parts({"v": part}, rollouts("v", *before), rollouts("v", *after))
    assert [table["v"]["histogram"]["edges"] for table in tables] == [edges, edges]
    assert tuple(table["v"]["histogram"]["counts"] for table in tables) == counts


def test_a_gate_has_no_weight_and_says_how_often_it_was_closed() -> None:
    (table,) = reward_parts({"g": Part(verifier, kind="format")}, rollouts("g", 1.0, 0.5, 0.0, kind="format"))
    assert (table["g"]["weight"], table["g"]["closed"], table["g"]["n"]) == (None, 2, 3)


def test_a_part_that_never_answered_has_no_mean_and_no_histogram() -> None:
    """None, and not 0. After training it may answer."""
    before, after = reward_parts({"v": Part(verifier)}, rollouts("v", "hung", None), rollouts("v", 1.0))
    assert (before["v"]["n"], before["v"]["mean"], before["v"]["errors"]) == (0, None, 1)
    assert (before["v"]["histogram"]["counts"], after["v"]["histogram"]["counts"]) == ([0, 0], [0, 1])
    (nothing,) = reward_parts({"v": Part(verifier)}, [])
    assert nothing["v"]["histogram"] is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_every_answer_is_in_one_bin(before: list[float], after: list[float]) -> None:
    """Of at most 10, whose edges rise."""
    tables = reward_parts({"v": Part(verifier)}, rollouts("v", *before), rollouts("v", *after))
    for table, scores in zip(tables, (before, after), strict=True):
        histogram = table["v"]["histogram"]
        assert sum(histogram["counts"]) == len(scores)
        assert 1 <= len(histogram["counts"]) <= 10
        assert len(histogram["edges"]) == len(histogram["counts"]) + 1
        assert sorted(set(histogram["edges"])) == histogram["edges"]


def test_closed_gates_are_counted_where_some_are_declared() -> None:
    """By rollout, of the kinds that are asked for."""
    seen = rollouts("g", 1.0, 0.0, None, kind="safety")
    declared = {"g": Part(verifier, kind="safety"), "v": Part(verifier)}
    assert (gates_closed(seen, declared, GATES), gates_closed(seen, declared, ("safety",))) == (1, 1)
    assert gates_closed(seen, declared, ("format",)) is None
    assert gates_closed(seen, {"v": Part(verifier)}, GATES) is None
    assert gates_closed([], declared, GATES) == 0


def test_parts_are_shown_before_and_after() -> None:
    """A line a bin, and few is not none; without parts there is no line."""
    declared = {"tests": Part(verifier), "style": Part(verifier, 0.5, kind="process", low=0.0, high=5.0)}
    before = rollouts("tests", *[0.0] * 99, 1.0) + rollouts("style", "hung", kind="process")
    after = rollouts("tests", 1.0, 1.0) + rollouts("style", 4.5, 5.0, kind="process")
    tables = reward_parts(declared, before, after)
    lines = parts_lines(dict(zip(("before", "after"), tables, strict=True)))
    assert lines[:9] == [
        "## Parts of the reward",
        "```",
        "tests: outcome, weight 1; mean 0.010 before, 1.000 after",
        "     before                  after",
        "  0  ███████████████  99 %                     0 %",
        "  1  ▏                 1 %   ███████████████ 100 %",
        "",
        "style: process, weight 0.5; mean none before, 4.750 after; left out 1 before, 0 after",
        "            before                  after",
    ]
    assert lines[9] == "  0 to 0.5  none                                      0 %"
    assert lines[18:] == ["  4.5 to 5  none                    ███████████████ 100 %", "```", ""]
    assert parts_lines({"before": {}, "after": {}}) == []


def test_one_evaluation_alone_has_no_headings() -> None:
    (table,) = reward_parts({"tests": Part(verifier)}, rollouts("tests", 0.0, 1.0))
    assert parts_lines({"": table})[2:5] == [
        "tests: outcome, weight 1; mean 0.500",
        "  0  ████████         50 %",
        "  1  ████████         50 %",
    ]


def test_the_labels_of_bins() -> None:
    assert bin_labels([0.0, 0.5, 1.0]) == ["0", "1"]
    assert bin_labels([2.5, 3.5]) == ["3"]
    assert bin_labels([0.0, 0.1, 0.2]) == ["0 to 0.1", "0.1 to 0.2"]
