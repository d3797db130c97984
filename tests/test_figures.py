"""What a run's records add up to, from a view of a store that a list of rollouts plays."""

from __future__ import annotations

from typing import Any

from agenttrain.figures import evaluation_seconds, replaced_model
from agenttrain.records import CallSite, Rollout, Turn


class View:
    """Rollouts, each with its turns."""

    def __init__(self, *finished: tuple[Rollout, tuple[Turn, ...]]) -> None:
        self.finished = finished

    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout, _ in self.finished)

    def turns(self, rollout_id: str) -> tuple[Turn, ...]:
        return next(turns for rollout, turns in self.finished if rollout.id == rollout_id)


def rollout(phase: Any, start: float, end: float, life: int = 0) -> Rollout:
    return Rollout(
        id=f"{phase}-{start}", task_id="t", phase=phase, step=0, sibling=0, attempt=0, life=life, status="completed",
        started_at=start, ended_at=end,
    )  # fmt: skip


def turn(role: Any, model: str) -> Turn:
    site = CallSite(model_class="Chat", model_name=model)
    return Turn(id=model, rollout_id="r", index=0, role=role, role_reason="", site=site)


def test_the_time_between_two_lives_is_no_evaluation() -> None:
    """Baseline 0 to 3 in the first life, held-out 4 to 6, and again 1000 to 1002 after a resume."""
    view = View(
        (rollout("baseline", 0.0, 2.0), ()),
        (rollout("baseline", 1.0, 3.0), ()),
        (rollout("train", 3.0, 4.0), ()),
        (rollout("held_out", 4.0, 6.0), ()),
        (rollout("held_out", 1000.0, 1002.0, life=1), ()),
    )
    assert evaluation_seconds(view) == 3.0 + 2.0 + 2.0  # type: ignore[arg-type]


def test_the_policy_replaces_the_model_of_the_calls_that_are_trained() -> None:
    """A judge that is asked before it is none of them; with no trained call the first one is named."""
    judge, agent = turn("auxiliary", "gpt-4o"), turn("trained", "gpt-4o-mini")
    assert replaced_model(View((rollout("baseline", 0.0, 1.0), (judge, agent)))) == "Chat gpt-4o-mini"  # type: ignore[arg-type]
    assert replaced_model(View((rollout("baseline", 0.0, 1.0), (judge,)))) == "Chat gpt-4o"  # type: ignore[arg-type]
    assert replaced_model(View()).startswith("no model")  # type: ignore[arg-type]
