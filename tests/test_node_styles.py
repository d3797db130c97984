"""`current_task()`, `limits=` and `verifiers=` hold in every style of node; real graphs, the real policy."""

from __future__ import annotations

from typing import Any

import pytest

NOTES = """
import asyncio
from typing import Any
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.func import entrypoint, task as graph_task
from langgraph.graph import END, START
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

seen = []

def note(where):
    seen.append((where, current_task().id))

def right(state):
    note("verifier")
    return 1.0

async def async_right(task):
    await asyncio.sleep(0)
    note("async verifier")
    return 0.5
"""
DECORATED = """
graph = trainable({target}, model=POLICY, tasks="tasks.jsonl",
    verifiers={{"right": (right, 1.0), "async_right": (async_right, 0.2)}}, limits=Limits({limits}))
"""
SYNC = """
@tool
def look(x: int) -> str:
    "Look."
    note("tool")
    return "seen"

def call(state):
    note("node")
    with ContextThreadPoolExecutor() as pool:
        list(pool.map(note, ["pool"] * 2))
    noting = RunnableLambda(lambda _: note("parallel"))
    RunnableParallel(a=noting, b=noting).invoke(1)
    RunnableLambda(note).batch(["batch"] * 2)
    calls = [{"name": "look", "args": {"x": i}, "id": str(i)} for i in range(2)]
    return {"messages": [AIMessage("", tool_calls=calls)]}

def sibling(state):
    note("sibling")
    return {}

inner = StateGraph(MessagesState)
inner.add_node("deep", lambda state: note("subgraph"))
inner.set_entry_point("deep")

builder.add_node("call", call)
builder.add_node("tools", ToolNode([look]))
builder.add_node("sub", inner.compile())
builder.add_node("sibling", sibling)
builder.add_node("agent", agent)
builder.set_entry_point("call")
builder.add_edge("call", "tools")
builder.add_edge("tools", "sub")
builder.add_conditional_edges("sub", lambda state: [Send("sibling", {}), Send("sibling", {})], ["sibling"])
builder.add_edge("sibling", "agent")
"""
ASYNC = SYNC.replace("def look", "async def look").replace(
    "def call(state):",
    """async def call(state):
    await asyncio.gather(asyncio.to_thread(note, "to_thread"), RunnableLambda(note).abatch(["abatch"]))""",
)
FUNCTIONAL = """
@graph_task
def step(x):
    note("task")
    return model.invoke([("user", x)])

@entrypoint()
def flow(state: dict) -> Any:
    note("entrypoint")
    return {"messages": [step(state["messages"][0]["content"]).result()]}
"""
EXPECTED_SYNC = {"node": 1, "pool": 2, "parallel": 2, "batch": 2, "tool": 2, "subgraph": 1, "sibling": 2}


@pytest.mark.parametrize(
    ("body", "target", "expected"),
    [
        (SYNC, "builder", EXPECTED_SYNC),
        (ASYNC, "builder", {**EXPECTED_SYNC, "to_thread": 1, "abatch": 1}),
        (FUNCTIONAL, "flow", {"entrypoint": 1, "task": 1}),
    ],
    ids=["sync", "async", "functional"],
)
def test_the_current_task_is_known_everywhere(
    new_project: Any, command: Any, body: str, target: str, expected: dict[str, int]
) -> None:
    """Of each rollout its own, in every thread and task that LangGraph and LangChain make, and in verifiers."""
    from agenttrain.graph.load import load_module

    project = new_project(NOTES + body, decorated=DECORATED.format(target=target, limits="turns=3"))
    done = command("eval", "graph.py", "--json")
    assert done.json["environment_failures"] == 0, done.err
    seen = load_module(project.folder / "graph.py").seen
    every = {**expected, "verifier": 1, "async verifier": 1}
    for task_id in ("task-4", "task-5", "task-6"):
        assert {where: seen.count((where, task_id)) for where in every} == every
    assert len(seen) == 3 * sum(every.values())


def test_the_parts_of_several_verifiers_are_shown(new_project: Any, command: Any) -> None:
    """By name, with score and weight; the reward is their weighted sum."""
    project = new_project(NOTES + SYNC, decorated=DECORATED.format(target="builder", limits="turns=3"))
    done = command("eval", "graph.py", "--json")
    assert done.json["reward"] == pytest.approx(1.1)
    rollout = project.store.rollouts()[0]
    said = command("inspect", project.run.id, rollout.id).out
    assert "\nreward: 1.1\n  right: outcome 1 × 1\n  async_right: outcome 0.5 × 0.2\n" in said


TWO = "turns: all 2 policy calls are used"
FANS_OUT = """
def ask(state):
    return {"messages": [model.invoke([("user", f"{state['n']}?")])]}
async def aask(state):
    return {"messages": [await model.ainvoke([("user", f"{state['n']}?")])]}
inner = StateGraph(MessagesState)
inner.add_node("deep", lambda state: {"messages": [model.invoke([("user", "deep?")])]})
inner.set_entry_point("deep")
builder.add_node("start", lambda state: {})
builder.add_node("ask", {ask})
builder.add_node("sub", inner.compile())
builder.set_entry_point("start")
builder.add_conditional_edges("start", lambda state: [Send("ask", {{"n": n}}) for n in range(3)], ["ask"])
builder.add_edge("ask", "sub")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["ask", "aask"])
@pytest.mark.parametrize(
    ("limits", "n_turns", "told"),
    [
        ("turns=4", 4, None),
        ("turns=3", 3, "turns: all 3 policy calls are used"),
        ("turns=2", 2, TWO),
    ],
)
def test_limits_hold_for_parallel_branches_and_subgraphs(
    new_project: Any, command: Any, ask: str, limits: str, n_turns: int, told: str | None
) -> None:
    """Calls are counted where they are made; what was had when the budget ended is scored."""
    body = FANS_OUT.replace("{ask}", ask).replace("{{", "{").replace("}}", "}")
    project = new_project(NOTES + body, decorated=DECORATED.format(target="builder", limits=limits), settings=NO_LIMITS)
    command("eval", "graph.py")
    for rollout in project.store.rollouts():
        assert rollout.n_turns == n_turns or (ask, told, rollout.n_turns) == ("aask", TWO, 0)  # asyncio cancels them
        assert rollout.reward is not None
        assert (rollout.status == "budget_exhausted") == (told is not None)
        assert told is None or rollout.cause == told


NO_LIMITS = """
[engine]
process = "shared"
[renderer]
family = "default"
"""
