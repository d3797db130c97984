"""`on_interrupt=`: a graph that waits for a human is answered until it ends; real graphs, the real policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agenttrain.capture.store import SqliteStore
from agenttrain.graph.load import load_module
from agenttrain.prepare import prepare
from agenttrain.protocols import EngineContext
from agenttrain.records import RolloutRequest, RolloutResult
from agenttrain.rollout import open_runner

ASKS = """
import asyncio
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START
from langgraph.types import Send, interrupt

asked = []
"""
APART = """
def ask(state):
    return {"messages": [("user", interrupt({"question": "Ship it?", "so_far": len(state["messages"])}))]}
builder.add_node("agent", agent)
builder.add_node("ask", ask)
builder.add_node("again", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "ask")
builder.add_edge("ask", "again")
"""
HUMAN = """
def human(task, interrupt):
    asked.append((task.id, current_task().id, interrupt.value["so_far"]))
    return "yes"
"""
DECORATED = """
def said(task, state):
    return 1.0
graph = trainable({graph}, model=POLICY, tasks="tasks.jsonl", verifier=said, on_interrupt=human)
"""
COMPILED = DECORATED.format(graph="builder.compile()")


def rolled_out(project: Any, **limits: Any) -> tuple[RolloutResult, Any]:
    """One rollout of the first task, and graph.py's module."""
    job = prepare("graph.py", cwd=project.folder, flags={"limits": limits})
    engine = job.plugins.engine(job.config.engine.name)(EngineContext(config=job.config, model=str(job.model)))
    store = SqliteStore(project.folder / "rollouts")
    try:
        with open_runner(
            job.config, job.loaded, renderer=job.renderer, store=store, plugins=job.plugins, model_name="tiny"
        ) as runner:
            result = runner.run(RolloutRequest(task=job.train[0], phase="train", step=1), engine)
    finally:
        store.close()
        engine.close()
    return result, load_module(job.loaded.file)


def check_each_token_once(result: RolloutResult) -> None:
    """Every sampled id is in exactly one trained place, with the log probability that it was sampled at."""
    placed = Counter(span.turn_id for path in result.trajectories for span in path.spans)
    assert placed == {turn.id: 1 for turn in result.turns}
    by_id = {turn.id: turn for turn in result.turns}
    for path in result.trajectories:
        for span in path.spans:
            turn = by_id[span.turn_id]
            assert path.response_ids[span.start : span.end] == turn.response_ids
            assert path.response_logprobs[span.start : span.end] == turn.response_logprobs
            assert span.trained
    assert sum(sum(sample.response_mask) for sample in result.samples) == sum(
        len(turn.response_ids) for turn in result.turns
    )


@pytest.mark.parametrize("compiled", ["builder.compile()", "builder.compile(checkpointer=InMemorySaver())"])
@pytest.mark.parametrize("style", ["sync", "async human", "async node"])
def test_the_graph_goes_on_with_the_answer(new_project: Any, compiled: str, style: str) -> None:
    """With a checkpointer of its own or none; the conversation goes on exactly, and is trained as one."""
    body = APART + (HUMAN.replace("def human", "async def human") if style == "async human" else HUMAN)
    if style == "async node":
        body = body.replace("def ask", "async def ask")
    project = new_project(ASKS + body, decorated=DECORATED.format(graph=compiled))
    result, module = rolled_out(project)
    assert module.asked == [("task-0", "task-0", 2)]
    assert result.rollout.status in ("completed", "truncated")
    assert [turn.site.node for turn in result.turns] == ["agent", "again"]
    assert result.turns[1].extends == result.turns[0].id
    assert len(result.trajectories) == 1
    check_each_token_once(result)


def test_a_call_in_an_interrupted_node_is_sampled_again_and_trained_once_each(new_project: Any) -> None:
    """The node runs again from its start: another turn, with another seed, and a place of its own."""
    body = """
def node(state):
    said = model.invoke(state["messages"])
    return {"messages": [said, ("user", interrupt({"so_far": said.text}))]}
builder.add_node("agent", node)
builder.add_node("again", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "again")
"""
    project = new_project(ASKS + body + HUMAN, decorated=COMPILED)
    result, _ = rolled_out(project)
    first, second, third = result.turns
    assert [turn.site.node for turn in result.turns] == ["agent", "agent", "again"]
    assert first.prompt_ids == second.prompt_ids
    assert first.sampling.seed != second.sampling.seed  # type: ignore[union-attr]
    assert third.extends == second.id
    paths = [[span.turn_id for span in path.spans] for path in result.trajectories]
    assert sorted(paths) == [[first.id], [second.id, third.id]]
    check_each_token_once(result)


def test_parallel_and_repeated_interrupts_each_get_their_own_answer(new_project: Any) -> None:
    """By their ids: two Send siblings wait at once, and each asks twice, one question after the other."""
    body = """
def fan_out(state):
    return [Send("ask", {"messages": [("user", name)]}) for name in ("ann", "bob")]
def ask(state):
    name = state["messages"][0][1]
    first, second = interrupt((name, 1)), interrupt((name, 2))
    return {"messages": [("user", f"{first} {second}")]}
builder.add_node("agent", agent)
builder.add_node("ask", ask)
builder.set_entry_point("agent")
builder.add_conditional_edges("agent", fan_out, ["ask"])

def human(interrupt, state, context):
    asked.append((tuple(interrupt.value), len(state["messages"]), context))
    return f"{interrupt.value[0]}{interrupt.value[1]}"
"""
    project = new_project(ASKS + body, decorated=COMPILED.replace("return 1.0", "return asked.append(state) or 1.0"))
    _, module = rolled_out(project)
    *asked, state = module.asked
    assert sorted(asked) == [((name, time), 2, None) for name in ("ann", "bob") for time in (1, 2)]
    assert [message.text for message in state["messages"][2:]] == ["ann1 ann2", "bob1 bob2"]


def test_an_interrupt_in_a_subgraph_a_breakpoint_and_middleware(new_project: Any) -> None:
    """LangChain's human in the loop, a nested graph, and interrupt_before, which asks nothing."""
    body = """
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage

@tool
def refund(order: int) -> str:
    "Refund an order."
    return f"refunded {order}"

def wants(state):
    return {"messages": [AIMessage("", tool_calls=[{"name": "refund", "args": {"order": 7}, "id": "c"}])]}

class Wants(HumanInTheLoopMiddleware):
    def before_model(self, state, runtime):
        return {**wants(state), "jump_to": "tools"} if len(state["messages"]) == 1 else None

hitl = HumanInTheLoopMiddleware(interrupt_on={"refund": True})
inner = StateGraph(MessagesState)
inner.add_node("wants", wants)
inner.add_node("review", lambda state: hitl.after_model(state, None))
inner.set_entry_point("wants")
inner.add_edge("wants", "review")
builder.add_node("desk", inner.compile())
builder.add_node("agent", agent)
builder.set_entry_point("desk")
builder.add_edge("desk", "agent")

def human(task, question):
    asked.append(question.value["action_requests"][0]["args"])
    return {"decisions": [{"type": "approve"}]}
"""
    decorated = DECORATED.format(graph="builder.compile(interrupt_before=['agent'])")
    project = new_project(ASKS + body, decorated=decorated)
    result, module = rolled_out(project)
    assert module.asked == [{"order": 7}]
    assert [turn.site.node for turn in result.turns] == ["agent"]


@pytest.mark.parametrize(
    ("then", "status", "told"),
    [
        (
            "raise KeyError('desk')",
            "environment_failure",
            "WorldError: on_interrupt=human raised KeyError on task 'task-0': 'desk' at graph.py:{line} (human)",
        ),
        (
            "raise PolicyFailure('asked too much')",
            "policy_failure",
            "PolicyFailure: asked too much at graph.py:{line} (human) (after 1 turn)",
        ),
        ("raise SystemExit(2)", "environment_failure", "WorldError: on_interrupt=human raised SystemExit on task"),
    ],
)
@pytest.mark.parametrize("define", ["def human", "async def human"])
def test_a_human_who_raises(new_project: Any, define: str, then: str, status: str, told: str) -> None:
    """It is told as on_interrupt's own; PolicyFailure is the policy's."""
    human = HUMAN.replace("def human", define).replace('return "yes"', then)
    project = new_project(ASKS + APART + human, decorated=COMPILED)
    result, _ = rolled_out(project)
    assert result.rollout.status == status
    assert result.rollout.cause.startswith(told.format(line=project.line_of(then)))
    assert [turn.site.node for turn in result.turns] == ["agent"]


@pytest.mark.parametrize(
    ("graph", "limits", "told"),
    [
        ("builder.compile()", {"turns": 2}, "interrupts: the graph was interrupted more than 16 times"),
        ("builder.compile(interrupt_before=['ask'])", {"turns": 2}, "interrupts: the graph was interrupted more than"),
        ("builder.compile()", {"seconds": 0.05}, "seconds: 0.05 seconds are over"),
    ],
)
def test_a_graph_that_is_interrupted_for_ever_runs_out_of_budget(
    new_project: Any, graph: str, limits: dict[str, Any], told: str
) -> None:
    """It ends as budget_exhausted with what it had, and is scored."""
    body = """
def ask(state):
    interrupt({"so_far": 0})
    return {"messages": []}
builder.add_node("ask", ask)
builder.add_edge(START, "ask")
builder.add_edge("ask", "ask")
"""
    human = HUMAN.replace('return "yes"', "time.sleep(0.01)")
    project = new_project(ASKS + body + human, decorated=DECORATED.format(graph=graph))
    result, _ = rolled_out(project, **limits)
    assert result.rollout.status == "budget_exhausted"
    assert result.rollout.cause.startswith(told)
    assert result.rollout.reward is not None


def test_the_human_may_ask_a_model_of_its_own_and_see_the_world(new_project: Any) -> None:
    """A simulated person: its model answers itself, and what setup gave is at hand."""
    human = """
from contextlib import asynccontextmanager
from langchain_core.language_models.fake_chat_models import FakeListChatModel
person = FakeListChatModel(responses=["yes, please"])

@asynccontextmanager
async def shop(task):
    yield {"context": {"loop": asyncio.get_running_loop()}}

async def human(task, interrupt, context):
    asked.append(context["loop"] is asyncio.get_running_loop())
    return (await person.ainvoke("Ship it?")).text
"""
    decorated = COMPILED.replace("on_interrupt=human", "on_interrupt=human, setup=shop")
    decorated = decorated.replace("return 1.0", "return state['messages'][2].text == 'yes, please'")
    result, module = rolled_out(new_project(ASKS + APART + human, decorated=decorated))
    assert module.asked == [True]
    assert result.rollout.reward.score == 1.0  # type: ignore[union-attr]
    assert {turn.role for turn in result.turns} == {"trained"}


@pytest.mark.parametrize("compiled", ["builder.compile(checkpointer=InMemorySaver())", "builder.compile()"])
@pytest.mark.parametrize("asks", [True, False], ids=["interrupt", "breakpoint"])
def test_without_one_the_graph_waits_in_vain(new_project: Any, compiled: str, asks: bool) -> None:
    """The environment's failure, which says what to add; what only looks done at a breakpoint is not scored."""
    if not asks:
        compiled = compiled.replace("compile(", "compile(interrupt_before=['ask'], ")
    body = """
def ask(state):
    return {"messages": [("user", interrupt("Ship it?"))]}
builder.add_node("ask", ask)
builder.set_entry_point("ask")
"""
    decorated = DECORATED.format(graph=compiled).replace(", on_interrupt=human", "")
    result, _ = rolled_out(new_project(ASKS + body, decorated=decorated))
    assert (result.rollout.status, result.rollout.cause) == (
        "environment_failure",
        "the graph waits for a human, and nothing answers for one: add on_interrupt= to @trainable (after 0 turns)",
    )


def test_one_with_arguments_that_nothing_fills_is_refused_at_start(new_project: Any, command: Any) -> None:
    """Not when the first graph waits."""
    new_project(ASKS + APART + "def human(question): return 1\n", decorated=COMPILED)
    done = command("fit", "graph.py", "--dry-run")
    assert (done.code, done.err) == (
        2,
        "GraphError: on_interrupt=human asks for 'question', which nothing fills. It may ask for any of task, "
        "interrupt, state, context, or take task and interrupt under other names.\n",
    )
