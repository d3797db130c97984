"""The verdict as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.check.finding import warning
from agenttrain.check.reward_findings import Spread
from agenttrain.check.verdict import Cost, Verdict, but_of
from agenttrain.graph.shape import GraphShape
from agenttrain.records import CallSite, Rollout, RolloutRequest, RolloutResult, Task, Turn


def lines(**fields: Any) -> tuple[str, ...]:
    given: dict[str, Any] = {
        "ready": False,
        "missing": (),
        "but": "",
        "verifiers": (),
        "n_train": 0,
        "n_held_out": 0,
        "smallest_effect": None,
        "sandbox": None,
        "spread": None,
        "memory": None,
        "cost": None,
    }
    return Verdict(**given | fields).lines()


def test_nothing_is_there() -> None:
    assert lines() == ("verifiers: none", "tasks: none", "rewards: none")


def test_tasks() -> None:
    assert lines(n_train=4, n_held_out=100, smallest_effect=0.198)[1] == (
        "tasks: 4 to train on, 100 held out, which can show 20 points or more (unpaired, before anything was measured)"
    )
    assert lines(n_train=4)[1] == "tasks: 4 to train on, 0 held out"


@pytest.mark.parametrize(
    ("low", "high", "minutes"),
    [(0.01, 0.04, "under 0.1"), (0.14, 0.11, "0.1"), (0.04, 0.3, "under 0.1 to 0.3"), (0.97, 17.2, "1 to 17")],
)
def test_minutes(low: float, high: float, minutes: str) -> None:
    """Two that read alike are one."""
    cost = Cost(rollouts=1000, tokens=20000, own_calls={}, minutes_low=low, minutes_high=high)
    assert lines(cost=cost)[-1] == (
        f"cost of a fit, estimated from this check: {minutes} min, 1,000 rollouts, 20,000 tokens sampled"
    )


def test_calls_of_the_users_own_models() -> None:
    """They may cost money."""
    own_calls = {"ChatOpenAI:gpt-4o": 2400, "ChatOpenAI:o3": 1}
    cost = Cost(rollouts=1, tokens=2, own_calls=own_calls, minutes_low=1, minutes_high=1)
    assert lines(cost=cost)[-1].endswith(
        "2 tokens sampled, 2,400 calls of your own ChatOpenAI:gpt-4o and 1 call of your own ChatOpenAI:o3"
    )


SHAPE = GraphShape(
    nodes=("__start__", "agent", "tools", "review", "__end__"),
    edges=(),
    cached=(),
    checkpointers=(),
    stores=(),
    llm_caches=(),
    breakpoints=(),
    interrupting=(),
    asking=("agent", "review"),
)


def spread(success: float) -> Spread:
    return Spread(n=4, mean=success, std=0.1, success=success, groups=2, groups_that_teach=1)


def test_ready_but() -> None:
    """Most calls invalid and no success: the nodes with a model that no rollout came to."""
    agent = Turn(id="t", rollout_id="r", index=0, role="trained", role_reason="", site=CallSite(node="agent"))
    request = RolloutRequest(task=Task(id="a", input={}), phase="check")
    rollout = Rollout(
        id="r", task_id="a", phase="check", step=0, sibling=0, attempt=0, status="completed", success=False
    )
    made = RolloutResult(request=request, rollout=rollout, turns=(agent,), trajectories=(), samples=())
    invalid = [warning("invalid_tool_calls", "the policy", "3 of 4 tool calls are invalid.")]
    assert but_of(SHAPE, [made], invalid, spread(0.0)) == (
        "most tool calls are invalid, none of 4 rollouts succeeded, and no rollout called the model of review"
    )
    assert but_of(SHAPE, [made], invalid, spread(0.5)) == ""
    assert but_of(SHAPE, [made], [], spread(0.0)) == ""
    assert but_of(SHAPE, [made], invalid, None) == ""
