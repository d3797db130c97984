"""What can be seen of a graph before it runs: its drawing, and what its rollouts would share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache as AnswerCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, interrupt

from agenttrain.errors import GraphError
from agenttrain.graph.runnable import opened
from agenttrain.graph.shape import Edge, GraphShape, Shared, shape_of


class OwnStore(InMemoryStore):
    """A store of a class of its own, in memory all the same."""


def shape(target: Any) -> GraphShape:
    with opened(target, name="graph", explain=lambda error: GraphError(str(error))) as runnable:
        return shape_of(runnable)


def one_node(node: Any = lambda state: {}, **settings: Any) -> StateGraph[Any]:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", node, **settings)
    builder.set_entry_point("agent")
    return builder


def test_nodes_and_edges() -> None:
    """Those of a subgraph under its node's name; a way that is taken only sometimes is told apart."""
    builder = one_node()
    builder.add_node("team", one_node().compile())
    builder.add_conditional_edges("agent", lambda state: "team", ["team", "__end__"])
    found = shape(builder)
    assert set(found.nodes) == {"__start__", "agent", "team:agent", "__end__"}
    assert set(found.edges) == {
        Edge(source="__start__", target="agent", conditional=False),
        Edge(source="agent", target="__end__", conditional=True),
        Edge(source="agent", target="team:agent", conditional=True),
        Edge(source="team:agent", target="__end__", conditional=False),
    }


def test_a_plain_graph_shares_nothing() -> None:
    found = shape(one_node())
    assert (found.cached, found.checkpointers, found.stores, found.llm_caches) == ((), (), (), ())
    assert (found.breakpoints, found.interrupting) == ((), ())


def test_a_cache_policy_counts_where_a_cache_is_compiled_in() -> None:
    cached = one_node(cache_policy=CachePolicy())
    assert shape(cached.compile()).cached == ()
    assert shape(cached.compile(cache=InMemoryCache())).cached == ("agent",)


def test_a_graph_within_is_looked_into() -> None:
    """One that a node calls by itself too; its checkpointer is no less apart, since it is in memory."""
    inner = one_node(cache_policy=CachePolicy()).compile(
        cache=InMemoryCache(), checkpointer=InMemorySaver(), name="inner"
    )
    found = shape(one_node(lambda state: inner.invoke(state)).compile(checkpointer=InMemorySaver(), name="outer"))
    assert found.cached == ("agent",)
    assert found.checkpointers == (
        Shared(graph="outer", kind="InMemorySaver", apart=True),
        Shared(graph="inner", kind="InMemorySaver", apart=True),
    )


def test_tasks_with_a_cache_policy() -> None:
    @task(cache_policy=CachePolicy())
    def look_up(item: str) -> str:
        return item

    @entrypoint(cache=InMemoryCache())
    def flow(item: str) -> str:
        return look_up(item).result()

    assert shape(flow).cached == ("look_up",)


@pytest.mark.parametrize("store", [InMemoryStore(), OwnStore()], ids=["ours", "a subclass"])
def test_stores(store: InMemoryStore) -> None:
    found = shape(one_node().compile(store=store, name="desk"))
    assert found.stores == (Shared(graph="desk", kind=type(store).__name__, apart=True),)


@pytest.fixture
def answer_cache() -> Iterator[AnswerCache]:
    cache = AnswerCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def test_caches_of_answers(answer_cache: AnswerCache) -> None:
    """The one for all models, and a model's own."""
    model = FakeListChatModel(responses=["x"], cache=AnswerCache())
    found = shape(one_node(lambda state: {"messages": [model.invoke("x")]}))
    assert found.llm_caches == ("set_llm_cache(InMemoryCache)", "InMemoryCache of FakeListChatModel")


def test_where_it_waits_for_a_human() -> None:
    """By its code, and by breakpoints; a name of the user's own is no interrupt."""

    def asks(state: MessagesState) -> dict[str, Any]:
        interrupt("may I?")
        return {}

    assert shape(one_node(asks)).interrupting == ("agent",)
    assert shape(one_node().compile(interrupt_before=["agent"])).breakpoints == ("agent",)
    assert shape(one_node(one_node(one_node(asks).compile()).compile())).interrupting == ("agent:agent:agent",)
    assert shape(one_node().compile(interrupt_after="*")).breakpoints == ("every node",)


def test_nodes_that_hold_a_model() -> None:
    """Those of a subgraph under its node's name."""
    model = FakeListChatModel(responses=["x"])

    def asks(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    builder = one_node()
    builder.add_node("team", one_node(asks).compile())
    builder.add_node("judge", asks)
    builder.add_edge("agent", "team")
    builder.add_edge("team", "judge")
    assert shape(builder).asking == ("team:agent", "judge")
