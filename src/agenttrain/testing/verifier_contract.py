"""What every verifier keeps to, as tests: subclass `VerifierContract` in pytest and give verifier, task and state.

It is asked through `agenttrain.reward.score`, as a rollout asks it: arguments by name, in its time, and an exception is
an error of the environment, not a reward. So on a state that the policy left odd or empty a verifier must answer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from agenttrain.part import Part
from agenttrain.records import Reward, Task
from agenttrain.reward.score import check_verifiers, score


def odd_states() -> list[Any]:
    """States in which a graph may end: cut early, emptied by the policy, or with messages of every kind last."""
    call: Any = {"name": "no_such_tool", "args": {}, "id": "c", "type": "tool_call"}
    broken: Any = {"name": None, "args": "{", "id": "c", "error": "cut", "type": "invalid_tool_call"}
    return [
        {},
        {"messages": []},
        {"messages": [HumanMessage("")]},
        {"messages": [AIMessage("")]},
        {"messages": [AIMessage([{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}])]},
        {"messages": [AIMessage("", tool_calls=[call])]},
        {"messages": [AIMessage("", invalid_tool_calls=[broken])]},
        {"messages": [HumanMessage("x"), ToolMessage("", tool_call_id="c")]},
        {"messages": [AIMessage("\x00\ud7ff ٣ 𝟛 ½ " + "9" * 400)]},
    ]


class VerifierContract:
    """Subclass it, and give `verifier`, `task` and `state`; pytest does the rest.

    Attributes to set where yours differs:
        seconds: how long one answer may take.
    """

    seconds: float = 10.0

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        """The verifier under test."""
        pytest.fail(f"{type(self).__name__} has no fixture `verifier`. Write one that gives your function.")

    @pytest.fixture
    def task(self) -> Task:
        """A task that it scores."""
        pytest.fail(f"{type(self).__name__} has no fixture `task`. Write one that gives a Task with its reference.")

    @pytest.fixture
    def state(self) -> Any:
        """A state in which the graph solved that task."""
        pytest.fail(f"{type(self).__name__} has no fixture `state`. Write one that gives the graph's last state.")

    @pytest.fixture
    def other_states(self) -> Sequence[Any]:
        """States that the policy may leave; yours where the graph's state holds no messages."""
        return odd_states()

    def test_its_arguments_can_be_filled(self, verifier: Any) -> None:
        """By the names that agenttrain knows."""
        check_verifiers({"verifier": Part(verifier)})

    def test_it_scores_a_solved_task(self, verifier: Any, task: Task, state: Any) -> None:
        """A bool, a finite number or {"score": …}, and more than for a state in which nothing was done."""
        solved, untouched = self._asked(verifier, task, state), self._asked(verifier, task, {"messages": []})
        assert math.isfinite(solved.score)
        assert solved.score > untouched.score

    def test_it_says_the_same_twice(self, verifier: Any, task: Task, state: Any) -> None:
        """A copy of the state is worth as much: nothing is counted, drawn or remembered."""
        first = self._asked(verifier, task, copy.deepcopy(state))
        assert [self._asked(verifier, task, copy.deepcopy(state)) for _ in range(3)] == [first] * 3

    def test_it_leaves_state_and_task_as_they_were(self, verifier: Any, task: Task, state: Any) -> None:
        """Another verifier is asked after it."""
        before = copy.deepcopy((state, task.input, task.reference))
        self._asked(verifier, task, state)
        assert (state, task.input, task.reference) == before

    def test_it_answers_on_whatever_the_policy_left(
        self, verifier: Any, task: Task, other_states: Sequence[Any]
    ) -> None:
        """An exception would take the rollout out of training, and a policy may learn to raise it."""
        for other in other_states:
            reward = self._asked(verifier, task, other)
            assert math.isfinite(reward.score)

    def _asked(self, verifier: Any, task: Task, state: Any) -> Reward:
        given = dict(state) if isinstance(state, Mapping) else state
        return score({"verifier": Part(verifier)}, task=task, state=given, timeout_s=self.seconds)
