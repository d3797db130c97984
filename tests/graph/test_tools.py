"""What is declared of tools, held against those of the graph before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from langchain_core.tools import BaseTool, InjectedToolArg, Tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode

from agenttrain.errors import ConfigError
from agenttrain.graph.tools import check_declared, tools_of
from agenttrain.tool_spec import External


@tool
def refund(order: str, cents: int = 100, key: Annotated[str, InjectedToolArg] = "") -> str:
    """Refund an order."""
    return order


@tool
def search(text: str, state: Annotated[Any, InjectedState]) -> str:
    """Search."""
    return text


class Loud(BaseTool):
    name: str = "loud"
    description: str = "Runs whatever is declared."

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return "done"

    def _run(self) -> str:
        return "done"


def seen(*tools: Any) -> Any:
    return {each.name: [each] for each in sorted(tools, key=lambda each: each.name)}


def test_tools_of_a_graph(open_graph: Any) -> None:
    """Of a ToolNode, of a node's own code, and of a graph within; by name."""
    inner = StateGraph(MessagesState).add_node("tools", ToolNode([search])).add_edge(START, "tools").compile()

    def pay(state: Any) -> Any:
        return {"messages": [("ai", refund.invoke({"order": "A1"}))]}

    builder = StateGraph(MessagesState).add_node("team", inner).add_node("pay", pay)
    builder.add_edge(START, "team").add_edge("team", "pay")
    with open_graph(builder.compile()) as runnable:
        assert {name: list(tools) for name, tools in tools_of(runnable).items()} == {
            "refund": [refund], "search": [search],
        }  # fmt: skip


@pytest.mark.parametrize(
    "stand_in",
    [
        lambda order, cents: None,
        lambda order, cents, extra=1: None,
        lambda order, cents, key: None,
        lambda order, cents, config: None,
        lambda **told: None,
        lambda order, **told: None,
        lambda *, cents, order: None,
    ],
)
def test_stand_ins_that_take_the_tools_arguments(stand_in: Any) -> None:
    assert check_declared({"refund": External(stand_in=stand_in, key_argument="key")}, seen(refund)) == ()


@pytest.mark.parametrize(
    ("stand_in", "told"),
    [
        (lambda order: None, r"doesn't take 'cents'\. The tool takes cents, order: give it the same parameters\."),
        (lambda order, cents, /: None, r"doesn't take 'cents', 'order'\."),
        (lambda order, cents, state: None, r"asks for 'state', which nothing fills\."),
        (lambda: None, r"^The stand-in <lambda> of the tool 'refund' doesn't take 'cents', 'order'\."),
    ],
)
def test_stand_ins_that_do_not(stand_in: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_declared({"refund": External(stand_in=stand_in)}, seen(refund))


def test_a_stand_in_of_a_tool_of_one_text() -> None:
    plain = Tool(name="plain", description="x", func=str)
    assert check_declared({"plain": External(stand_in=lambda text: text)}, seen(plain)) == ()
    with pytest.raises(ConfigError, match="takes no argument by position"):
        check_declared({"plain": External(stand_in=lambda **told: None)}, seen(plain))


def test_a_key_argument_is_one_of_the_tool() -> None:
    assert check_declared({"refund": External(permitted=True, key_argument="key")}, seen(refund)) == ()
    with pytest.raises(
        ConfigError, match=r"names no argument of the tool\. It takes cents, key, order\. Add id: Annot"
    ):
        check_declared({"refund": External(permitted=True, key_argument="id")}, seen(refund))


def test_a_tool_that_can_not_be_held_back() -> None:
    """Its class replaces what runs a tool."""
    with pytest.raises(ConfigError, match=r"The tool 'loud' is external, and its class Loud has a run\(\) of its own"):
        check_declared({"loud": External(permitted=True)}, seen(Loud()))
    assert check_declared({"loud": "read_only"}, seen(Loud())) == ()


def test_a_name_that_no_tool_has() -> None:
    """Refused where a tool is left that it may have been meant for; else a tool may be made later."""
    with pytest.raises(
        ConfigError, match=r"Seen: refund, search\. Did you mean 'refund'\? Of refund nothing is declared"
    ):
        check_declared({"refnd": External(permitted=True), "search": "read_only"}, seen(refund, search))
    with pytest.raises(
        ConfigError, match=r"'pay': …} names no tool .* Of refund, search nothing is declared: declare all"
    ):
        check_declared({"pay": External(permitted=True)}, seen(refund, search))
    assert check_declared({"pay": "read_only", "refund": "read_only"}, seen(refund)) == (
        "tools={'pay': …} names no tool that can be seen before the graph runs. Seen: refund.",
    )
    assert check_declared({"pay": "read_only"}, {}) == (
        "tools={'pay': …} names no tool that can be seen before the graph runs. Seen: none.",
    )
