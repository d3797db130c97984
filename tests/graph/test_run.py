"""Running an opened graph once."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import CachePolicy, interrupt
from pydantic import BaseModel

from agenttrain.errors import RolloutStop
from agenttrain.graph.intercept import open_gate
from agenttrain.graph.models import nodes_of
from agenttrain.graph.run import rollout_loop, run_graph


def counting(state: Any) -> Any:
    return {"messages": [AIMessage(str(len(state["messages"])))]}


def test_the_recursion_limit_keeps_the_last_state(rollout: Any, Route: Any) -> None:
    """A loop ends with what it had streamed."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", counting)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "agent")
    ending = rollout(builder.compile(), Route(), recursion_limit=3)
    assert (ending.recursion, ending.interrupted) == (True, False)
    assert [m.text for m in ending.state["messages"]] == ["hi", "1", "2", "3"]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_keeps_the_last_state(is_async: bool, rollout: Any, Route: Any) -> None:
    """What the graph raises is given, not raised, by thread or by event loop."""

    def broken(state: Any) -> Any:
        raise ConnectionError("db down")

    async def abroken(state: Any) -> Any:
        raise ConnectionError("db down")

    builder = StateGraph(MessagesState)
    builder.add_node("first", counting)
    builder.add_node("second", abroken if is_async else broken)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    ending = rollout(builder.compile(), Route())
    assert type(ending.error) is ConnectionError
    assert (ending.recursion, ending.unreadable_answer) == (False, False)
    assert [m.text for m in ending.state["messages"]] == ["hi", "1"]


def test_the_users_wish_to_stop_passes(graph_of: Any, rollout: Any, Route: Any) -> None:
    """Ctrl-C is not an ending of the graph."""

    def node(state: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(graph_of(node), Route())


def test_exit_in_a_tool_ends_its_graph_only(graph_of: Any, rollout: Any, Route: Any) -> None:
    """A command line parsed inside of a tool calls exit(2) on bad arguments: no reason to end the whole run."""

    def node(state: Any) -> Any:
        raise SystemExit(2)

    assert type(rollout(graph_of(node), Route()).error) is SystemExit


def test_context_callbacks_and_configurable_reach_the_graph(graph_of: Any, rollout: Any, Route: Any) -> None:
    """As LangGraph's own arguments do."""
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

    seen: dict[str, Any] = {}

    def node(state: Any) -> Any:
        seen.update(context=get_runtime().context, configurable=get_config()["configurable"])
        return {"messages": []}

    rollout(graph_of(node), Route(), context={"user": "u"}, configurable={"world": 1}, thread_id="t9")
    assert seen["context"] == {"user": "u"}
    assert (seen["configurable"]["world"], seen["configurable"]["thread_id"]) == (1, "t9")


def test_without_a_route_the_users_own_models_answer(graph_of: Any, rollout: Any, chat: Any) -> None:
    """An evaluation of the graph as it is passes an open gate."""
    graph = graph_of(lambda state: {"messages": [chat(max_retries=0).invoke("x")]})
    assert "Connection" in type(rollout(graph, None).error).__name__


# Sync and async


def test_what_needs_an_event_loop_is_found(graph_of: Any, open_graph: Any, chat: Any) -> None:
    """Async nodes, branches, tools, tasks, middleware and subgraphs; sync ones need none."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.tools import tool
    from langgraph.func import entrypoint

    async def anode(state: Any) -> Any:
        return {"messages": []}

    async def apath(state: Any) -> str:
        return END

    @tool
    async def atool(x: str) -> str:
        """Async only."""
        return x

    class AsyncWrap(AgentMiddleware):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request)

    class BothWraps(AsyncWrap):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request)

    @entrypoint()
    async def aflow(x: str) -> str:
        return x

    branched = StateGraph(MessagesState)
    branched.add_node("agent", counting)
    branched.add_edge(START, "agent")
    branched.add_conditional_edges("agent", apath, [END])
    nested = StateGraph(MessagesState)
    nested.add_node("inner", graph_of(anode))
    nested.add_edge(START, "inner")

    cases = {
        "sync": (graph_of(counting), False),
        "async node": (graph_of(anode), True),
        "async branch": (branched.compile(), True),
        "nested": (nested.compile(), True),
        "async tool": (graph_of(ToolNode([atool])), True),
        "agent": (create_agent(chat(), tools=[]), False),
        "agent with async tool": (create_agent(chat(), tools=[atool]), True),
        "agent with async wrap": (create_agent(chat(), middleware=[AsyncWrap()]), True),
        "agent with both wraps": (create_agent(chat(), middleware=[BothWraps()]), False),
        "async entrypoint": (aflow, True),
    }
    found = {}
    for name, (graph, _) in cases.items():
        with open_graph(graph) as runnable:
            found[name] = runnable.async_only
    assert found == {name: expected for name, (_, expected) in cases.items()}


def test_sync_nodes_under_a_loop_have_threads_of_their_own(rollout: Any, Route: Any) -> None:
    """Twelve blocking siblings wait together, though asyncio's own executor has n_cpu + 4 threads."""
    barrier = threading.Barrier(12, timeout=10)

    async def first(state: Any) -> Any:
        return {"messages": []}

    def sibling(state: Any) -> Any:
        barrier.wait()
        return {"messages": []}

    builder = StateGraph(MessagesState)
    builder.add_node("first", first)
    builder.add_edge(START, "first")
    for i in range(12):
        builder.add_node(f"s{i}", sibling)
        builder.add_edge("first", f"s{i}")
    with rollout_loop() as loop:
        assert rollout(builder.compile(), Route(), loop=loop).error is None


def test_a_blocking_call_in_an_async_node_is_answered(graph_of: Any, chat: Any, rollout: Any, Route: Any) -> None:
    """`model.invoke` on the loop's own thread, and a sync node beside it."""

    async def node(state: Any) -> Any:
        return {"messages": [chat().invoke("x"), await chat().ainvoke("x")]}

    route = Route()
    assert rollout(graph_of(node), route).error is None
    assert len(route.calls) == 2


def test_tasks_left_running_end_with_the_rollout(graph_of: Any, rollout: Any, Route: Any) -> None:
    """They can't call on into the next rollout of that loop."""
    left: list[asyncio.Task[Any]] = []

    async def node(state: Any) -> Any:
        left.append(asyncio.get_running_loop().create_task(asyncio.sleep(60)))
        return {"messages": []}

    with rollout_loop() as loop:
        assert rollout(graph_of(node), Route(), loop=loop).error is None
        assert left[0].cancelled()


# What must not leak from rollout to rollout


def test_node_caches_are_bypassed_nested_ones_too(rollout: Any, open_graph: Any, Route: Any) -> None:
    """Two rollouts of one task may differ; the user's graph keeps its cache."""
    numbers = itertools.count()

    def inner_graph() -> Any:
        builder = StateGraph(MessagesState)
        builder.add_node("n", lambda s: {"messages": [AIMessage(str(next(numbers)))]}, cache_policy=CachePolicy())
        builder.add_edge(START, "n")
        return builder.compile(cache=InMemoryCache())

    outer = StateGraph(MessagesState)
    outer.add_node("inner", inner_graph())
    outer.add_edge(START, "inner")
    for graph in (inner_graph(), outer.compile()):
        with open_graph(graph) as runnable:
            asked = {"messages": [HumanMessage("hi", id="1")]}
            said = [rollout(runnable, Route(), asked).state["messages"][-1].text for _ in range(2)]
        assert said[0] != said[1]
    assert inner_graph().cache is not None


def test_a_checkpointer_is_fresh_for_each_rollout(graph_of: Any, rollout: Any, open_graph: Any, Route: Any) -> None:
    """The same thread id doesn't leak, and the user's own checkpointer stays empty."""
    saver = InMemorySaver()
    graph = graph_of(counting, checkpointer=saver)
    with open_graph(graph) as runnable:
        said = [rollout(runnable, Route()).state["messages"][-1].text for _ in range(2)]
        assert runnable.keeps_checkpoints
    assert said == ["1", "1"]
    assert not saver.storage
    assert graph.checkpointer is saver


def test_an_interrupt_that_nobody_answers_ends_the_run(graph_of: Any, rollout: Any, Route: Any) -> None:
    """What was asked is told, and the state as it stood."""

    def node(state: Any) -> Any:
        return {"messages": [("user", interrupt("ok?"))]}

    waiting = rollout(graph_of(node, checkpointer=InMemorySaver()), Route())
    assert (waiting.interrupted, [i.value for i in waiting.interrupts]) == (True, ["ok?"])
    assert [m.text for m in waiting.state["messages"]] == ["hi"]


def test_concurrent_rollouts_of_one_graph_stay_apart(chat: Any, graph_of: Any, open_graph: Any, Route: Any) -> None:
    """Sixteen threads, one opened graph."""
    model = chat()
    graph = graph_of(lambda state: {"messages": [model.invoke(state["messages"])]})
    said: dict[int, str] = {}

    def one(i: int, runnable: Any) -> None:
        route = Route(lambda call: (time.sleep(0.01), f"policy {i}")[1])
        ending = run_graph(
            runnable, input={"messages": [("user", "x")]}, route=route, recursion_limit=5, thread_id=str(i)
        )
        said[i] = ending.state["messages"][-1].text

    with open_gate(), open_graph(graph) as runnable:
        threads = [threading.Thread(target=one, args=(i, runnable)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == {i: f"policy {i}" for i in range(16)}


# Answers that don't fit


class Answer(BaseModel):
    """An answer."""

    value: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("text", ["not json", '{"value": "x"}'])
def test_an_answer_of_the_wrong_form_is_the_policys(
    method: str, text: str, chat: Any, graph_of: Any, rollout: Any, Route: Any
) -> None:
    """An error of the parser says so, unless the graph got None and went on."""
    model = chat().with_structured_output(Answer, method=method)

    def node(state: Any) -> Any:
        model.invoke("x")
        return {"messages": []}

    ending = rollout(graph_of(node), Route(lambda call: text))
    assert ending.unreadable_answer == (method != "function_calling")


def test_an_agents_wrong_structured_answer_is_the_policys(chat: Any, rollout: Any, Route: Any) -> None:
    """langchain.agents' own error for it."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy

    agent = create_agent(chat(), tools=[], response_format=ProviderStrategy(Answer))
    assert rollout(agent, Route(lambda call: "not json")).unreadable_answer


def test_a_stop_is_no_wrong_answer(graph_of: Any, chat: Any, rollout: Any, Route: Any) -> None:
    """Only errors of reading are."""
    graph = graph_of(lambda state: {"messages": [chat().invoke("x")]})
    ending = rollout(graph, Route(lambda call: RolloutStop("budget")))
    assert (type(ending.error), ending.unreadable_answer) == (RolloutStop, False)


# What is known of a graph


def test_schemas_and_nodes_are_told(graph_of: Any, open_graph: Any) -> None:
    """So that tasks can be held against them before anything runs."""
    with open_graph(graph_of(counting)) as runnable:
        schema = runnable.input_schema()
        assert schema is not None
        assert "messages" in schema["properties"]
        assert runnable.context_schema() is None
        assert nodes_of(runnable) == ["agent"]
        assert not runnable.keeps_checkpoints
