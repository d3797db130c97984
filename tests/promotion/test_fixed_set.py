"""Turns that go with a policy: read back as written, and what somebody's answers come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import PromotionError
from agenttrain.promotion.fixed_set import (
    NAME,
    FixedSet,
    FixedTurn,
    TurnSeen,
    agreement,
    answered_turn,
    as_json,
    read_fixed_set,
    scored_turn,
    spread,
)
from agenttrain.records import Ids

TURN = FixedTurn(name="task-4, turn 0", prompt_ids=(1, 2), response_ids=(7, 8, 9), logprobs=(-0.5, -0.25, -1.0))
FIXED = FixedSet(
    run_id="desk-1",
    form="merged",
    source="turns of a test",
    renderer="default:aa:bb",
    history="keep",
    weights="cc",
    files={"config.json": "dd"},
    base="",
    turns=(TURN,),
    agreements=({"by": "transformers"},),
)


def answers(*replies: tuple[Sequence[int], Sequence[float]]) -> tuple[list[tuple[Ids, int]], object]:
    """What was asked, and somebody who gives these answers one after the other."""
    asked: list[tuple[Ids, int]] = []
    left = iter(replies)

    def answer(prompt_ids: Ids, max_tokens: int) -> tuple[Ids, Sequence[float]]:
        asked.append((prompt_ids, max_tokens))
        ids, logprobs = next(left)
        return tuple(ids), logprobs

    return asked, answer


def never(prompt_ids: Ids, one: int, other: int) -> float:
    raise AssertionError("asked how far two tokens are apart, and none differ")


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(as_json(FIXED))
    assert read_fixed_set(tmp_path) == FIXED


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"agenttrain": "other", "format": 1}', "cut"])
def test_what_is_no_set_of_ours_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / NAME).write_text(as_json(FIXED)[:-40] if damage == "cut" else damage)
    with pytest.raises(PromotionError, match="is no folder that agenttrain exported"):
        read_fixed_set(tmp_path)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({**json.loads(as_json(FIXED)), "format": 2}))
    with pytest.raises(PromotionError, match="has format 2, and this agenttrain reads up to 1"):
        read_fixed_set(tmp_path)


def test_an_answer_that_is_the_same_is_asked_once() -> None:
    asked, answer = answers(((7, 8, 9), (-0.5, -0.25, -1.0005)))
    seen = answered_turn(TURN, answer, tie_gap=never)  # type: ignore[arg-type]
    assert asked == [((1, 2), 3)]
    assert (seen.n_near_ties, seen.other) == (0, "")
    assert seen.gap == pytest.approx(5e-4)


def test_after_a_near_tie_it_goes_on_from_the_recorded_token() -> None:
    """The tokens after it are held against what was recorded, and the tie is counted."""
    asked, answer = answers(((7, 4, 4), (-0.5, -0.25, -3.0)), ((9,), (-1.0,)))
    told: list[tuple[Ids, int, int]] = []

    def tie_gap(*question: object) -> float:
        told.append(question)  # type: ignore[arg-type]
        return 9.9e-5

    seen = answered_turn(TURN, answer, tie_gap=tie_gap)  # type: ignore[arg-type]
    assert asked == [((1, 2), 3), ((1, 2, 7, 8), 1)]
    assert told == [((1, 2, 7), 8, 4)]
    assert seen == TurnSeen(n_near_ties=1, gap=0.0)


def test_another_token_that_is_no_tie_is_told_with_both_and_how_far_they_are_apart() -> None:
    _, answer = answers(((7, 4, 4), (-0.5, -0.25, -3.0)))
    seen = answered_turn(TURN, answer, tie_gap=lambda *_: 1e-4)  # type: ignore[arg-type]
    assert seen.other == "token 1 is 4 in place of 8, 1.0e-04 apart in log probability (a near tie is below 0.0001)"


def test_an_answer_that_ends_early_is_another_one() -> None:
    _, answer = answers(((7, 8), (-0.5, -0.25)))
    assert answered_turn(TURN, answer, tie_gap=never).other == "it ends after 2 of 3 tokens"  # type: ignore[arg-type]


def test_scores_of_a_pass_are_read_in_the_same_way() -> None:
    """The likeliest must be the recorded one; where drawn, only the probabilities count."""
    tie = scored_turn(TURN, likeliest=(7, 4, 9), behind=(0.0, 9e-5, 0.0), logprobs=TURN.logprobs)
    assert tie == TurnSeen(n_near_ties=1, gap=0.0)
    other = scored_turn(TURN, likeliest=(7, 4, 5), behind=(0.0, 9e-5, 0.5), logprobs=TURN.logprobs)
    assert other.other == "token 2 is 5 in place of 9, 5.0e-01 apart in log probability (a near tie is below 0.0001)"
    drawn = scored_turn(TURN, likeliest=(1, 1, 1), behind=(1.0, 1.0, 1.0), logprobs=TURN.logprobs, is_greedy=False)
    assert drawn == TurnSeen(n_near_ties=0, gap=0.0)


@pytest.mark.parametrize(
    ("seen", "passed", "said"),
    [
        ([TurnSeen(n_near_ties=0, gap=1e-3), TurnSeen(n_near_ties=2, gap=0.0)], True, ""),
        (
            [TurnSeen(n_near_ties=0, gap=0.0), TurnSeen(n_near_ties=0, gap=0.0011)],
            False,
            "b: a log probability is 1.1e-03 off, accepted 0.001",
        ),
        (
            [TurnSeen(n_near_ties=0, gap=float("nan")), TurnSeen(n_near_ties=0, gap=0.0)],
            False,
            "a: a log probability is nan off, accepted 0.001",
        ),
        ([TurnSeen(n_near_ties=0, gap=0.0), TurnSeen(n_near_ties=0, gap=0.0, other="other")], False, "b: other"),
    ],
)
def test_what_all_turns_come_to(seen: list[TurnSeen], passed: bool, said: str) -> None:
    turns = [FixedTurn(name=name, prompt_ids=(1,), response_ids=(2, 3), logprobs=(0.0, 0.0)) for name in "ab"]
    agreed = agreement("somebody", turns, seen)
    assert (agreed.passed, agreed.first) == (passed, said)
    assert (agreed.n_turns, agreed.n_tokens) == (2, 4)
    json.dumps(agreed.as_dict(), allow_nan=False)


def test_it_is_said_with_its_figures() -> None:
    agreed = agreement("sglang", [TURN], [TurnSeen(n_near_ties=1, gap=2e-6)])
    assert agreed.in_words == (
        "sglang gives 0 of 1 turns again token by token, 1 of 3 tokens near ties; log probabilities within 2.0e-06"
    )


@given(st.integers(0, 200), st.integers(1, 50))
def test_positions_are_spread(n: int, n_wanted: int) -> None:
    positions = spread(n, n_wanted)
    assert len(positions) == min(n, n_wanted)
    assert positions == sorted(set(positions))
    assert all(0 <= position < n for position in positions)
    steps = {b - a for a, b in pairwise(positions)}
    assert not steps or max(steps) - min(steps) <= 1
