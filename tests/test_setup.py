"""`setup=`: each rollout has a world of its own, whatever becomes of it; real graphs, the real policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import SqliteStore
from agenttrain.graph.load import load_module
from agenttrain.prepare import prepare
from agenttrain.protocols import EngineContext
from agenttrain.records import RolloutRequest, RolloutResult
from agenttrain.rollout import Runner, open_runner

WORLDS = """
import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from typing_extensions import TypedDict
from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime, get_runtime

class Desk(TypedDict, total=False):
    log: list
    user: str

events = []
builder = StateGraph(MessagesState, context_schema=Desk)
builder.set_entry_point("agent")
"""
SYNC_NODE = """
def node(state, runtime: Runtime, config: RunnableConfig):
    runtime.context["log"].append((current_task().id, config["configurable"].get("shop"), len(state["messages"])))
    return agent(state)
builder.add_node("agent", node)
"""
ASYNC_NODE = """
async def node(state, runtime: Runtime, config: RunnableConfig):
    runtime.context["log"].append((current_task().id, config["configurable"].get("shop"), len(state["messages"])))
    return {"messages": [await model.ainvoke(state["messages"])]}
builder.add_node("agent", node)
"""
SYNC_SETUP = """
@contextmanager
def shop(task):
    log = []
    events.append(("in", task.id, current_task().id))
    yield {"context": {"log": log}, "configurable": {"shop": 7}, "state": {"messages": [("user", "And mine?")]}}
    events.append(("out", log))
"""
ASYNC_SETUP = SYNC_SETUP.replace("@contextmanager\ndef", "@asynccontextmanager\nasync def")
LOOKS = """
def looks(task, state, context):
    events.append(("scored", context["log"], context.get("user")))
    return 0.5
"""
DECORATED = "graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=looks, setup=shop)\n"


@contextmanager
def opened(project: Any, **tables: Any) -> Iterator[tuple[Runner, Any, Any, Any]]:
    """(runner, engine, graph.py's module, tasks) of a project."""
    job = prepare("graph.py", cwd=project.folder, flags=tables)
    engine = job.plugins.engine(job.config.engine.name)(EngineContext(config=job.config, model=str(job.model)))
    store = SqliteStore(project.folder / "rollouts")
    try:
        with open_runner(
            job.config, job.loaded, renderer=job.renderer, store=store, plugins=job.plugins, model_name="tiny"
        ) as runner:
            yield runner, engine, load_module(Path(project.graph)), job.train
    finally:
        store.close()
        engine.close()


def rolled_out(project: Any, **tables: Any) -> tuple[RolloutResult, list[Any]]:
    """One rollout of the first task, and what graph.py noted of it."""
    with opened(project, **tables) as (runner, engine, module, tasks):
        result = runner.run(RolloutRequest(task=tasks[0], phase="train", step=1), engine)
    return result, module.events


@pytest.mark.parametrize("setup", [SYNC_SETUP, ASYNC_SETUP], ids=["sync setup", "async setup"])
@pytest.mark.parametrize("node", [SYNC_NODE, ASYNC_NODE], ids=["sync node", "async node"])
def test_a_world_is_there_from_before_the_graph_until_after_the_verifiers(
    new_project: Any, task_rows: list[dict[str, Any]], setup: str, node: str
) -> None:
    """Context over the task's own, configurable, and keys of the input."""
    task_rows[0]["context"] = {"user": "ann"}
    project = new_project(WORLDS + node + setup + LOOKS, decorated=DECORATED, tasks=task_rows[:1] + task_rows[4:])
    result, events = rolled_out(project)
    used = [("task-0", 7, 1)]
    assert events == [("in", "task-0", "task-0"), ("scored", used, "ann"), ("out", used)]
    assert "setup" not in result.rollout.cause
    assert (result.rollout.reward.score, len(result.samples)) == (0.5, 1)  # type: ignore[union-attr]


def test_task_groups_sessions_and_async_verifiers_share_one_loop(new_project: Any) -> None:
    """A server that a setup keeps in a task group is asked by nodes and verifiers; it is left where it was entered."""
    body = """
@asynccontextmanager
async def shop(task):
    questions = asyncio.Queue()
    async def serve():
        while (answer := await questions.get()) is not None:
            answer.set_result(asyncio.current_task().get_name())
    entered = asyncio.current_task()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(), name="server")
        async def ask():
            answer = asyncio.get_running_loop().create_future()
            await questions.put(answer)
            return await answer
        yield {"context": {"ask": ask}}
        events.append(asyncio.current_task() is entered)
        await questions.put(None)

async def node(state, runtime: Runtime):
    events.append(await runtime.context["ask"]())
    return {"messages": [await model.ainvoke(state["messages"])]}
builder.add_node("agent", node)

async def looks(state, context):
    return await context["ask"]() == "server"
"""
    project = new_project(WORLDS.replace(", context_schema=Desk", "") + body, decorated=DECORATED)
    result, events = rolled_out(project)
    assert result.rollout.success or result.rollout.status == "truncated"
    assert (result.rollout.reward.score, events) == (1.0, ["server", True])  # type: ignore[union-attr]


def test_a_setup_that_raises_is_the_environments_failure(new_project: Any, command: Any) -> None:
    """With its cause, tried three times, and never a reward of 0; the graph is not run."""
    setup = """
@contextmanager
def shop(task):
    raise PolicyFailure("no such table")
    yield
"""
    project = new_project(WORLDS + SYNC_NODE + setup + LOOKS, decorated=DECORATED)
    done = command("eval", "graph.py", "--json")
    assert done.code == 1
    assert "None of the 3 evaluation rollouts has a reward" in done.err
    rollouts = project.store.rollouts()
    assert {(r.status, r.attempt) for r in rollouts} == {("environment_failure", attempt) for attempt in range(3)}
    assert {r.reward for r in rollouts} == {None}
    assert min(rollout.cause for rollout in rollouts) == (
        "WorldError: setup=shop raised PolicyFailure: no such table at "
        f"graph.py:{project.line_of('no such table')} (shop) before task 'task-4'. Nothing was run; the rollout is "
        "tried again. (after 0 turns)"
    )


LEAVES = """
@{kind}contextmanager
{define} shop(task):
    try:
        yield {{"context": {{"log": []}}}}
    finally:
        events.append("left")
        {then}
"""


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("raise OSError('still in use')", "leaving setup=shop raised OSError: still in use at graph.py:{line} (shop)"),
        ("threading.Event().wait()", "leaving setup=shop took more than 0.2 s"),
    ],
)
def test_what_goes_wrong_on_leaving_is_told_and_the_result_stays(new_project: Any, then: str, told: str) -> None:
    """In the rollout's cause; reward, status and samples are those of the graph."""
    setup = LEAVES.format(kind="", define="def", then=then)
    project = new_project(WORLDS + SYNC_NODE + setup + LOOKS, decorated=DECORATED)
    result, events = rolled_out(project, limits={"verifier_seconds": 0.2})
    assert result.rollout.cause.split("; ")[-1] == told.format(line=project.line_of(then))
    assert result.rollout.status in ("completed", "truncated")
    assert (result.rollout.reward.score, len(result.samples), events[-1]) == (0.5, 1, "left")  # type: ignore[union-attr]


@pytest.mark.slow
def test_worlds_that_are_not_left_raise_an_alarm(new_project: Any, command: Any) -> None:
    """A note, in evaluations and in steps: containers or connections may pile up."""
    setup = LEAVES.format(kind="", define="def", then="raise OSError('still in use')")
    new_project(WORLDS + SYNC_NODE + setup + LOOKS, decorated=DECORATED)
    done = command("fit", "graph.py", "--set", "trainer.steps=1", "--json")
    assert done.code == 0, done.err
    told = [alarm for alarm in done.json["alarms"] if alarm["code"] == "world_not_left"]
    assert sorted((alarm["step"], alarm["severity"]) for alarm in told) == [(0, "note"), (0, "note"), (1, "note")]
    assert all("leaving setup=shop raised OSError: still in use" in alarm["message"] for alarm in told)


@pytest.mark.parametrize(("kind", "define"), [("", "def"), ("async", "async def")])
@pytest.mark.parametrize("then", ["raise ValueError('no such order')", "raise SystemExit(2)"])
@pytest.mark.parametrize("node", ["def", "async def"])
def test_a_world_is_left_when_the_graph_raises(new_project: Any, kind: str, define: str, then: str, node: str) -> None:
    """Whatever it raises, by thread and by event loop."""
    body = f"{node} broken(state):\n    {then}\nbuilder.add_node('agent', broken)\n"
    setup = LEAVES.format(kind=kind, define=define, then="pass")
    project = new_project(WORLDS + body + setup + LOOKS, decorated=DECORATED)
    result, events = rolled_out(project)
    assert (result.rollout.status, events) == ("environment_failure", ["left"])
    place = f" at graph.py:{project.line_of(then)} (broken)"
    noted = "" if "SystemExit" in then else " in node agent"  # LangGraph notes it on an Exception alone
    assert result.rollout.cause.endswith(f"{place}{noted} (after 0 turns)")


@pytest.mark.parametrize(("kind", "define"), [("", "def"), ("async", "async def")])
@pytest.mark.parametrize("where", ["the graph", "setup"])
def test_a_world_is_left_when_its_rollout_is_abandoned(new_project: Any, kind: str, define: str, where: str) -> None:
    """While the graph hangs, or when a setup that hung has come back after all."""
    body = """
began, free, left = threading.Event(), threading.Event(), threading.Event()
def hanging(state):
    began.set()
    free.wait(30)
    return {"messages": []}
builder.add_node("agent", hanging)
"""
    setup = LEAVES.format(kind=kind, define=define, then="left.set()")
    if where == "setup":
        setup = setup.replace("    try:", "    began.set()\n    free.wait(30)\n    try:")
    project = new_project(WORLDS + body + setup + LOOKS, decorated=DECORATED)
    with opened(project) as (runner, engine, module, tasks):
        request = RolloutRequest(task=tasks[0], phase="train", step=1)
        running = threading.Thread(target=runner.run, args=(request, engine))
        running.start()
        assert module.began.wait(30)
        result = runner.abandon(request.rollout_id, "the graph did not return")
        if where == "the graph":
            assert module.left.wait(30)
        module.free.set()
        running.join(30)
        assert module.left.wait(30)
    assert result.rollout.status == "environment_failure"  # type: ignore[union-attr]


def test_the_setups_own_model_calls_are_its_own(new_project: Any) -> None:
    """They reach its model, and leave no turn."""
    setup = """
from langchain_core.language_models.fake_chat_models import FakeListChatModel
writer = FakeListChatModel(responses=["a shop"])
@contextmanager
def shop(task):
    events.append(writer.invoke("make one up").text)
    yield {"context": {"log": []}}
"""
    project = new_project(WORLDS + SYNC_NODE + setup + LOOKS, decorated=DECORATED)
    result, events = rolled_out(project)
    assert (events[0], [turn.role for turn in result.turns]) == ("a shop", ["trained"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("yielded", "told"),
    [
        ("7", 'setup=shop yielded an int, and nothing or a mapping is needed: yield {"context": {"db": db}}.'),
        ("{'contxt': 1}", "setup=shop yielded the key 'contxt'. Accepted: context, configurable, state. Did you mean"),
        ("{'state': 3}", "setup=shop yielded 'state' as an int, and a mapping is needed."),
        ("{'configurable': {'thread_id': 1}}", "setup=shop yielded configurable 'thread_id', which each rollout sets"),
        ("{'state': {'mesages': []}}", "setup=shop yielded state 'mesages', which the graph doesn't take. Accepted: m"),
    ],
)
def test_what_no_graph_takes_ends_the_run(new_project: Any, command: Any, yielded: str, told: str) -> None:
    """A mistake in graph.py, not the environment's: nothing is tried again."""
    setup = f"@contextmanager\ndef shop():\n    yield {yielded}\n"
    project = new_project(WORLDS + SYNC_NODE + setup + LOOKS, decorated=DECORATED)
    done = command("eval", "graph.py")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"GraphError: {told}")
    assert project.store.rollouts() == ()


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            "@contextmanager\ndef shop(db, cache): yield",
            "setup=shop asks for 'db', which nothing fills. It may ask for a",
        ),
        ("def shop(task): yield", "setup=shop is a generator. Decorate it: @contextlib.contextmanager."),
        ("async def shop(task): yield", "setup=shop is a generator. Decorate it: @contextlib.asynccontextmanager."),
    ],
)
def test_a_setup_that_can_not_be_entered_is_refused_at_start(
    new_project: Any, command: Any, written: str, told: str
) -> None:
    """Before anything is written."""
    project = new_project(WORLDS + SYNC_NODE + written + LOOKS, decorated=DECORATED)
    done = command("fit", "graph.py", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"GraphError: {told}")
    assert not project.runs
