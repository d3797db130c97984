"""The verdict as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.check.verdict import Cost, Verdict


def lines(**fields: Any) -> tuple[str, ...]:
    given: dict[str, Any] = {
        "ready": False,
        "missing": (),
        "verifiers": (),
        "n_train": 0,
        "n_held_out": 0,
        "smallest_effect": None,
        "spread": None,
        "memory": None,
        "cost": None,
    }
    return Verdict(**given | fields).lines()


def test_nothing_is_there() -> None:
    assert lines() == ("verifiers: none", "tasks: none", "rewards: none")


def test_tasks() -> None:
    assert lines(n_train=4, n_held_out=100, smallest_effect=0.198)[1] == (
        "tasks: 4 to train on, 100 held out, which can show 20 points or more"
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
