"""Where in the graph a call is made."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from agenttrain.graph.site import call_site


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
