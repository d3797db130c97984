"""The order desk's verifier keeps the contract of verifiers, and careless ones don't."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from agenttrain.errors import RewardError
from agenttrain.graph.load import load_module
from agenttrain.records import Task
from agenttrain.testing import VerifierContract
from agenttrain.testing.verifier_contract import odd_states

GRAPH = Path(__file__).parents[2] / "examples" / "order-desk" / "graph.py"
TASK = Task(id="t", input={}, reference=42)
STATE = {"messages": [HumanMessage("How much?"), AIMessage("The answer is 42.")]}


class TestOrderDesk(VerifierContract):
    """`answered` of examples/order-desk/graph.py."""

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        return load_module(GRAPH).answered  # type: ignore[no-any-return]

    @pytest.fixture
    def task(self) -> Task:
        return TASK

    @pytest.fixture
    def state(self) -> dict[str, Any]:
        return STATE


def last_words(task: Task, state: Any) -> bool:
    return str(task.reference) in state["messages"][-1].text


def lucky(task: Task, state: Any) -> float:
    return random.random() if state.get("messages") else -1.0


def in_words(task: Task, state: Any) -> Any:
    return "good" if state.get("messages") else "bad"


def forgetful(task: Task, state: Any) -> float:
    return float(bool(state.get("messages") and state["messages"].pop()))


def slow(task: Task, state: Any) -> float:
    time.sleep(0.3)
    return 1.0


def generous(task: Task, state: Any) -> float:
    return 1.0


def test_a_verifier_that_takes_messages_for_granted_fails() -> None:
    """On an empty state it raises, which a policy may learn."""
    with pytest.raises(RewardError, match="raised KeyError"):
        VerifierContract().test_it_answers_on_whatever_the_policy_left(last_words, TASK, odd_states())


def test_a_verifier_that_draws_fails() -> None:
    """It says another number each time."""
    with pytest.raises(AssertionError):
        VerifierContract().test_it_says_the_same_twice(lucky, TASK, STATE)


def test_a_verifier_that_answers_in_words_fails() -> None:
    """Words are no score."""
    with pytest.raises(RewardError, match="answered 'good'"):
        VerifierContract().test_it_scores_a_solved_task(in_words, TASK, STATE)


def test_a_verifier_that_changes_the_state_fails() -> None:
    """The next verifier would see another one."""
    with pytest.raises(AssertionError):
        VerifierContract().test_it_leaves_state_and_task_as_they_were(
            forgetful, TASK, {"messages": [*STATE["messages"]]}
        )


def test_a_verifier_that_takes_too_long_fails() -> None:
    """Against the contract's own time."""
    contract = VerifierContract()
    contract.seconds = 0.05
    with pytest.raises(RewardError, match=r"took more than 0\.05 s"):
        contract.test_it_says_the_same_twice(slow, TASK, STATE)


def test_a_verifier_that_likes_everything_fails() -> None:
    """It must tell a solved task from an untouched one."""
    with pytest.raises(AssertionError):
        VerifierContract().test_it_scores_a_solved_task(generous, TASK, STATE)
