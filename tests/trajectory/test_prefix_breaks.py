"""Breaks are counted by cause."""

from __future__ import annotations

from agenttrain.records import CallSite, Turn
from agenttrain.trajectory.prefix_breaks import prefix_breaks


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
