"""What a run's records add up to, from a view of a store that a list of rollouts plays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agenttrain.figures import UNDONE, replaced_model, wall_seconds, why_untrained
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
        id=f"{phase}-{start}" + (f"-r{life}" if life else ""), task_id="t", phase=phase, step=0, sibling=0, attempt=0,
        life=life, status="completed", started_at=start, ended_at=end,
    )  # fmt: skip


def turn(role: Any, model: str) -> Turn:
    site = CallSite(model_class="Chat", model_name=model)
    return Turn(id=model, rollout_id="r", index=0, role=role, role_reason="", site=site)


def test_the_time_of_a_run_is_that_of_all_its_lives() -> None:
    """Also of what a life did in vain; rollouts and training are those of the steps that count."""
    rows = [{"rollout_s": 2.0, "train_s": 1.0, "sync_s": 0.5}, {"rollout_s": 3.0}]
    lives = [{"wall_s": 10.0, "evaluate_s": 2.0}, {"wall_s": 7.0, "evaluate_s": 0.0}]
    assert wall_seconds(rows, lives) == {"total": 17.0, "evaluate": 2.0, "rollout": 5.0, "train": 1.0, "sync": 0.5}


def test_each_training_rollout_that_is_not_trained_has_a_reason() -> None:
    """The step's, its status, or that a later life made its step again; one that a later life kept and trained none."""
    places = ((1, 0), (1, 0), (2, 0), (2, 0), (2, 1), (3, 0))
    made = [replace(rollout("train", 0.0, 9.0, life), id=str(i), step=step) for i, (step, life) in enumerate(places)]
    made[3] = replace(made[3], status="environment_failure")
    rows = [{"step": 1, "life": 0, "dropped": {"1": "all rewards equal"}}, {"step": 2, "life": 1, "dropped": {}}]
    assert why_untrained([*made, rollout("baseline", 5.0, 6.0)], rows, {"0", "4"}) == {
        "1": "all rewards equal",
        "2": UNDONE,
        "3": "status environment_failure",
        "5": UNDONE,
    }
    assert "2" not in why_untrained(made, rows, {"0", "2", "4"})


def test_the_policy_replaces_the_model_of_the_calls_that_are_trained() -> None:
    """A judge that is asked before it is none of them; with no trained call the first one is named."""
    judge, agent = turn("auxiliary", "gpt-4o"), turn("trained", "gpt-4o-mini")
    assert replaced_model(View((rollout("baseline", 0.0, 1.0), (judge, agent)))) == "Chat gpt-4o-mini"  # type: ignore[arg-type]
    assert replaced_model(View((rollout("baseline", 0.0, 1.0), (judge,)))) == "Chat gpt-4o"  # type: ignore[arg-type]
    assert replaced_model(View()).startswith("no model")  # type: ignore[arg-type]
