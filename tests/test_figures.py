"""What a run's records add up to, from a view of a store that a list of rollouts plays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agenttrain.figures import UNDONE, replaced_model, rollout_metrics, summed, token_table, wall_seconds, why_untrained
from agenttrain.records import (
    CallSite,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    Sample,
    Task,
    Turn,
)
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.tree import trajectories


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


def test_counts_of_an_engine_are_summed_over_the_lives_that_have_them() -> None:
    """A life of an agenttrain that kept no counts has none."""
    assert summed([{"restarts": 1.0, "sampled_ids": 5.0}, {}, {"sampled_ids": 2.0}]) == {
        "restarts": 1.0,
        "sampled_ids": 7.0,
    }


MIB = 2**20


class Routed:
    """A store of training rollouts, each a turn with a mebibyte of routed experts, made anew when it is read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(result.rollout for result in self.results())

    def results(self) -> Iterator[RolloutResult]:
        for i in range(self.n):
            request = RolloutRequest(task=Task(id=str(i), input={}), phase="train", step=1)
            made = Rollout(
                id=request.rollout_id, task_id=str(i), phase="train", step=1, sibling=0, attempt=0,
                status="completed", reward=Reward(score=1.0, parts=()),
            )  # fmt: skip
            turns = (
                Turn(
                    id=f"{made.id}#0", rollout_id=made.id, index=0, role="trained", role_reason="", site=CallSite(),
                    prompt_ids=(1, 2), response_ids=(3,), response_logprobs=(-0.5,), weight_versions=(0,),
                    routed_experts=RoutedExperts(start=0, n_layers=512, n_chosen=512, data=bytes(MIB)),
                ),
            )  # fmt: skip
            paths = trajectories(turns)
            yield RolloutResult(
                request=request, rollout=made, turns=turns, trajectories=paths, samples=build_samples(made, paths)
            )

    def trained_samples(self, lives: Mapping[int, int]) -> list[Sample]:
        return [replace(sample, routed_experts=None) for result in self.results() for sample in result.samples]


def test_the_token_account_of_a_run_does_not_hold_its_routed_experts() -> None:
    """It holds the turns of a whole run at once, and their experts are by far the largest of them."""
    view, rows = Routed(32), [{"step": 1, "life": 0, "dropped": {}}]
    tracemalloc.start()
    try:
        table = token_table(view, rows)  # type: ignore[arg-type]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (table["trained"], table["drifted"]) == (32, 0)
    assert most < 8 * MIB


def with_reward(reward: Reward | None) -> RolloutResult:
    made = replace(rollout("train", 0.0, 1.0), reward=reward)
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    return RolloutResult(request=request, rollout=made, turns=(), trajectories=(), samples=())


def test_a_step_tells_the_mean_of_each_part_and_the_closed_gates() -> None:
    """Of those that answered; a gate that is open closes nothing, and without gates there is no such figure."""
    gate = RewardPart(name="gate", score=1.0, weight=0.0, kind="safety")
    tests = RewardPart(name="tests", score=0.5)
    shut = replace(gate, score=0.0)
    left_out = RewardPart(name="style", score=0.0, weight=0.0, kind="process", error="hung")
    rewards = [
        Reward(score=-1.0, parts=(shut, tests, left_out), closed="gate"),
        Reward(
            score=1.0, parts=(gate, replace(tests, score=1.0), RewardPart(name="style", score=0.25, kind="process"))
        ),
        None,
    ]
    told = rollout_metrics([with_reward(reward) for reward in rewards])
    assert {name: value for name, value in told.items() if name.startswith("part.")} == {
        "part.gate": 0.5,
        "part.tests": 0.75,
        "part.style": 0.25,
    }
    assert (told["gates_closed"], told["safety_violations"]) == (1, 1)
    plain = rollout_metrics([with_reward(Reward(score=0.5, parts=(tests,)))])
    assert "gates_closed" not in plain
    assert "safety_violations" not in plain
