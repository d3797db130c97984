"""Breaks are counted by cause."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from agenttrain.records import BreakCause, CallSite, Respelling, Turn
from agenttrain.trajectory.prefix_breaks import (
    BREAKS_IN_WORDS,
    RESPELLED_IN_WORDS,
    in_words,
    prefix_breaks,
    respelled_turns,
)


def turn(id: str, prompt: tuple[int, ...], response: tuple[int, ...], cause: str | None) -> Turn:
    return Turn(
        id=id, rollout_id="r", index=0, role="trained", role_reason="", site=CallSite(), prompt_ids=prompt,
        response_ids=response, response_logprobs=(-1.0,) * len(response), weight_versions=(0,) * len(response),
        break_cause=cause,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_first_turn_is_no_break() -> None:
    assert prefix_breaks([turn("a", (1,), (2,), "first_turn")]) == {}


def test_breaks_are_counted_by_cause() -> None:
    turns = [
        turn("a", (1,), (2,), "first_turn"),
        turn("b", (1, 3), (4,), "history_rewritten"),
        turn("c", (1, 5), (6,), "history_rewritten"),
        turn("d", (7,), (8,), "other_conversation"),
    ]
    assert prefix_breaks(turns) == {"history_rewritten": 2, "other_conversation": 1}


def test_turns_that_kept_a_reply_are_counted_by_how_it_would_be_written() -> None:
    """One turn may count twice; those after a reply that would be written the same count for nothing."""
    plain = turn("a", (1,), (2,), "first_turn")
    turns = [plain, replace(plain, respelled=("thinking_dropped",))]
    turns.append(replace(plain, respelled=("thinking_dropped", "text_respelled")))
    assert respelled_turns(turns) == {"text_respelled": 1, "thinking_dropped": 2}


def test_every_cause_has_its_words() -> None:
    assert {*BREAKS_IN_WORDS} == {*get_args(BreakCause)} - {"first_turn"}
    assert {*RESPELLED_IN_WORDS} == {*get_args(Respelling)}


def test_an_equal_prompt_is_told_whenever_it_was_asked() -> None:
    """In a loop it comes later, not in parallel."""
    told = "1 parallel_sibling (a prompt was asked again: in parallel, or later)"
    assert in_words({"parallel_sibling": 1}, BREAKS_IN_WORDS) == told


def test_counts_in_words_begin_with_the_most() -> None:
    told = in_words({"retry": 2, "template": 1200}, BREAKS_IN_WORDS)
    assert told == "1,200 template (the renderer could not append), 2 retry (LangGraph ran the node again)"
