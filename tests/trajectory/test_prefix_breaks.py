"""Breaks are counted by cause, and the first id that differs is named."""

from __future__ import annotations

from agenttrain.records import CallSite, Turn
from agenttrain.trajectory.prefix_breaks import Departure, departure, prefix_breaks


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


def test_a_departure_names_the_first_id_that_differs() -> None:
    sampled = turn("a", (1, 2), (3, 4), "first_turn")
    merged = turn("b", (1, 2, 34, 5), (6,), "template")
    assert departure(merged, [sampled]) == Departure(
        turn_id="b", from_turn_id="a", position=2, in_response=True, expected_id=3, seen_id=34
    )


def test_a_prompt_that_ends_early_departs_at_its_end() -> None:
    sampled = turn("a", (1, 2), (3, 4), "first_turn")
    found = departure(turn("b", (1, 2, 3), (6,), "template"), [sampled])
    assert found is not None
    assert (found.position, found.seen_id) == (3, None)


def test_a_prompt_that_extends_or_shares_nothing_has_no_departure() -> None:
    sampled = turn("a", (1, 2), (3, 4), "first_turn")
    assert departure(turn("b", (1, 2, 3, 4, 5), (6,), None), [sampled]) is None
    assert departure(turn("c", (9,), (6,), None), [sampled]) is None
