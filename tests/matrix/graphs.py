"""Small graphs that several sections of the matrix roll out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def one_node(function: Callable[..., Any], state: type = MessagesState, **compiled: Any) -> Any:
    """START, the node `agent`, END."""
    builder = StateGraph(state)
    builder.add_node("agent", function)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    return builder.compile(**compiled)


def in_a_row(*functions: Callable[..., Any], state: type = MessagesState, **compiled: Any) -> Any:
    """One node after the other, each by its function's name."""
    return StateGraph(state).add_sequence(functions).add_edge(START, functions[0].__name__).compile(**compiled)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look_up(order: str) -> str:
    """What is known of an order."""
    return f"{order} is on its way"


def calls_tools(model: Any, *tools: BaseTool, bound: Any = None, node: Any = None, **compiled: Any) -> Any:
    """The common loop: `agent` calls the model, `tools` runs what it called.

    Args:
        bound: the model with its tools. None: bound here.
        node: runs the tools. None: a ToolNode of them.
    """
    told = bound if bound is not None else model.bind_tools(list(tools))
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [told.invoke(state["messages"])]})
    builder.add_node("tools", node if node is not None else ToolNode(list(tools)))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile(**compiled)


def answer(model: Any) -> Callable[[Any], Any]:
    """A node that appends what the model says."""

    def agent(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    return agent
