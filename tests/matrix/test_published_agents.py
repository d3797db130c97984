"""Agents that LangChain and LangGraph publish, as their users build them: create_agent and create_react_agent.

Expected turns are read off the packages' sources: one call of node `model` (`agent` in create_react_agent) for each
round of tools, and one more for the answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.tools import ToolRuntime
from langchain_core.tools import tool
from matrix.harness import Roll, Rolled, Seen, call, says
from pydantic import BaseModel

SECTION = "Published agents"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def lookup(order: str) -> str:
    """Look an order up."""
    raise LookupError(f"no order {order}")


class Total(BaseModel):
    """The total of the order."""

    total: int


def causes(rolled: Rolled) -> list[str]:
    """Why each trajectory of the one rollout began."""
    return [path.break_cause for path in rolled.result.trajectories]


def is_total_5(task: Any, state: Any) -> bool:
    return bool(state["structured_response"] == Total(total=5))


@pytest.mark.row(SECTION, "create_agent: a model by name, a system prompt")
def test_a_model_by_name(roll: Roll, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name becomes a model when the agent is built; two calls, one path, all of it trained."""
    from langchain.agents import create_agent

    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    agent = create_agent("openai:gpt-4o", tools=[add], system_prompt="You add.")

    def script(seen: Seen) -> str:
        assert seen.messages[0] == ("system", "You add.\nadd: Add two numbers.")
        return "5" if seen.n_tool_results else call("add", a=2, b=3)

    rolled = roll(agent, script)
    assert rolled.places == [("model", "trained")] * 2
    assert causes(rolled) == ["first_turn"]
    assert {turn.site.model_name for turn in rolled.turns} == {"gpt-4o"}
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "create_agent: response_format=ToolStrategy")
def test_an_answer_by_a_tool(roll: Roll, chat: Any) -> None:
    """An answer that doesn't fit is told so and asked for again, in the same conversation."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy

    agent = create_agent(chat(), tools=[add], response_format=ToolStrategy(Total))
    script = says(call("add", a=2, b=3), call("Total", total="five"), call("Total", total=5))
    rolled = roll(agent, script, verifier=is_total_5)
    assert rolled.places == [("model", "trained")] * 3
    assert causes(rolled) == ["first_turn"]
    assert rolled.result.rollout.success


@pytest.mark.row(SECTION, "create_agent: response_format=ProviderStrategy")
def test_an_answer_by_the_provider(roll: Roll, chat: Any) -> None:
    """The policy is told the schema in words, and what it says is read as the provider's answer would be."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy

    agent = create_agent(chat(), tools=[add], response_format=ProviderStrategy(Total))
    rolled = roll(agent, says(call("add", a=2, b=3), json.dumps({"total": 5})), verifier=is_total_5)
    assert rolled.places == [("model", "trained")] * 2
    assert causes(rolled) == ["first_turn"]
    assert rolled.result.rollout.success


@pytest.mark.row(SECTION, "create_agent: response_format=a schema")
@pytest.mark.parametrize(
    ("model", "answer"),
    [("gpt-4o", json.dumps({"total": 5})), ("gpt-3.5-turbo", call("Total", total=5))],
    ids=["by the provider", "by a tool"],
)
def test_an_answer_as_langchain_chooses(model: str, answer: str, roll: Roll, chat: Any) -> None:
    """LangChain chooses by the name of the user's model, and the policy is asked in that way."""
    from langchain.agents import create_agent

    agent = create_agent(chat(model=model), tools=[], response_format=Total)
    rolled = roll(agent, says(answer), verifier=is_total_5)
    assert rolled.places == [("model", "trained")]
    assert rolled.result.rollout.success


@pytest.mark.row(SECTION, "create_agent: calls that the tools refuse")
def test_calls_that_tools_refuse(roll: Roll, chat: Any) -> None:
    """Bad arguments and a tool that is none are answered with an error, and the policy goes on."""
    from langchain.agents import create_agent

    agent = create_agent(chat(), tools=[add])
    rolled = roll(agent, says(call("add", a="x", b=3), call("subtract", a=2), call("add", a=2, b=3), "5"))
    assert rolled.places == [("model", "trained")] * 4
    assert causes(rolled) == ["first_turn"]
    assert rolled.result.rollout.n_tool_calls == 3
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "create_agent: a tool that raises")
def test_a_tool_that_raises(roll: Roll, chat: Any) -> None:
    """It ends the graph: a failure of the environment, whose tokens are dropped for that reason."""
    from langchain.agents import create_agent

    agent = create_agent(chat(), tools=[lookup])
    rolled = roll(agent, says(call("lookup", order="7")), status="environment_failure")
    assert rolled.places == [("model", "trained")]
    assert "LookupError: no order 7" in rolled.result.rollout.cause
    assert rolled.account.dropped == {"status environment_failure": rolled.account.sampled}


@dataclass
class Shop:
    prices: dict[str, int]


@pytest.mark.row(SECTION, "create_agent: context_schema")
def test_a_context(roll: Roll, chat: Any) -> None:
    """A task's context reaches the tools as the schema's type."""
    from langchain.agents import create_agent

    @tool
    def price(item: str, runtime: ToolRuntime[Shop]) -> int:
        """Price of an item."""
        assert isinstance(runtime.context, Shop)
        return runtime.context.prices[item]

    def script(seen: Seen) -> str:
        return f"It is {seen.last}" if seen.n_tool_results else call("price", item="B1")

    agent = create_agent(chat(), tools=[price], context_schema=Shop)
    rolled = roll(
        agent,
        script,
        context={"prices": {"B1": 12}},
        verifier=lambda task, state: state["messages"][-1].text == "It is 12",
    )
    assert rolled.places == [("model", "trained")] * 2
    assert rolled.result.rollout.success


@pytest.mark.row(SECTION, "create_react_agent (langgraph.prebuilt)")
def test_a_react_agent(roll: Roll, chat: Any) -> None:
    """Deprecated and still widely used; its node is `agent`, and its structured answer a call of its own."""
    from langgraph.prebuilt import create_react_agent

    with pytest.warns(DeprecationWarning, match="create_react_agent"):
        agent = create_react_agent(chat(), [add], prompt="You add.", response_format=Total)
    script = says(call("add", a=2, b=3), "5", json.dumps({"total": 5}))
    rolled = roll(agent, script, verifier=is_total_5)
    assert rolled.places == [("agent", "trained"), ("agent", "trained"), ("generate_structured_response", "trained")]
    assert rolled.result.rollout.success
    assert causes(rolled) == ["first_turn", "other_conversation"]
