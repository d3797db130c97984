"""What LangGraph itself offers: each way of building a graph keeps its calls apart, whole and trained."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import MemorySaver
from langgraph.config import get_stream_writer
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.managed import RemainingSteps
from langgraph.runtime import Runtime
from langgraph.types import Command, RetryPolicy, Send, interrupt
from matrix.graphs import answer, in_a_row, one_node
from matrix.harness import Roll, Rolled, Seen, says

SECTION = "LangGraph"


def whole(rolled: Rolled, *nodes: str) -> None:
    """One trained turn in each of these nodes, in this order, and nothing left out."""
    assert rolled.places == [(node, "trained") for node in nodes]
    assert rolled.account.trained == rolled.account.sampled > 0


def whole_in_any_order(rolled: Rolled, *nodes: str) -> None:
    """The same for branches that run at once."""
    assert sorted(rolled.places) == sorted((node, "trained") for node in nodes)  # type: ignore[type-var]
    assert rolled.account.trained == rolled.account.sampled > 0


def back(seen: Seen) -> str:
    """Says what it was asked."""
    return f"to {seen.last}"


@pytest.mark.row(SECTION, "a subgraph as a node")
def test_subgraph_as_a_node(roll: Roll, chat: Any) -> None:
    model = chat()
    builder = StateGraph(MessagesState)
    builder.add_node("plan", answer(model))
    builder.add_node("team", one_node(answer(model)))
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "team")
    rolled = roll(builder.compile(), says("one", "two"))
    whole(rolled, "plan", "agent")
    assert rolled.turns[1].site.checkpoint_ns.startswith("team:")


@pytest.mark.row(SECTION, "a subgraph called in a node")
def test_subgraph_in_a_node(roll: Roll, chat: Any) -> None:
    inner = one_node(answer(chat()))

    def outer(state: MessagesState) -> Any:
        return {"messages": inner.invoke({"messages": state["messages"]})["messages"][-1:]}

    rolled = roll(in_a_row(outer), says("one"))
    whole(rolled, "agent")
    assert rolled.turns[0].site.checkpoint_ns.startswith("outer:")


@pytest.mark.row(SECTION, "subgraphs three deep")
def test_subgraphs_three_deep(roll: Roll, chat: Any) -> None:
    innermost = one_node(answer(chat()))
    middle = StateGraph(MessagesState).add_sequence([("third", innermost)]).add_edge(START, "third").compile()
    outer = StateGraph(MessagesState).add_sequence([("second", middle)]).add_edge(START, "second").compile()
    rolled = roll(outer, says("deep"))
    whole(rolled, "agent")
    around = [part.partition(":")[0] for part in rolled.turns[0].site.checkpoint_ns.split("|")]
    assert around == ["second", "third", "agent"]


class Fan(TypedDict):
    """Topics in, jokes out."""

    topics: list[str]
    jokes: Annotated[list[str], operator.add]


@pytest.mark.row(SECTION, "Send fan-out × 8")
def test_send(roll: Roll, chat: Any) -> None:
    model = chat()
    builder = StateGraph(Fan)
    builder.add_node("joke", lambda state: {"jokes": [model.invoke(state["topic"]).text]})
    builder.add_conditional_edges(START, lambda s: [Send("joke", {"topic": t}) for t in s["topics"]], ["joke"])
    rolled = roll(builder.compile(), back, input={"topics": [f"t{i}" for i in range(8)]})
    whole_in_any_order(rolled, *["joke"] * 8)
    assert sorted(rolled.said) == [f"to t{i}" for i in range(8)]
    assert len({turn.site.task_id for turn in rolled.turns}) == 8
    assert len(rolled.result.trajectories) == 8


@pytest.mark.row(SECTION, "Send of equal inputs × 4 (best of n)")
def test_send_of_equal_inputs(roll: Roll, chat: Any) -> None:
    """Equal prompts of siblings are four turns, not one call that was retried."""
    model = chat()
    builder = StateGraph(Fan)
    builder.add_node("joke", lambda state: {"jokes": [model.invoke(state["topic"]).text]})
    builder.add_conditional_edges(START, lambda s: [Send("joke", {"topic": "tea"})] * 4, ["joke"])
    rolled = roll(builder.compile(), back, input={"topics": []})
    whole_in_any_order(rolled, *["joke"] * 4)
    assert len(rolled.result.trajectories) == 4


@pytest.mark.row(SECTION, "parallel branches")
def test_parallel_branches(roll: Roll, chat: Any) -> None:
    model = chat()
    builder = StateGraph(MessagesState)
    for name in ("left", "right"):
        builder.add_node(name, answer(model))
        builder.add_edge(START, name)
        builder.add_edge(name, "join")
    builder.add_node("join", answer(model))
    rolled = roll(builder.compile(), says("a", "b", "both"))
    whole_in_any_order(rolled, "left", "right", "join")


@pytest.mark.row(SECTION, "deferred nodes")
def test_deferred(roll: Roll, chat: Any) -> None:
    """The deferred node waits for the longer branch."""
    model = chat()
    builder = StateGraph(MessagesState)
    for name in ("short", "long", "longer"):
        builder.add_node(name, answer(model))
    builder.add_node("last", answer(model), defer=True)
    builder.add_edge(START, "short")
    builder.add_edge(START, "long")
    builder.add_edge("long", "longer")
    builder.add_edge("short", "last")
    builder.add_edge("longer", "last")
    rolled = roll(builder.compile(), says("a", "b", "c", "d"))
    whole_in_any_order(rolled, "short", "long", "longer", "last")
    assert rolled.places[-1] == ("last", "trained")


@pytest.mark.row(SECTION, "conditional edges, in a loop")
def test_conditional_edges(roll: Roll, chat: Any) -> None:
    """Each turn of the loop extends the one before, so the rollout is one trajectory."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(chat()))
    builder.add_node("user", lambda state: {"messages": [HumanMessage("again")]})
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda s: END if s["messages"][-1].text == "stop" else "user")
    builder.add_edge("user", "agent")
    rolled = roll(builder.compile(), says("one", "two", "stop"))
    whole(rolled, "agent", "agent", "agent")
    assert len(rolled.result.trajectories) == 1


@pytest.mark.row(SECTION, "a model call in a conditional edge")
def test_call_in_an_edge(roll: Roll, chat: Any) -> None:
    model = chat()
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(model))
    builder.add_node("more", answer(model))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda s: model.invoke("which way?").text, ["more", END])
    rolled = roll(builder.compile(), says("one", "more", "two"))
    whole(rolled, "agent", "agent", "more")


@pytest.mark.row(SECTION, "Command(goto)")
def test_command_goto(roll: Roll, chat: Any) -> None:
    model = chat()

    def first(state: MessagesState) -> Command[Any]:
        return Command(goto="second", update={"messages": [model.invoke(state["messages"])]})

    builder = StateGraph(MessagesState)
    builder.add_node("first", first, destinations=("second",))
    builder.add_node("second", answer(model))
    builder.add_edge(START, "first")
    whole(roll(builder.compile(), says("one", "two")), "first", "second")


@pytest.mark.row(SECTION, "Command(goto, graph=Command.PARENT)")
def test_command_to_the_parent(roll: Roll, chat: Any) -> None:
    model = chat()

    def hand_over(state: MessagesState) -> Command[Any]:
        said = model.invoke(state["messages"])
        return Command(goto="closing", graph=Command.PARENT, update={"messages": [said]})

    builder = StateGraph(MessagesState)
    builder.add_node("desk", in_a_row(hand_over), destinations=("closing",))
    builder.add_node("closing", answer(model))
    builder.add_edge(START, "desk")
    whole(roll(builder.compile(), says("one", "two")), "hand_over", "closing")


@pytest.mark.row(SECTION, "@entrypoint")
def test_entrypoint(roll: Roll, chat: Any) -> None:
    model = chat()

    @entrypoint()
    def agent(inputs: dict[str, Any]) -> Any:
        return {"messages": [model.invoke(inputs["messages"])]}

    whole(roll(agent, says("one")), "agent")


@pytest.mark.row(SECTION, "@entrypoint with @task")
def test_entrypoint_with_tasks(roll: Roll, chat: Any) -> None:
    model = chat()

    @task
    def draft(text: str) -> str:
        return str(model.invoke(text).text)

    @entrypoint()
    def agent(inputs: dict[str, Any]) -> Any:
        return {"messages": [model.invoke(draft("tea").result())]}

    whole(roll(agent, back), "draft", "agent")


@pytest.mark.row(SECTION, "async @entrypoint with async @task")
def test_async_entrypoint(roll: Roll, chat: Any) -> None:
    model = chat()

    @task
    async def draft(text: str) -> str:
        return str((await model.ainvoke(text)).text)

    @entrypoint()
    async def agent(inputs: dict[str, Any]) -> Any:
        return {"messages": [await model.ainvoke(await draft("tea"))]}

    whole(roll(agent, back), "draft", "agent")


@pytest.mark.row(SECTION, "parallel @tasks")
def test_parallel_tasks(roll: Roll, chat: Any) -> None:
    model = chat()

    @task
    def draft(text: str) -> str:
        return str(model.invoke(text).text)

    @entrypoint()
    def agent(inputs: dict[str, Any]) -> Any:
        return {"drafts": [future.result() for future in [draft(name) for name in "abcd"]]}

    rolled = roll(agent, back)
    whole_in_any_order(rolled, *["draft"] * 4)
    assert sorted(rolled.said) == ["to a", "to b", "to c", "to d"]


@pytest.mark.row(SECTION, "parallel async @tasks")
def test_parallel_async_tasks(roll: Roll, chat: Any) -> None:
    model = chat()

    @task
    async def draft(text: str) -> str:
        return str((await model.ainvoke(text)).text)

    @entrypoint()
    async def agent(inputs: dict[str, Any]) -> Any:
        return {"drafts": await asyncio.gather(*(draft(name) for name in "abcd"))}

    rolled = roll(agent, back)
    whole_in_any_order(rolled, *["draft"] * 4)


def human(task: Any, interrupt: Any) -> str:
    return f"yes to {interrupt.value}"


@pytest.mark.row(SECTION, "interrupt() and resume (on_interrupt=)")
def test_interrupt(roll: Roll, chat: Any) -> None:
    """The question stands in a node of its own, so nothing is sampled twice."""

    def ask(state: MessagesState) -> Any:
        return {"messages": [HumanMessage(interrupt("Ship it?"))]}

    model = chat()
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(model))
    builder.add_node("ask", ask)
    builder.add_node("again", answer(model))
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "ask")
    builder.add_edge("ask", "again")
    rolled = roll(builder.compile(checkpointer=MemorySaver()), says("one", "two"), on_interrupt=human)
    whole(rolled, "agent", "again")
    assert "yes to Ship it?" in rolled.asked[1]


@pytest.mark.row(SECTION, "interrupt() after a call in the same node", note="sampled twice, each trained once")
def test_interrupt_after_a_call(roll: Roll, chat: Any) -> None:
    """LangGraph runs an interrupted node again from its start."""
    model = chat()

    def agent(state: MessagesState) -> Any:
        said = model.invoke(state["messages"])
        return {"messages": [said, HumanMessage(interrupt(said.text))]}

    rolled = roll(one_node(agent), says("one", "two"), on_interrupt=human)
    whole(rolled, "agent", "agent")


@pytest.mark.row(SECTION, "interrupts of parallel branches")
def test_parallel_interrupts(roll: Roll, chat: Any) -> None:
    model = chat()

    def ask(state: MessagesState) -> Any:
        return {"messages": [HumanMessage(interrupt("?"))]}

    builder = StateGraph(MessagesState)
    for name in ("left", "right"):
        builder.add_node(name, ask)
        builder.add_edge(START, name)
        builder.add_edge(name, "agent")
    builder.add_node("agent", answer(model))
    rolled = roll(builder.compile(), says("one"), on_interrupt=human)
    whole(rolled, "agent")
    assert rolled.asked[0].count("yes to ?") == 2


@pytest.mark.row(SECTION, "interrupt_before breakpoints", note="passed, nothing is asked")
def test_breakpoint(roll: Roll, chat: Any) -> None:
    builder = StateGraph(MessagesState).add_sequence([("one", answer(chat())), ("two", answer(chat()))])
    builder.add_edge(START, "one")
    graph = builder.compile(checkpointer=MemorySaver(), interrupt_before=["two"])
    whole(roll(graph, says("a", "b"), on_interrupt=human), "one", "two")


@pytest.mark.row(
    SECTION,
    "an interrupt that nobody answers",
    outcome="refused",
    note="status environment_failure: it names on_interrupt=",
)
def test_interrupt_without_a_human(roll: Roll, chat: Any) -> None:
    def agent(state: MessagesState) -> Any:
        return {"messages": [chat().invoke(state["messages"]), HumanMessage(interrupt("?"))]}

    graph = one_node(agent, checkpointer=MemorySaver())
    rolled = roll(graph, says("one"), status="environment_failure")
    assert rolled.places == [("agent", "trained")]
    assert rolled.account.trained == 0
    assert "on_interrupt" in rolled.result.rollout.cause


@pytest.mark.row(SECTION, "RetryPolicy", note="the attempt that was thrown away is not trained: superseded by a retry")
def test_retry_policy(roll: Roll, chat: Any) -> None:
    model = chat()
    failed: list[bool] = []

    def agent(state: MessagesState) -> Any:
        said = model.invoke(state["messages"])
        if not failed:
            failed.append(True)
            raise ConnectionError("the tool was down")
        return {"messages": [said]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent, retry_policy=RetryPolicy(initial_interval=0.0, jitter=False))
    builder.add_edge(START, "agent")
    rolled = roll(builder.compile(), says("first", "second"))
    assert rolled.places == [("agent", "trained")] * 2
    assert [turn.site.attempt for turn in rolled.turns] == [1, 2]
    first, second = (len(turn.response_ids) for turn in rolled.turns)
    assert rolled.account.trained == second
    assert rolled.account.dropped == {"superseded by a retry": first}


@pytest.mark.row(SECTION, "the recursion limit", note="status budget_exhausted, scored on the last state")
def test_recursion_limit(roll: Roll, chat: Any) -> None:
    """A graph that goes on for ever without a call ends at limits.turns × 8 supersteps."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(chat()))
    builder.add_node("idle", lambda state: {"messages": []})
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "idle")
    builder.add_edge("idle", "idle")
    rolled = roll(builder.compile(), says("one"), turns=3, status="budget_exhausted")
    whole(rolled, "agent")
    assert rolled.result.rollout.reward is not None


@pytest.mark.row(SECTION, "a policy that loops until limits.turns", note="status budget_exhausted")
def test_turn_limit(roll: Roll, chat: Any) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", answer(chat()))
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "agent")
    rolled = roll(builder.compile(), lambda seen: "on", turns=3, status="budget_exhausted")
    whole(rolled, "agent", "agent", "agent")


@dataclass
class Shop:
    """A runtime context."""

    name: str


@pytest.mark.row(SECTION, "context_schema, filled from the task")
def test_context_schema(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: MessagesState, runtime: Runtime[Shop]) -> Any:
        return {"messages": [model.invoke(f"You work at {runtime.context.name}")]}

    builder = StateGraph(MessagesState, context_schema=Shop)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    rolled = roll(builder.compile(), back, context={"name": "Tea & Co"})
    whole(rolled, "agent")
    assert rolled.said == ["to You work at Tea & Co"]


class Custom(TypedDict):
    """State of its own, with reducers and LangGraph's managed value."""

    messages: Annotated[list[AnyMessage], add_messages]
    n: Annotated[int, operator.add]
    remaining_steps: RemainingSteps


@pytest.mark.row(SECTION, "a state of one's own with reducers")
def test_custom_state(roll: Roll, chat: Any) -> None:
    model = chat()
    builder = StateGraph(Custom)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])], "n": 1})
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda state: "agent" if state["n"] < 3 else END, ["agent", END])
    rolled = roll(builder.compile(), says("a", "b", "c"), input={"messages": [("user", "go")], "n": 0})
    whole(rolled, "agent", "agent", "agent")


@pytest.mark.row(SECTION, "managed values (RemainingSteps)")
def test_remaining_steps(roll: Roll, chat: Any) -> None:
    """The graph ends by itself before the limit that a rollout sets: 3 turns × 8 supersteps."""
    model = chat()
    builder = StateGraph(Custom)
    builder.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])], "n": s["remaining_steps"]})
    builder.add_node("idle", lambda state: {"n": 0})
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "idle")
    builder.add_conditional_edges("idle", lambda s: END if s["remaining_steps"] < 5 else "idle", ["idle", END])
    rolled = roll(builder.compile(), says("a"), input={"messages": [("user", "go")], "n": 0}, turns=3)
    whole(rolled, "agent")


@pytest.mark.row(SECTION, "stream writer")
def test_stream_writer(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: MessagesState) -> Any:
        get_stream_writer()({"progress": 1})
        return {"messages": [model.invoke(state["messages"])]}

    whole(roll(one_node(agent), says("one")), "agent")


@pytest.mark.row(SECTION, "a history that a node edits (RemoveMessage)")
def test_removed_messages(roll: Roll, chat: Any) -> None:
    """The edited prompt begins a second trajectory, with the history at mask 0."""
    model = chat()

    def forget(state: MessagesState) -> Any:
        return {"messages": [RemoveMessage(id=state["messages"][0].id), HumanMessage("and now?")]}

    builder = StateGraph(MessagesState).add_sequence(
        [("one", answer(model)), ("forget", forget), ("two", answer(model))]
    )
    builder.add_edge(START, "one")
    rolled = roll(builder.compile(), says("a", "b"))
    whole(rolled, "one", "two")
    assert len(rolled.result.trajectories) == 2
    assert rolled.turns[1].break_cause is not None
