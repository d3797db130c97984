"""Chat models that can be seen in a graph before it runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from agenttrain.graph.models import models_of

ADDRESS = "http://127.0.0.1:9/v1"


def seen(open_graph: Any, graph: Any) -> list[str]:
    with open_graph(graph) as runnable:
        found = models_of(runnable)
    assert all(kind == "ChatOpenAI" and address == ADDRESS for kind, _, address in found)
    return [name for _, name, _ in found]


def test_models_in_closures_attributes_and_globals_are_seen(graph_of: Any, open_graph: Any, chat: Any) -> None:
    """Plain, bound, in an object, in a partial."""
    model = chat(model="a")
    bound = model.bind(stop=["x"])

    class Agent:
        def __init__(self) -> None:
            self.llm = model

        def run(self, state: Any) -> Any:
            return {"messages": [self.llm.invoke("x")]}

        def __call__(self, state: Any) -> Any:
            return self.run(state)

    def node(llm: Any, state: Any) -> Any:
        return {"messages": [llm.invoke("x")]}

    for graph in (
        graph_of(lambda state: {"messages": [model.invoke("x")]}),
        graph_of(lambda state: {"messages": [bound.invoke("x")]}),
        graph_of(Agent().run),
        graph_of(Agent()),
        graph_of(functools.partial(node, model)),
    ):
        assert seen(open_graph, graph) == ["a"]


def test_models_of_subgraphs_and_tools_are_seen(graph_of: Any, open_graph: Any, chat: Any) -> None:
    """Each once, sorted."""
    from langchain_core.tools import tool

    inner, asked = chat(model="inner"), chat(model="asked")

    @tool
    def ask(q: str) -> str:
        """Ask a model."""
        return str(asked.invoke(q).text)

    builder = StateGraph(MessagesState)
    builder.add_node("inner", graph_of(lambda state: {"messages": [inner.invoke("x")]}))
    builder.add_node("tools", ToolNode([ask]))
    builder.add_edge(START, "inner")
    builder.add_edge("inner", "tools")
    assert seen(open_graph, builder.compile()) == ["asked", "inner"]


def test_an_agents_model_and_its_middlewares_are_seen(open_graph: Any, chat: Any) -> None:
    """So that a second model ends the run before anything is sampled."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware

    summaries = SummarizationMiddleware(model=chat(model="b"), trigger=("messages", 4))
    assert seen(open_graph, create_agent(chat(model="a"), middleware=[summaries])) == ["a", "b"]


@pytest.mark.parametrize("name", ["ModelFallbackMiddleware", "LLMToolSelectorMiddleware", "LLMToolEmulator"])
def test_models_of_middleware_that_wraps_calls_are_seen(name: str, open_graph: Any, chat: Any, add_tool: Any) -> None:
    """Behind other middleware, too: LangChain chains and traces the hooks, so that they lie deep."""
    import langchain.agents.middleware as stock
    from langchain.agents import create_agent

    other = chat(model="b")
    made = getattr(stock, name)(other) if name == "ModelFallbackMiddleware" else getattr(stock, name)(model=other)
    several = [stock.TodoListMiddleware(), stock.ModelRetryMiddleware(), stock.ToolRetryMiddleware(), made]
    assert seen(open_graph, create_agent(chat(model="a"), [add_tool], middleware=several)) == ["a", "b"]


def test_models_of_deepagents_sub_agents_are_seen(open_graph: Any, chat: Any) -> None:
    """Each sub-agent may have a model of its own."""
    deepagents = pytest.importorskip("deepagents")
    helper = {"name": "helper", "description": "Helps.", "system_prompt": "Help.", "model": chat(model="b")}
    assert seen(open_graph, deepagents.create_deep_agent(chat(model="a"), subagents=[helper])) == ["a", "b"]


def test_a_model_built_in_a_node_is_not_seen(graph_of: Any, open_graph: Any, chat: Any) -> None:
    """Its first call is where it is met."""
    assert seen(open_graph, graph_of(lambda state: {"messages": [chat(model="late").invoke("x")]})) == []
