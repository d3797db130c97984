"""verifiers/trajectories.py: the agent's tool calls against the reference's, by agentevals' real matchers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from agenttrain.errors import ConfigError, RewardError
from agenttrain.part import Part
from agenttrain.records import RewardPart, Task
from agenttrain.reward.score import score
from agenttrain.testing import VerifierContract
from agenttrain.verifiers import tool_trajectory

pytest.importorskip("agentevals", reason="agentevals is optional: the extra `evals`")

SEARCH, REFUND = {"name": "search", "args": {"q": "A41"}}, {"name": "refund", "args": {"order": "A41", "all": True}}
NOTIFY = {"name": "notify", "args": {}}


def ai(*calls: dict[str, Any], text: str = "") -> AIMessage:
    return AIMessage(text, tool_calls=[{**call, "id": str(n), "type": "tool_call"} for n, call in enumerate(calls)])


def state_of(*turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A user's question, each turn's calls with what the tools said, and an answer."""
    messages: list[Any] = [HumanMessage("Refund A41.")]
    for calls in turns:
        messages += [ai(*calls), *(ToolMessage("done", tool_call_id=str(n)) for n in range(len(calls)))]
    return {"messages": [*messages, AIMessage("It is refunded.")]}


def part_of(state: Any, reference: Any, **settings: Any) -> RewardPart:
    task = Task(id="t", input={}, reference=reference)
    return score({"v": Part(tool_trajectory(**settings))}, task=task, state=state, timeout_s=5.0).parts[0]


@pytest.mark.parametrize(
    ("turns", "reference", "by_mode"),
    [
        ([[SEARCH], [REFUND]], [SEARCH, REFUND], "strict unordered subset superset"),
        ([[REFUND], [SEARCH]], [SEARCH, REFUND], "unordered subset superset"),
        ([[SEARCH, REFUND]], [SEARCH, REFUND], "unordered subset superset"),
        ([[SEARCH, REFUND]], [[SEARCH, REFUND]], "strict unordered subset superset"),
        ([[REFUND, SEARCH]], [[SEARCH, REFUND]], "strict unordered subset superset"),
        ([[SEARCH], [NOTIFY], [REFUND]], [SEARCH, REFUND], "superset"),
        ([[SEARCH]], [SEARCH, REFUND], "subset"),
        ([], [SEARCH], "subset"),
        ([], [], "strict unordered subset superset"),
        ([[SEARCH]], [], "superset"),
        ([[SEARCH], [SEARCH]], [SEARCH], "superset"),
        ([[{"name": "search", "args": {"q": "A42"}}]], [SEARCH], ""),
    ],
)
def test_each_mode_matches_what_agentevals_says_it_does(turns: Any, reference: Any, by_mode: str) -> None:
    """The reference as calls alone: what was said, and by whom, doesn't count."""
    modes = ("strict", "unordered", "subset", "superset")
    matched = [mode for mode in modes if part_of(state_of(*turns), reference, mode=mode).score == 1.0]
    assert matched == by_mode.split()


@pytest.mark.parametrize(
    ("settings", "args", "right"),
    [
        ({}, {"order": "A41"}, 0),
        ({"tool_args": "ignore"}, {"order": "B"}, 1),
        ({"tool_args": "subset"}, {"order": "A41"}, 1),
        ({"tool_args": "superset"}, {"order": "A41"}, 0),
        ({"tool_args": "superset"}, {"order": "A41", "all": True, "why": "late"}, 1),
        ({"overrides": {"refund": "ignore"}}, {}, 1),
        ({"overrides": {"refund": ["order"]}}, {"order": "A41", "all": False}, 1),
        ({"overrides": {"refund": ["order"]}}, {"order": "A42", "all": True}, 0),
        ({"overrides": {"refund": lambda mine, theirs: mine["order"].lower() == "a41"}}, {"order": "a41"}, 1),
        ({"overrides": {"search": "ignore"}}, {}, 0),
    ],
)
def test_how_arguments_are_compared_is_the_users_to_say(settings: Any, args: Any, right: int) -> None:
    assert part_of(state_of([{"name": "refund", "args": args}]), [REFUND], **settings).score == right


def openai(name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("reference", "right"),
    [
        ({"messages": state_of([SEARCH])["messages"]}, 1),
        (state_of([SEARCH])["messages"], 1),
        (
            [
                {"role": "user", "content": "other words"},
                openai("search", '{"q": "A41"}'),
                {"role": "tool", "content": "other"},
                {"role": "assistant", "content": "other"},
            ],
            1,
        ),
        ([openai("search", '{"q": "A41"}')], 0),
        (state_of([SEARCH], [SEARCH])["messages"], 0),
    ],
)
def test_a_reference_of_messages_is_compared_message_by_message(reference: Any, right: int) -> None:
    """By role and calls, as agentevals does; in OpenAI's format or LangChain's."""
    assert part_of(state_of([SEARCH]), reference).score == right


def test_messages_of_a_state_may_be_mappings() -> None:
    assert part_of({"messages": [openai("search", '{"q": "A41"}')]}, [SEARCH]).score == 1.0


BROKEN: Any = {"name": "refund", "args": "{", "id": "9", "error": "cut", "type": "invalid_tool_call"}


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("", tool_calls=ai(SEARCH).tool_calls, invalid_tool_calls=[BROKEN]),
        openai("refund", "{"),
        openai("refund", "[1]"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]},
        {"role": "assistant", "content": "", "tool_calls": ["refund"]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "refund", "args": {(1, 2): 3}}]},
    ],
)
def test_a_call_that_can_not_be_read_is_a_wrong_one(message: Any) -> None:
    """It raises nothing; under superset it is one more call."""
    state = {"messages": [*state_of([SEARCH])["messages"], message]}
    for mode in ("strict", "unordered", "subset"):
        part = part_of(state, [SEARCH], mode=mode)
        assert part.score == 0.0
        assert part.comment.startswith("a call that can't be read: ")
    assert part_of(state, [SEARCH], mode="superset").score == 1.0


def test_the_comment_says_what_was_called() -> None:
    assert part_of(state_of([REFUND]), [SEARCH]).comment == (
        'called refund({"order": "A41", "all": true}); expected search({"q": "A41"})'
    )


@pytest.mark.parametrize("reference", [None, "search", [1], {"calls": []}, [{"args": {}}], [openai("search", "{")]])
def test_a_reference_that_is_none_is_no_fault_of_the_policy(reference: Any) -> None:
    with pytest.raises(RewardError, match=r"the reference of task 't' is .* a list of calls"):
        part_of(state_of(), reference)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "exact"}, "tool_trajectory got mode='exact' and tool_args='exact': Invalid trajectory match type"),
        (
            {"tool_args": "loose"},
            "tool_trajectory got mode='strict' and tool_args='loose': Invalid tool args match mode",
        ),
    ],
)
def test_a_mode_that_agentevals_does_not_know_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tool_trajectory(**settings)
    assert str(caught.value).startswith(message)


def test_without_agentevals_the_line_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the decorator, before anything runs."""
    monkeypatch.setitem(sys.modules, "agentevals.trajectory.match", None)
    with pytest.raises(ConfigError, match=r"needs agentevals, .* Install it: pip install 'agenttrain\[evals\]'"):
        tool_trajectory()


class TestTrajectory(VerifierContract):
    """tool_trajectory keeps the contract of verifiers."""

    @pytest.fixture
    def verifier(self) -> Callable[..., Any]:
        return tool_trajectory()

    @pytest.fixture
    def task(self) -> Task:
        return Task(id="t", input={}, reference=[SEARCH])

    @pytest.fixture
    def state(self) -> dict[str, Any]:
        return state_of([SEARCH])
