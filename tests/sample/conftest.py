"""A rollout of two trained turns around a frozen one, and the result that it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agenttrain.records import (
    CallSite,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
)
from agenttrain.sample.build import build_samples

TASK = Task(id="t", input={})
TURNS = tuple(
    Turn(
        id=id, rollout_id="train-1-t-0-0", index=i, role=role, role_reason="node: plan", site=CallSite(),
        prompt_ids=prompt, response_ids=response, response_logprobs=tuple(-x / 8 for x in response),
        weight_versions=(version,) * len(response),
    )
    for i, (id, role, prompt, response, version) in enumerate(
        [
            ("a", "trained", (1, 2), (3, 4), 5),
            ("b", "frozen", (1, 2, 3, 4, 5), (6,), 5),
            ("c", "trained", (1, 2, 3, 4, 5, 6, 7), (8, 9), 6),
        ]
    )
)  # fmt: skip
TRAJECTORY = Trajectory(
    rollout_id="train-1-t-0-0", index=0, prompt_ids=(1, 2), response_ids=(3, 4, 5, 6, 7, 8, 9),
    response_mask=(1, 1, 0, 0, 0, 1, 1), response_logprobs=(-3 / 8, -4 / 8, 0.0, 0.0, 0.0, -1.0, -9 / 8),
    weight_versions=(5, 5, -1, -1, -1, 6, 6), break_cause="first_turn",
    spans=(
        TurnSpan(turn_id="a", start=0, end=2, trained=True),
        TurnSpan(turn_id="b", start=3, end=4, trained=False, reason="frozen: node: plan"),
        TurnSpan(turn_id="c", start=5, end=7, trained=True),
    ),
)  # fmt: skip


def rollout(**more: Any) -> Rollout:
    return Rollout(
        **{
            "id": "train-1-t-0-0", "task_id": "t", "phase": "train", "step": 1, "sibling": 0, "attempt": 0,
            "status": "completed", "started_at": 10.0, "ended_at": 12.5, "n_tool_calls": 2,
            "reward": Reward(score=0.75, parts=(RewardPart(name="answer", score=1.0, weight=0.75),)),
        }
        | more
    )  # fmt: skip


@pytest.fixture
def result() -> Callable[..., RolloutResult]:
    """Makes the result; keywords change its rollout."""

    def make(**more: Any) -> RolloutResult:
        made = rollout(**more)
        return RolloutResult(
            request=RolloutRequest(task=TASK, phase="train", step=1), rollout=made, turns=TURNS,
            trajectories=(TRAJECTORY,), samples=build_samples(made, (TRAJECTORY,)),
        )  # fmt: skip

    return make
