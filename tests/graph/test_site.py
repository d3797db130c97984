"""Where in the graph a call is made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from agenttrain.graph.site import call_site, stock_use


def test_a_call_whose_metadata_was_replaced_still_names_its_node(graph_of: Any, chat: Any) -> None:
    """A runnable called with metadata of its own drops LangGraph's; the checkpoint namespace still tells the node."""
    found: list[Any] = []
    look = RunnableLambda(lambda value: found.append(call_site(chat(), {}, tags=(), metadata={})) or value)
    graph_of(lambda state: look.invoke({}, config={"metadata": {"lc_source": "summarization"}})).invoke(
        {"messages": []}
    )
    assert [site.node for site in found] == ["agent"]
    assert found[0].checkpoint_ns.startswith("agent:")


def test_outside_of_a_graph_there_is_no_node(chat: Any) -> None:
    """None, and no empty name."""
    assert call_site(chat(), {}, tags=(), metadata={}).node is None


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ({}, None),
        ({"lc_source": "summarization", "lc_internal_call": "t"}, "summarization"),
        ({"lc_internal_call": "t"}, "middleware"),
    ],
)
def test_a_call_of_middleware_says_so(metadata: dict[str, Any], source: str | None, chat: Any) -> None:
    """By LangChain's name for what it is for, else by the mark that anybody's middleware may set."""
    assert call_site(chat(), {}, tags=(), metadata=metadata).source == source


SELECTION = {"title": "ToolSelectionResponse", "type": "object", "properties": {}}
EMULATED = "You are emulating a tool call for testing purposes.\n\nTool: add\nDescription: Add."


@pytest.mark.parametrize(
    ("prompt", "settings", "use"),
    [
        ("Go on.", {}, None),
        ("Go on.", {"tools": [{"function": {"name": "add"}}], "response_format": {"type": "json_object"}}, None),
        ("Go on.", {"tools": [{"type": "function", "function": {"name": "ToolSelectionResponse"}}]}, "tool_selection"),
        ("Go on.", {"tools": [{"name": "ToolSelectionResponse", "input_schema": {}}]}, "tool_selection"),
        ("Go on.", {"tools": [SELECTION]}, "tool_selection"),
        ("Go on.", {"response_format": {"json_schema": {"name": "ToolSelectionResponse"}}}, "tool_selection"),
        (EMULATED, {}, "tool_emulation"),
        (f"Earlier: {EMULATED}", {}, None),
    ],
)
def test_what_older_middleware_asks_for(prompt: str, settings: dict[str, Any], use: str | None) -> None:
    """By what its call holds, in each provider's form of a schema."""
    assert stock_use([HumanMessage(prompt)], settings) == use


def test_the_stock_prompt_and_schema_are_the_installed_ones() -> None:
    """So that a change of LangChain's fails here, as long as older versions are told by them."""
    from langchain.agents.middleware import tool_emulator, tool_selection

    emulator, selection = inspect.getsource(tool_emulator), inspect.getsource(tool_selection)
    assert r'f"You are emulating a tool call for testing purposes.\n\n"' in emulator
    assert 'f"Tool: {tool_name}' in emulator
    assert "class ToolSelectionResponse(TypedDict):" in selection
