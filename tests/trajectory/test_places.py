"""Where the tokens of a rollout stand, and why some are not trained."""

from __future__ import annotations

from typing import Any

from agenttrain.records import CallSite, Turn
from agenttrain.telemetry.names import MASK_REASONS
from agenttrain.trajectory.places import token_places
from agenttrain.trajectory.tree import trajectories


def turn(index: int, prompt: tuple[int, ...], response: tuple[int, ...], **more: Any) -> Turn:
    return Turn(
        **{
            "id": f"r#{index}",
            "rollout_id": "r",
            "index": index,
            "role": "trained",
            "role_reason": "default",
            "site": CallSite(),
            "prompt_ids": prompt,
            "response_ids": response,
            "response_logprobs": (-0.5,) * len(response),
            "weight_versions": (0,) * len(response),
        }
        | more
    )


def places(*turns: Turn, may_be_trained: bool = True) -> dict[str, int]:
    return token_places(turns, trajectories(turns), may_be_trained=may_be_trained)


FIRST = turn(0, (1, 2), (3, 4, 5))


def test_trained_frozen_and_context() -> None:
    frozen = turn(1, (1, 2, 3, 4, 5, 6), (7, 8), role="frozen", extends="r#0")
    assert places(FIRST, frozen) == {"trained": 3, "context": 1, "frozen": 2}


def test_a_rollout_that_may_not_be_trained_drops_what_it_sampled() -> None:
    assert places(FIRST, may_be_trained=False) == {"dropped": 3}


def test_a_retried_attempt_and_an_aborted_call() -> None:
    """LangGraph threw the first answer away, and the engine ended the last call."""
    again = turn(1, (1, 2), (9,), site=CallSite(task_id="n", attempt=2))
    first = turn(0, (1, 2), (3, 4, 5), site=CallSite(task_id="n", attempt=1))
    cut = turn(2, (50,), (51, 52), stop_reason="aborted")
    assert places(first, again, cut) == {"retried": 3, "trained": 1, "aborted": 2}


def test_history_that_another_trajectory_owns() -> None:
    """Two branches go on from one turn: the second has the first three sampled ids in its prompt."""
    left = turn(1, (1, 2, 3, 4, 5), (6,), extends="r#0")
    right = turn(2, (1, 2, 3, 4, 5, 7), (8, 9), extends="r#0")
    assert places(FIRST, left, right) == {"trained": 6, "other_trajectory": 3}


def test_an_auxiliary_call_has_no_tokens() -> None:
    judge = turn(1, (), (), role="auxiliary")
    assert places(FIRST, judge) == {"trained": 3}


def test_every_reason_is_one_that_telemetry_names() -> None:
    seen = {"trained", "frozen", "context", "retried", "aborted", "other_trajectory", "dropped"}
    assert seen == MASK_REASONS.keys()
