"""A key is the same wherever it is one and the same doing, and different for two."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy, Send, interrupt
from pydantic import BaseModel

import agenttrain
from agenttrain.graph.effects import effects_of, open_effects
from agenttrain.graph.idempotency import CountedCalls, canonical, idempotency_key
from agenttrain.graph.run import run_graph
from agenttrain.graph.runnable import opened
from agenttrain.records import RolloutRequest, Task

REQUEST = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
RETRY = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False, retry_on=ConnectionError)


class Service:
    """Takes payments, and counts those of each key; fails after the first so many."""

    def __init__(self, fail_after: int = 0) -> None:
        self.writes = Counter[str]()
        self.left = fail_after

    def pay(self, what: str = "") -> str:
        self.writes[idempotency_key()] += 1
        if self.left:
            self.left -= 1
            raise ConnectionError("the answer was lost")
        return what

    @property
    def counts(self) -> list[int]:
        return sorted(self.writes.values())


def pays(service: Service) -> Any:
    @tool
    def refund(order: str) -> str:
        """Refund an order."""
        return service.pay(order)

    return refund


class State(TypedDict):
    done: Annotated[list[str], operator.add]


def builder_of(*nodes: Callable[[Any], Any], retry: RetryPolicy | None = RETRY) -> StateGraph[Any]:
    """One node after the other."""
    builder = StateGraph(State)
    for node in nodes:
        builder.add_node(node.__name__, node, retry_policy=retry)
    for one, after in zip([START, *(n.__name__ for n in nodes)], [n.__name__ for n in nodes], strict=False):
        builder.add_edge(one, after)
    return builder


def roll(graph: Any, *, request: RolloutRequest = REQUEST, run_id: str = "run", input: Any = None, **how: Any) -> Any:
    """The graph in one rollout; gives its last state."""

    def explain(error: BaseException) -> Any:
        raise error

    with (
        opened(graph, name="graph", explain=explain) as runnable,
        open_effects({}),
        effects_of(request, {}, run_id=run_id),
    ):
        ending = run_graph(
            runnable, input=input or {"done": []}, route=None, recursion_limit=50, thread_id=request.rollout_id, **how
        )
    assert ending.error is None, ending.error
    return ending.state


def test_a_node_that_is_tried_again() -> None:
    """Its calls are those of the first attempt, in their order; equal ones are told apart."""
    service = Service()
    refund, tries = pays(service), Counter[str]()

    def desk(state: Any) -> Any:
        for order in ("A1", "A1", "A2"):
            refund.invoke({"order": order})
            tries[order] += 1
            if tries.total() in (1, 4):
                raise ConnectionError
        return {"done": ["desk"]}

    roll(builder_of(desk))
    assert tries == {"A1": 5, "A2": 2}
    assert service.counts == [2, 2, 3]


def test_calls_in_a_loop_are_calls_of_their_own() -> None:
    """Equal arguments in two turns are two payments."""
    service = Service()
    refund = pays(service)

    def desk(state: Any) -> Any:
        return {"done": [refund.invoke({"order": "A1"})]}

    def again(state: Any) -> Any:
        return desk(state)

    roll(builder_of(desk, again))
    assert service.counts == [1, 1]


def tool_calls(*ids: str) -> Any:
    calls = [{"name": "refund", "args": {"order": "A1"}, "id": id, "type": "tool_call"} for id in ids]
    return {"messages": [AIMessage("", tool_calls=calls)]}


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_tool_node_that_is_tried_again(lost: int) -> None:
    """Two parallel calls with equal arguments stay two, whichever came first."""
    service = Service(fail_after=lost)
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([pays(service)]), retry_policy=RetryPolicy(
        max_attempts=5, initial_interval=0.001, jitter=False, retry_on=ConnectionError))  # fmt: skip
    builder.add_edge(START, "tools")
    state = roll(builder.compile(), input=tool_calls("c1", "c2"))
    assert [message.content for message in state["messages"][1:]] == ["A1", "A1"]
    assert len(service.writes) == 2


def test_a_tool_that_is_called_again_by_its_own_id() -> None:
    """As middleware does; another id in the same node is another call, and so is the same id in another node."""
    service = Service()
    refund = pays(service)

    def desk(state: Any) -> Any:
        for id in ("c1", "c1", "c2", "c1"):
            refund.invoke({"type": "tool_call", "id": id, "name": "refund", "args": {"order": "A1"}})
        return {}

    def later(state: Any) -> Any:
        return desk(state)

    roll(builder_of(desk, later))
    assert service.counts == [1, 1, 3, 3]


def test_ids_that_are_sampled_anew_in_a_node_that_is_tried_again() -> None:
    """A node that asks the model and runs its tool: the second answer has another id."""
    service = Service(fail_after=2)
    refund, ids = pays(service), iter(["c1", "c2", "c3"])

    def agent(state: Any) -> Any:
        refund.invoke({"type": "tool_call", "id": next(ids), "name": "refund", "args": {"order": "A1"}})
        return {}

    roll(builder_of(agent))
    assert service.counts == [3]


def test_a_graph_within_a_node_that_is_tried_again() -> None:
    """Its nodes are new executions to LangGraph, and the same doing."""
    service = Service()
    refund, left = pays(service), [ConnectionError()]

    def pay(state: Any) -> Any:
        return {"done": [refund.invoke({"order": "A1"})]}

    def break_once(state: Any) -> Any:
        if left:
            raise left.pop()
        return {}

    team = builder_of(pay, break_once, retry=None).compile()

    def whole(state: Any) -> Any:
        return team.invoke({"done": []})

    roll(builder_of(whole))
    assert service.counts == [2]


def test_a_node_that_asks_a_human() -> None:
    """It runs again from its start when it is answered."""
    service, refund_at_once = Service(), Service()
    refund, other = pays(service), pays(refund_at_once)

    def desk(state: Any) -> Any:
        refund.invoke({"order": "A1"})
        refund_at_once.pay()
        interrupt("really?")
        other.invoke({"order": "A1"})
        return {}

    roll(builder_of(desk), answer=lambda interrupts, state: {each.id: "yes" for each in interrupts})
    assert service.counts == [2]
    assert refund_at_once.counts == [1, 2]


def keys_of(**how: Any) -> list[str]:
    """Of two calls of a tool and of a node, in a rollout of its own."""
    service = Service()
    refund = pays(service)

    def desk(state: Any) -> Any:
        refund.invoke({"order": "A1"})
        refund.invoke({"order": "A1"})
        return {"done": [service.pay()]}

    roll(builder_of(desk), **how)
    assert service.counts == [1, 1, 1]
    return list(service.writes)


def test_what_a_key_is_made_of() -> None:
    """Lives, attempts and remakes of one rollout have the same; others have others."""
    first = keys_of()
    assert all(len(key) == len("agenttrain-") + 40 for key in first)
    for same in ({"attempt": 2}, {"life": 1}, {"remake": 3}, {"seed": 5}, {"temperature": 0.5}):
        assert keys_of(request=replace(REQUEST, **same)) == first
    others: list[dict[str, Any]] = [
        {"phase": "baseline"}, {"step": 2}, {"sibling": 1}, {"task": Task(id="u", input={})},
    ]  # fmt: skip
    found = [keys_of(request=replace(REQUEST, **each)) for each in others] + [keys_of(run_id="other"), first]
    assert len({key for keys in found for key in keys}) == 6 * 3


def test_nodes_have_keys_of_their_own() -> None:
    """Of siblings, of a loop, of graphs within; the same in each life, and when a node is tried again."""

    def life(lost: int) -> tuple[Any, Service]:
        service, found = Service(fail_after=lost), dict[str, str]()

        def note(what: str) -> None:
            service.pay()
            found[what] = idempotency_key()

        def worker(state: Any) -> Any:
            note(f"worker {state['n']}")
            return team.invoke({"n": state["n"], "done": []})

        def deep(state: Any) -> Any:
            note(f"deep {state['n']}")
            return {"done": ["x"]}

        class Numbered(State):
            n: int

        inner = StateGraph(Numbered)
        inner.add_node("deep", deep, retry_policy=RETRY).add_edge(START, "deep")
        team = inner.compile()
        outer = StateGraph(State)
        outer.add_node("worker", worker, retry_policy=RETRY)
        outer.add_conditional_edges(
            START, lambda s: [Send("worker", {"n": n, "done": []}) for n in range(3)], ["worker"]
        )
        roll(outer.compile())
        return found, service

    (first, calm), (second, stormy) = life(0), life(1)
    assert first == second
    assert sorted(first) == ["deep 0", "deep 1", "deep 2", "worker 0", "worker 1", "worker 2"]
    assert calm.counts == [1] * 6
    assert len(stormy.writes) == 6


def test_a_node_of_a_graph_that_a_tool_runs() -> None:
    """Its key is its own, not the tool's."""
    keys: list[str] = []

    def inner(state: Any) -> Any:
        keys.append(idempotency_key())
        return {}

    team = builder_of(inner).compile()

    @tool
    def delegate() -> str:
        """Let the team work."""
        keys.append(idempotency_key())
        team.invoke({"done": []})
        return "ok"

    def desk(state: Any) -> Any:
        delegate.invoke({})
        keys.append(idempotency_key())
        return {}

    roll(builder_of(desk))
    assert len(set(keys)) == 3


# Where no rollout is made


def served_keys(
    refund_of: Callable[[list[str]], Any], thread_id: str, ids: tuple[str, ...], is_async: bool
) -> list[str]:
    keys: list[str] = []
    graph = StateGraph(MessagesState).add_node("tools", ToolNode([refund_of(keys)])).add_edge(START, "tools")
    compiled, config = graph.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": thread_id}}
    state = tool_calls(*ids)
    if is_async:
        asyncio.run(compiled.ainvoke(state, config))
        return sorted(keys)
    compiled.invoke(state, config)
    before = next(each for each in compiled.get_state_history(config) if each.next == ("tools",))
    compiled.invoke(None, before.config)
    assert sorted(keys[: len(ids)]) == sorted(keys[len(ids) :])
    return sorted(keys[: len(ids)])


def asks(keys: list[str]) -> Any:
    @tool
    def refund(order: str) -> str:
        """Refund an order."""
        keys.append(agenttrain.idempotency_key())
        return order

    return refund


def asks_with_id(keys: list[str]) -> Any:
    @tool
    async def refund(order: str, call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Refund an order."""
        keys.append(agenttrain.idempotency_key(call_id))
        return order

    return refund


def test_served_a_key_goes_by_thread_and_call() -> None:
    """LangGraph's replay of a thread has the same; sync and async tools alike."""
    first = served_keys(asks, "7", ("c1", "c2"), is_async=False)
    assert len(set(first)) == 2
    assert served_keys(asks, "7", ("c1", "c2"), is_async=True) == first
    assert served_keys(asks_with_id, "7", ("c1", "c2"), is_async=True) == first
    assert not set(served_keys(asks, "8", ("c1", "c2"), is_async=False)) & set(first)


def asks_async(keys: list[str]) -> Any:
    @tool
    async def refund(order: str) -> str:
        """Refund an order."""
        keys.append(agenttrain.idempotency_key())
        return order

    return refund


def test_served_an_async_tool_needs_its_id_unless_agenttrain_serves() -> None:
    """A key that can't tell two payments apart is no key."""
    with pytest.raises(LookupError, match=r"Annotated\[str, InjectedToolCallId\]"):
        served_keys(asks_async, "7", ("c1",), is_async=True)
    with open_effects({}):
        assert served_keys(asks_async, "7", ("c1",), True) == served_keys(asks, "7", ("c1",), False)


def test_served_a_tool_that_the_graphs_code_calls_has_no_key() -> None:
    """Without an id, two calls of one node would be one."""
    keys: list[str] = []

    def desk(state: Any) -> Any:
        return {"done": [asks(keys).invoke({"order": "A1"})]}

    for _ in range(2):
        with pytest.raises(LookupError, match="has no id here"):
            builder_of(desk).compile().invoke({"done": []})
    with open_effects({}), pytest.raises(LookupError, match="has no id here"):
        builder_of(desk).compile().invoke({"done": []})


def test_served_a_node_has_a_key() -> None:
    """Of its thread and its execution, which goes on with the thread after an error."""
    keys: list[str] = []

    def desk(state: Any) -> Any:
        keys.append(idempotency_key())
        return {}

    def later(state: Any) -> Any:
        keys.append(idempotency_key())
        if len(keys) == 2:
            raise TimeoutError
        return {}

    graph = builder_of(desk, later).compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "7"}}
    with pytest.raises(TimeoutError):
        graph.invoke({"done": []}, config)
    graph.invoke(None, config)
    assert len(keys) == 3
    assert keys[0] != keys[1] == keys[2]


def test_nowhere_there_is_none() -> None:
    with pytest.raises(LookupError, match="No tool and no node runs here"):
        idempotency_key()
    with effects_of(REQUEST, {}, run_id="run"), pytest.raises(LookupError, match="No tool and no node runs here"):
        idempotency_key()


def test_arguments_as_text() -> None:
    """The same in every process: no address, no order of a set."""

    class Order(BaseModel):
        id: str

    class Bare:
        pass

    given = {"b": {3, 1, 2}, "a": Decimal("2.50"), "d": date(2026, 1, 2), "o": Order(id="x"), "z": Bare()}
    expected = '{"a":"2.50","b":[1,2,3],"d":"2026-01-02","o":{"id":"x"},"z":"'
    assert canonical(given).startswith(expected)
    assert canonical(given) == canonical({**given, "z": Bare()})
    assert canonical("é") == '"é"'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": "\ud800"}, '{"a":"\ud800"}'),
        ({"a": 10**5000}, "dict"),
        ({"a": {1: 2, "b": 3}}, "dict"),
    ],
)
def test_whatever_a_model_writes_its_call_has_a_key(given: Any, expected: str) -> None:
    """Half of a character, a number too long to be written down, keys that have no order."""
    assert canonical(given) == expected
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    key = CountedCalls(request, run_id="r").key_of("refund", canonical(given), None)
    assert len(key) == len("agenttrain-") + 40
