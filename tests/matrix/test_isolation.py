"""State that must not leak between the rollouts of one task: siblings are independent samples, and nothing of the
user's is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
from langchain_core.caches import InMemoryCache as AnswerCache
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.globals import get_llm_cache, set_llm_cache
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver, MemorySaver
from langgraph.config import get_store
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedStore
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy
from matrix.graphs import answer, in_a_row, one_node
from matrix.harness import Roll, Seen

SECTION = "Apart from its siblings"
NOTES = ("notes",)


def counter() -> Any:
    """A script that says 0, 1, 2 …: equal answers of siblings would come from a cache."""
    n = iter(range(1_000))
    return lambda seen: str(next(n))


def last(seen: Seen) -> str:
    return seen.last


def cached_node(chat: Any, **compiled: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(chat()), cache_policy=CachePolicy())
    builder.add_edge(START, "agent")
    return builder.compile(cache=InMemoryCache(), **compiled)


@pytest.mark.row(SECTION, "node cache (CachePolicy)", note="bypassed")
def test_node_cache(roll: Roll, chat: Any) -> None:
    assert roll(cached_node(chat), counter(), runs=3).said == ["0", "1", "2"]


@pytest.mark.row(SECTION, "node cache of a graph within", note="bypassed")
def test_node_cache_within(roll: Roll, chat: Any) -> None:
    inner = cached_node(chat)

    def outer(state: MessagesState) -> Any:
        return inner.invoke({"messages": state["messages"]}, {"configurable": {"of_its_own": 1}})

    assert roll(in_a_row(outer), counter(), runs=3).said == ["0", "1", "2"]


@pytest.mark.row(SECTION, "cache of an @task", note="bypassed")
def test_task_cache(roll: Roll, chat: Any) -> None:
    model = chat()

    @task(cache_policy=CachePolicy())
    def draft(text: str) -> str:
        return str(model.invoke(text).text)

    @entrypoint(cache=InMemoryCache())
    def agent(inputs: Any) -> Any:
        return {"draft": draft("tea").result()}

    assert roll(agent, counter(), runs=3).said == ["0", "1", "2"]


@pytest.fixture
def answer_cache() -> Iterator[AnswerCache]:
    before, cache = get_llm_cache(), AnswerCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(before)


@pytest.mark.row(SECTION, "set_llm_cache", note="bypassed, and not filled")
def test_llm_cache(roll: Roll, chat: Any, answer_cache: Any) -> None:
    assert roll(one_node(answer(chat())), counter(), runs=3).said == ["0", "1", "2"]
    assert answer_cache._cache == {}


@pytest.mark.row(SECTION, "model.cache=…", note="bypassed, and not filled")
def test_model_cache(roll: Roll, chat: Any) -> None:
    cache = AnswerCache()
    assert roll(one_node(answer(chat(cache=cache))), counter(), runs=3).said == ["0", "1", "2"]
    assert cache._cache == {}


def n_messages(seen: Seen) -> str:
    return str(len(seen.messages))


@pytest.mark.row(SECTION, "LangGraph checkpointer given at compile", note="a fresh one in memory for each rollout")
def test_checkpointer(roll: Roll, chat: Any) -> None:
    saver = MemorySaver()
    assert roll(one_node(answer(chat()), checkpointer=saver), n_messages, runs=3).said == ["1"] * 3
    assert not saver.storage


@pytest.mark.row(SECTION, "LangGraph checkpointer of a graph within, one thread_id for all", note="as above")
def test_checkpointer_within(roll: Roll, chat: Any) -> None:
    """Within one rollout it remembers: the second call of the inner graph sees the first."""
    saver = InMemorySaver()
    inner = one_node(answer(chat()), checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "always this one"}}

    def outer(state: MessagesState) -> Any:
        for _ in range(2):
            got = inner.invoke({"messages": [("user", "hi")]}, thread)
        assert len(inner.get_state(thread).values["messages"]) == 4
        return {"messages": got["messages"][-1:]}

    assert roll(in_a_row(outer), n_messages, runs=3).said == ["1", "3"] * 3
    assert not saver.storage


@pytest.mark.row(SECTION, "an @entrypoint's previous value", note="a fresh one for each rollout")
def test_previous(roll: Roll, chat: Any) -> None:
    model = chat()

    @entrypoint(checkpointer=InMemorySaver())
    def agent(inputs: Any, *, previous: Any = None) -> Any:
        return {"said": model.invoke(f"before: {previous}").text}

    assert roll(agent, last, runs=2).said == ["before: None"] * 2


def counts_notes(chat: Any) -> Any:
    """A node that says how many notes there are, and writes one more."""

    def agent(state: MessagesState) -> Any:
        store = get_store()
        n = len(store.search(NOTES))
        store.put(NOTES, str(n), {"text": "seen"})
        return {"messages": [chat().invoke(f"{n} then {len(store.search(NOTES))}")]}

    return agent


@pytest.mark.row(SECTION, "InMemoryStore: what a rollout writes", note="stays in the rollout: each has a copy")
def test_store(roll: Roll, chat: Any) -> None:
    store = InMemoryStore()
    assert roll(one_node(counts_notes(chat), store=store), last, runs=3).said == ["0 then 1"] * 3
    assert store.search(NOTES) == []


@pytest.mark.row(SECTION, "InMemoryStore: what it held before (a knowledge base)", note="is there in every rollout")
def test_knowledge(roll: Roll, chat: Any) -> None:
    store = InMemoryStore(index={"dims": 8, "embed": DeterministicFakeEmbedding(size=8), "fields": ["text"]})
    for name in ("tea", "milk"):
        store.put(("facts",), name, {"text": f"all of {name}", "read": 0})

    def agent(state: MessagesState) -> Any:
        found = get_store().search(("facts",), query="all of tea", limit=1)[0]
        found.value["read"] += 1  # in place: not the user's own, nor a sibling's
        return {"messages": [chat().invoke(f"{found.value['text']}, read {found.value['read']}")]}

    assert roll(one_node(agent, store=store), last, runs=3).said == ["all of tea, read 1"] * 3
    kept = store.get(("facts",), "tea")
    assert kept is not None
    assert kept.value["read"] == 0


@pytest.mark.row(SECTION, "InMemoryStore in an async node")
def test_store_in_an_async_node(roll: Roll, chat: Any) -> None:
    store = InMemoryStore()

    async def agent(state: MessagesState) -> Any:
        n = len(await get_store().asearch(NOTES))
        await get_store().aput(NOTES, str(n), {"text": "seen"})
        return {"messages": [await chat().ainvoke(str(n))]}

    assert roll(one_node(agent, store=store), last, runs=3).said == ["0"] * 3


@pytest.mark.row(
    SECTION,
    "InMemoryStore in a closure, a setup or a verifier",
    note="the rollout's own copy, the same for all of them",
)
def test_store_reached_otherwise(roll: Roll, chat: Any) -> None:
    store = InMemoryStore()
    seen: list[int] = []

    @contextmanager
    def setup(task: Any) -> Iterator[None]:
        store.put(NOTES, "setup", {"text": task.id})
        yield

    def verifier(task: Any, state: Any) -> bool:
        seen.append(len(store.search(NOTES)))
        return True

    def agent(state: MessagesState) -> Any:
        store.put(NOTES, "closure", {"text": "x"})
        get_store().put(NOTES, "runtime", {"text": "x"})
        return {"messages": [chat().invoke(str(len(store.search(NOTES))))]}

    rolled = roll(one_node(agent, store=store), last, runs=2, setup=setup, verifier=verifier)
    assert rolled.said == ["3", "3"]
    assert seen == [3, 3]
    assert store.search(NOTES) == []


class ElsewhereStore(BaseStore):
    """A store that agenttrain doesn't know, as one of a database is."""

    def __init__(self) -> None:
        self.held = InMemoryStore()
        self.n_writes = 0

    def batch(self, ops: Any) -> Any:
        self.n_writes += sum(type(op).__name__ == "PutOp" for op in ops)
        return [None] * len(list(ops))

    async def abatch(self, ops: Any) -> Any:
        return self.batch(ops)


@pytest.mark.row(
    SECTION,
    "a store outside of the process (Postgres, Redis …)",
    note="not isolated: it is the user's data. Give each rollout its own by setup=",
)
def test_other_store(roll: Roll, chat: Any) -> None:
    store = ElsewhereStore()

    def agent(state: MessagesState) -> Any:
        get_store().put(NOTES, "a", {"text": "x"})
        return {"messages": [chat().invoke("hi")]}

    roll(one_node(agent, store=store), last, runs=3)
    assert store.n_writes == 3


@pytest.mark.row(SECTION, "a tool's injected store")
def test_injected_store_is_apart(roll: Roll, chat: Any) -> None:
    from matrix.graphs import calls_tools
    from matrix.harness import call

    @tool
    def note(store: Annotated[BaseStore, InjectedStore]) -> str:
        """Write a note."""
        n = len(store.search(NOTES))
        store.put(NOTES, str(n), {"text": "x"})
        return f"{n} before"

    graph = calls_tools(chat(), note, store=InMemoryStore())
    rolled = roll(graph, lambda seen: seen.last if seen.n_tool_results else call("note"), runs=3)
    assert rolled.said[1::2] == ["0 before"] * 3


@pytest.mark.row(SECTION, "a list in a global of the module", note="not isolated, as any Python object: use setup=")
def test_python_state(roll: Roll, chat: Any) -> None:
    held: list[int] = []

    def agent(state: MessagesState) -> Any:
        held.append(1)
        return {"messages": [chat().invoke(str(len(held)))]}

    assert roll(one_node(agent), last, runs=3).said == ["1", "2", "3"]
