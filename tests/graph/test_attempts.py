"""A node that LangGraph runs again, and every call made in it, knows its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.func import task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy, interrupt

from agenttrain.graph.attempts import counted_attempts, running_nodes

Fails = Callable[[], None]


@pytest.fixture
def fails() -> Fails:
    """Raises the first time it is called."""
    left = [ConnectionError("the tool was down")]

    def once() -> None:
        if left:
            raise left.pop()

    return once


def tried_again(node: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("team", node, retry_policy=RetryPolicy(initial_interval=0.0, jitter=False))
    builder.add_edge(START, "team")
    return builder.compile()


def told(route: Any) -> list[tuple[int, tuple[int, ...]]]:
    return [(call.site.attempt, call.site.attempts) for call in route.calls]


def test_a_node_that_raised(fails: Fails, Route: Any, rollout: Any, chat: Any) -> None:
    def team(state: MessagesState) -> Any:
        said = chat().invoke("hi")
        fails()
        return {"messages": [said]}

    route = Route()
    assert rollout(tried_again(team), route).error is None
    assert told(route) == [(1, ()), (2, (2,))]
    first, again = (call.site for call in route.calls)
    assert again.retries(first)
    assert not first.retries(again)


def test_a_graph_called_in_a_node_that_raised(fails: Fails, Route: Any, rollout: Any, graph_of: Any, chat: Any) -> None:
    """The second time LangGraph counts it as the node's second graph, and its tasks have other ids."""
    inner = graph_of(lambda state: {"messages": [chat().invoke(state["messages"])]})

    def team(state: MessagesState) -> Any:
        said = inner.invoke({"messages": state["messages"]})["messages"][-1]
        fails()
        return {"messages": [said]}

    route = Route()
    assert rollout(tried_again(team), route).error is None
    assert told(route) == [(1, ()), (1, (2, 1, 1))]
    first, again = (call.site for call in route.calls)
    assert first.task_id != again.task_id
    assert again.retries(first)


def test_a_task_called_in_a_node_that_raised_in_an_event_loop(
    fails: Fails, Route: Any, rollout: Any, chat: Any
) -> None:
    @task
    async def ask(messages: Any) -> Any:
        return await chat().ainvoke(messages)

    async def team(state: MessagesState) -> Any:
        said = await ask(state["messages"])
        await asyncio.sleep(0)
        fails()
        return {"messages": [said]}

    route = Route()
    assert rollout(tried_again(team), route).error is None
    assert told(route) == [(1, ()), (1, (2, 1))]


def test_a_graph_called_twice_is_tried_once(Route: Any, rollout: Any, graph_of: Any, chat: Any) -> None:
    inner = graph_of(lambda state: {"messages": [chat().invoke(state["messages"])]})

    def team(state: MessagesState) -> Any:
        inner.invoke({"messages": [HumanMessage("a")]})
        return {"messages": inner.invoke({"messages": [HumanMessage("a")]})["messages"][-1:]}

    route = Route()
    assert rollout(tried_again(team), route).error is None
    assert told(route) == [(1, ()), (1, ())]
    first, second = (call.site for call in route.calls)
    assert not second.retries(first)


def test_a_node_that_asked_a_human_is_not_tried_again(Route: Any, rollout: Any, chat: Any) -> None:
    """It runs again from its start, and the human's answer rests on what it said before."""

    def team(state: MessagesState) -> Any:
        said = chat().invoke("hi")
        interrupt("good?")
        return {"messages": [said]}

    route = Route()
    ended = rollout(tried_again(team), route, answer=lambda asked, state: {each.id: "yes" for each in asked})
    assert (ended.error, ended.interrupted) == (None, False)
    assert told(route) == [(1, ()), (1, ())]


def test_nodes_under_way_are_known_to_every_thread() -> None:
    """By name, in whatever run of the process; nothing once they have ended."""
    seen: list[set[str]] = []

    def look(state: Any) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(running_nodes).result())
        return {}

    inner = StateGraph(MessagesState).add_node("within", look).add_edge(START, "within").compile()
    outer = StateGraph(MessagesState).add_node("around", inner).add_edge(START, "around").compile()
    assert running_nodes() == set()
    with counted_attempts() as attempts:
        outer.invoke({"messages": []}, {"callbacks": [attempts]})
        assert running_nodes() == set()
    assert seen == [{"around", "within"}]
