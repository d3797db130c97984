"""Faults under way: each ends as the status table says, nothing broken is trained, and the run goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import SqliteStore
from agenttrain.graph.load import load_module
from agenttrain.pool import RolloutPool
from agenttrain.prepare import Job, prepare
from agenttrain.protocols import EngineContext
from agenttrain.records import RolloutRequest, RolloutResult
from agenttrain.rollout import Runner, open_runner

pytestmark = pytest.mark.slow

DESK = Path(__file__).parents[1] / "examples" / "order-desk"
CHECKED = """
import time
from agenttrain import PolicyFailure, current_task

def then(state):
    {then}

def checked(state):
    update = agent(state)
    then(state)
    return update

def score(task, state):
    return sum(map(ord, repr(state["messages"][-1]))) % 5 / 4

builder = StateGraph(MessagesState, context_schema=Desk)
builder.add_node("agent", checked)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")

@trainable(model={policy!r}, tasks="tasks.jsonl", verifier=score)
"""


@pytest.fixture
def order_desk(new_project: Any, policy_folder: Path) -> Any:
    """The order desk, in which something happens after each answer of the policy, a whole tool call mostly."""

    def make(then: str) -> Any:
        before, _, after = (DESK / "graph.py").read_text().partition("@trainable(")
        injected = CHECKED.format(then=then, policy=str(policy_folder))
        rows = [json.loads(line) for line in (DESK / "tasks.jsonl").read_text().splitlines()]
        tasks = [row for row in rows if row["split"] == "train"][:4]
        tasks += [row for row in rows if row["split"] == "held_out"][:3]
        named = [{**row, "id": f"task-{i}"} for i, row in enumerate(tasks)]
        head, graph = before + injected, after.partition(")\n")[2]
        return new_project(graph, head=head, decorated="", tasks=named)

    return make


@contextmanager
def runner_of(job: Job, folder: Path) -> Iterator[Runner]:
    """Rollouts of a job, outside of any fit."""
    store = SqliteStore(folder)
    try:
        with open_runner(
            job.config, job.loaded, renderer=job.renderer, store=store, plugins=job.plugins, model_name="tiny"
        ) as runner:
            yield runner
    finally:
        store.close()


def rollouts(project: Any, *settings: str, grace_s: float = 10.0, n: int = 1) -> list[list[RolloutResult]]:
    """Every attempt of n rollouts of the first task, by place."""
    tables: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        tables.setdefault("limits", {})[key] = float(value) if "second" in key else int(value)
    job = prepare("graph.py", cwd=project.folder, flags=tables)
    assert job.model is not None
    engine = job.plugins.engine(job.config.engine.name)(EngineContext(config=job.config, model=str(job.model)))
    attempts: dict[int, list[RolloutResult]] = {}
    try:
        with runner_of(job, project.folder / "rollouts") as runner:
            pool = RolloutPool(
                runner=runner,
                concurrency=4,
                seconds=job.config.limits.seconds,
                grace_s=grace_s,
                poll_s=0.02,
            )
            requests = [RolloutRequest(task=job.train[0], phase="train", step=1, sibling=i) for i in range(n)]
            pool.run(engine, requests, lambda result: attempts.setdefault(result.request.sibling, []).append(result))
            pool.close()
    finally:
        engine.close()
    return [attempts[place] for place in range(n)]


@pytest.mark.parametrize(
    ("then", "status", "told"),
    [
        ('raise ValueError("no such order")', "environment_failure", "ValueError: no such order"),
        ('raise PolicyFailure("deleted the order")', "policy_failure", "PolicyFailure: deleted the order"),
        ('raise ConnectionError("down")', "environment_failure", "ConnectionError: down"),
        ("raise SystemExit(2)", "environment_failure", "SystemExit: 2"),
    ],
)
def test_a_tool_or_node_that_raises(order_desk: Any, then: str, status: str, told: str) -> None:
    """The environment's failure is tried three times and has no reward; the policy's is scored, and tried once."""
    project = order_desk(then)
    (attempts,) = rollouts(project)
    last = attempts[-1].rollout
    assert {each.rollout.status for each in attempts} == {status}
    assert last.cause.startswith(f"{told} at graph.py:{project.line_of(then)} (then)")
    assert not last.success
    if status == "environment_failure":
        assert [each.rollout.attempt for each in attempts] == [0, 1, 2]
        assert all(each.rollout.reward is None and not each.samples for each in attempts)
    else:
        assert [each.rollout.attempt for each in attempts] == [0]
        assert last.reward is not None
        assert attempts[0].samples


IN_A_TOOL = """
from langchain_core.messages import AIMessage
from langgraph.prebuilt import ToolNode

@tool
def act(x: int) -> str:
    "Act."
    {then}

def call(state):
    return {{"messages": [AIMessage("", tool_calls=[{{"name": "act", "args": {{"x": 1}}, "id": "1"}}])]}}

builder.add_node("call", call)
builder.add_node("tools", ToolNode([act]))
builder.set_entry_point("call")
builder.add_edge("call", "tools")
"""


@pytest.mark.parametrize(
    ("then", "status", "n_attempts"),
    [
        ('raise PolicyFailure("deleted the order")', "policy_failure", 1),
        ('raise ValueError("down")', "environment_failure", 3),
    ],
)
def test_a_tool_of_langgraphs_own_node_that_raises(new_project: Any, then: str, status: str, n_attempts: int) -> None:
    """ToolNode answers bad arguments itself, and lets out what a tool raises."""
    project = new_project(IN_A_TOOL.format(then=then))
    (attempts,) = rollouts(project)
    assert [each.rollout.status for each in attempts] == [status] * n_attempts


@pytest.mark.parametrize(
    ("takes", "status"), [("order_id: str", "environment_failure"), ("order_id: int", "policy_failure")]
)
def test_arguments_that_are_refused(order_desk: Any, takes: str, status: str) -> None:
    """Of two equal errors on arguments, the policy's is the one where its own last call breaks a tool's schema."""
    project = order_desk("from pydantic import TypeAdapter; TypeAdapter(int).validate_python('A41')")
    project.write("graph.py", Path(project.graph).read_text().replace("order_id: str", takes))
    (attempts,) = rollouts(project)
    last = attempts[-1]
    assert last.turns[-1].n_tool_calls == 1
    assert {each.rollout.status for each in attempts} == {status}


@pytest.mark.parametrize(
    ("bound", "raises", "status"),
    [
        ("[calc]", "{}[name]", "policy_failure"),
        ("[calc]", "exec('raise ValueError(name)', {'name': f'unknown tool {name}'})", "policy_failure"),
        ("[calc]", "exec('raise ValueError(name)', {'name': 'the desk is closed'})", "environment_failure"),
        ("TOOLS", "{}[name]", "environment_failure"),
    ],
)
def test_a_tool_that_the_policy_made_up(order_desk: Any, bound: str, raises: str, status: str) -> None:
    """A graph that looks tools up itself ends on the policy's invention; not when the tool was among those bound."""
    project = order_desk(f"name = state['messages'][-1].tool_calls[0]['name']; {raises}")
    text = Path(project.graph).read_text().replace("    then(state)", "    then(update)")
    project.write("graph.py", text.replace("bind_tools(TOOLS)", f"bind_tools({bound})"))
    (attempts,) = rollouts(project)
    assert {each.rollout.status for each in attempts} == {status}, attempts[-1].rollout.cause
    assert attempts[-1].turns[-1].n_invalid_tool_calls == (bound == "[calc]")


LOOP = """
builder.add_node("agent", agent)
builder.add_node("next", lambda state: {})
builder.set_entry_point("agent")
builder.add_edge("agent", "next")
builder.add_edge("next", "next")
"""


def test_a_graph_that_loops(new_project: Any) -> None:
    """Our own recursion limit, that of the turns and not LangGraph's ten thousand; scored on the last state."""
    project = new_project(LOOP)
    ((attempt,),) = rollouts(project)
    assert attempt.rollout.status == "budget_exhausted"
    assert attempt.rollout.cause == "LangGraph's recursion limit was reached (after 1 turn)"
    assert attempt.rollout.reward is not None
    assert attempt.rollout.seconds < 10


AGENT_LOOP = """
builder.add_node("agent", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "agent")
"""
SLOW_LOOP = AGENT_LOOP.replace("agent)", "slow)", 1)


@pytest.mark.parametrize(
    ("body", "settings", "cause", "n_turns"),
    [
        (AGENT_LOOP, ("turns=3",), "turns: all 3 policy calls are used", 3),
        (AGENT_LOOP, ("tokens=15", "turns=9"), "tokens: 15 of 15 tokens are sampled", 3),
        (
            "def slow(state):\n    time.sleep(0.3)\n    return agent(state)\n" + SLOW_LOOP,
            ("seconds=0.5", "turns=9"),
            "seconds: 0.5 seconds are over",
            1,
        ),
    ],
)
def test_a_rollout_over_its_budget(
    new_project: Any, body: str, settings: tuple[str, ...], cause: str, n_turns: int
) -> None:
    """Turns, tokens and seconds each end it, named; it is scored, trained, and not tried again."""
    project = new_project(body)
    ((attempt,),) = rollouts(project, *settings)
    assert (attempt.rollout.status, attempt.rollout.cause) == ("budget_exhausted", cause)
    assert attempt.rollout.n_turns >= n_turns
    assert attempt.rollout.reward is not None
    assert attempt.samples


def test_a_budget_ends_a_graph_that_catches_every_exception(new_project: Any) -> None:
    """What ends a rollout is no Exception: `except Exception` around a model call doesn't keep it going."""
    body = """
def stubborn(state):
    for _ in range(50):
        try:
            agent(state)
        except Exception:
            pass
    return {"messages": [("ai", "I went on")]}
builder.add_node("agent", stubborn)
builder.set_entry_point("agent")
"""
    project = new_project(body)
    ((attempt,),) = rollouts(project, "turns=2")
    assert attempt.rollout.status == "budget_exhausted"
    assert attempt.rollout.n_turns == 2


def test_a_tool_that_hangs(new_project: Any) -> None:
    """Its rollout is given up after its seconds and a grace and made again; the others go on meanwhile."""
    body = """
import itertools, threading
N, RELEASE = itertools.count(), threading.Event()
def hang(state):
    if next(N) == 0:
        RELEASE.wait(60)
    return {}
builder.add_node("hang", hang)
builder.set_entry_point("hang")
"""
    project = new_project(body)
    places = rollouts(project, "seconds=0.2", grace_s=0.3, n=2)
    load_module(Path(project.graph)).RELEASE.set()
    statuses = sorted([each.rollout.status for each in place] for place in places)
    assert statuses == [["completed"], ["environment_failure", "completed"]]
    stuck = next(place[0].rollout for place in places if len(place) == 2)
    told = "the graph did not return in time: the graph did not return within 0.2 s and 0.3 s of grace"
    assert stuck.cause.startswith(told)
    assert stuck.reward is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        ('raise KeyError("price")', "environment_failure", "Verifier 'judge' raised KeyError on task 'task-0'"),
        ('return float("nan")', "environment_failure", "Verifier 'judge' answered nan"),
        ("return None", "environment_failure", "Verifier 'judge' answered None"),
        ("time.sleep(5)", "environment_failure", "Verifier 'judge' took more than 0.2 s on task 'task-0'"),
        ('raise PolicyFailure("cheated")', "policy_failure", "cheated"),
    ],
)
def test_a_verifier_that_fails(new_project: Any, answer: str, status: str, told: str) -> None:
    """It raises, hangs or gives no number: no reward, never 0; when it says that the policy did wrong, it is scored."""
    project = new_project(
        decorated=f"def judge(task, state):\n    {answer}\n"
        "graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=judge)\n"
    )
    (attempts,) = rollouts(project, "verifier_seconds=0.2")
    last = attempts[-1]
    assert {each.rollout.status for each in attempts} == {status}
    assert told in last.rollout.cause
    assert len(attempts) == (3 if status == "environment_failure" else 1)
    assert (last.rollout.reward is None) == (status == "environment_failure")
    assert bool(last.samples) == (status == "policy_failure")
    assert last.rollout.verifier_failed == (status == "environment_failure")


FAULTY = """
import itertools
from agenttrain import hookimpl
from agenttrain.local.engine import LocalEngine

CALLS = itertools.count(1)

class Faulty:
    \"\"\"The local engine, of which every third call fails in the middle.\"\"\"

    def __init__(self, context):
        self._own = LocalEngine.from_context(context)
        self.name = "faulty"

    def __getattr__(self, name):
        return getattr(self._own, name)

    def generate(self, prompt_ids, sampling, *, session):
        future = self._own.generate(prompt_ids, sampling, session=session)
        if next(CALLS) % 3:
            return future
        from concurrent.futures import Future
        failed = Future()
        failed.set_exception(RuntimeError("CUDA error: out of memory"))
        return failed

@hookimpl
def agenttrain_register_engines(register):
    register("faulty", Faulty)

builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""


def test_an_engine_that_fails_in_the_middle(new_project: Any, command: Any) -> None:
    """The rollout is tried again with another seed, nothing of the failed attempt is trained, and the run ends well."""
    project = new_project(FAULTY)
    done = command("fit", "graph.py", "--engine", "faulty", "--json")
    assert done.code == 0, done.err
    failed = [r for r in project.store.rollouts() if r.status == "environment_failure"]
    assert failed
    assert all(r.reward is None and r.attempt <= 2 for r in failed)
    cause = "EngineError: Engine faulty failed on turn "
    assert all(r.cause.startswith(cause) and "RuntimeError: CUDA error: out of memory" in r.cause for r in failed)
    assert not {r.id for r in failed} & {s.extra_fields["rollout_id"] for s in project.store.trained_samples()}
    check_account(done.json["tokens"])
    assert done.json["engine"] == "faulty"


def test_a_lost_answer_that_the_graph_hides(new_project: Any, command: Any) -> None:
    """`except Exception` around a failed call: the rollout is incomplete, has no reward, and trains nothing."""
    hidden = """
def hiding(state):
    try:
        return agent(state)
    except Exception:
        return {"messages": [("ai", "never mind")]}
"""
    project = new_project(hidden + FAULTY.replace('"agent", agent)', '"agent", hiding)'))
    done = command("fit", "graph.py", "--engine", "faulty", "--json")
    assert done.code == 0, done.err
    lost = [rollout for rollout in project.store.rollouts() if rollout.status == "incomplete"]
    assert {rollout.cause for rollout in lost} == {"the answers of 1 model calls were lost"}
    assert all(rollout.reward is None and not rollout.success for rollout in lost)
    assert not {r.id for r in lost} & {s.extra_fields["rollout_id"] for s in project.store.trained_samples()}
    check_account(done.json["tokens"])
    named = command("inspect", project.run.id, "--json").json["lost_calls"]
    assert set(named) == {rollout.id for rollout in lost}


def check_account(tokens: dict[str, Any]) -> None:
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert tokens["dropped"] == sum(tokens["dropped_by_cause"].values())
    assert tokens["drifted"] == 0


STEADY = ("--set", "sampling.temperature=0.1", "--set", "limits.turns=2")


LEFT_BEHIND = """
import contextvars
from concurrent.futures import ThreadPoolExecutor
behind = ThreadPoolExecutor(8)

def hasty(state):
    out = agent(state)
    long = model.bind(max_tokens=60).invoke
    for _ in range(2):
        behind.submit(contextvars.copy_context().run, long, [("user", "Sum up.")])
    return out

builder.add_node("agent", hasty)
builder.set_entry_point("agent")
"""


def test_calls_that_a_graph_leaves_behind(new_project: Any, command: Any) -> None:
    """What is still being sampled when the graph has returned is in no record, and the account of tokens holds."""
    new_project(LEFT_BEHIND)
    done = command("fit", "graph.py", "--set", "limits.tokens=600", "--set", "limits.turns=40", "--json")
    assert done.code == 0, done.err
    tokens = done.json["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"] > 0
    assert tokens["drifted"] == 0


@pytest.mark.slow
def test_training_goes_on_past_groups_that_fail(order_desk: Any, command: Any) -> None:
    """A task whose environment always fails: no reward, its group dropped and counted, alarms, and the others train."""
    project = order_desk('assert current_task().id not in ("task-0", "task-5"), "the sandbox is gone"')
    done = command("fit", "graph.py", "--json", "--set", "trainer.tasks_per_step=4", *STEADY)
    assert done.code == 0, done.err
    report = done.json
    assert report["baseline"]["environment_failures"] == report["trained"]["environment_failures"] == 1
    check_account(report["tokens"])
    assert report["tokens"]["dropped_by_cause"]["status environment_failure"] > 0
    assert report["tokens"]["trained"] > 0
    attempts = Counter((r.phase, r.step, r.sibling) for r in project.store.rollouts() if r.task_id == "task-0")
    assert set(attempts.values()) == {3}
    assert all(r.reward is None for r in project.store.rollouts() if r.task_id in ("task-0", "task-5"))
    for row in project.run.metrics():
        assert (row["environment_failures"], row["attempts"], row["rollouts"]) == (6, 12, 8)
    loud = [alarm["message"] for alarm in report["alarms"] if alarm["code"] == "environment_failures"]
    assert loud[0].startswith("6 of 12 rollouts ended by a failing environment and are not trained")


def test_a_run_in_which_everything_fails_ends_after_its_baseline(order_desk: Any, command: Any) -> None:
    """Where no baseline rollout has a reward nothing is trained: one error names the commonest cause."""
    project = order_desk('raise ValueError("gone")')
    done = command("fit", "graph.py", "--set", "trainer.steps=1", *STEADY)
    assert done.code == 1
    assert "None of the 3 baseline rollouts has a reward" in done.err
    assert "ValueError: gone" in done.err
    assert not (project.run.path / "policy").exists()
    assert [rollout.reward for rollout in project.store.rollouts()] == [None] * len(project.store.rollouts())


# The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 120 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


FILL = """
import os, shutil
from agenttrain import hookimpl

@hookimpl
def agenttrain_update_done(step_result):
    filler = os.environ.get("FILLER")
    if step_result.step == 3 and filler:
        with open(filler, "wb", buffering=0) as file:
            try:
                for _ in range(10_000):
                    file.write(b"0" * 65536)
            except OSError:
                pass
            file.truncate(max(0, file.tell() - int(os.environ["LEFT"])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "left", "what"),
    [(1, 400_000, "The checkpoint of step 3 can't be written: "), (2, 0, " can't be written: ")],
)
def test_a_disk_that_fills(
    project: Any, command: Any, small_disk: Path, monkeypatch: pytest.MonkeyPatch, every: int, left: int, what: str
) -> None:
    """At a checkpoint or in the store: one clear error, exit code 1; with room made, --resume ends the run."""
    graph, filler = Path(project.graph), small_disk / "someone-elses"
    graph.write_text(graph.read_text() + FILL)
    monkeypatch.chdir(small_disk)
    monkeypatch.setenv("FILLER", str(filler))
    monkeypatch.setenv("LEFT", str(left))
    done = command("fit", project.graph, "--set", f"checkpoint.every={every}", "--set", "trainer.steps=9")
    assert (done.code, done.out) == (1, ""), done.err
    error = done.err.splitlines()[-1]
    assert error.startswith("RunError: ")
    assert what in error
    assert "agenttrain fit --resume" in error
    (run,) = (small_disk / "runs").iterdir()
    assert max(folder.name for folder in (run / "checkpoints").iterdir()) == "step-00002"
    filler.unlink()
    monkeypatch.delenv("FILLER")
    done = command("fit", "--resume", run.name, "--json", "--set", "trainer.steps=4")
    assert done.code == 0, done.err
    check_account(done.json["tokens"])
    assert done.json["steps"] == 4


@pytest.mark.slow
def test_a_checkpoint_that_can_not_be_written(project: Any, command: Any) -> None:
    """Files may grow to 4 MiB only, and a checkpoint takes more: one clear error, and no half checkpoint is left."""
    limited = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, resource.RLIM_INFINITY))
from agenttrain.cli import main
main(["fit", "graph.py", "--set", "trainer.steps=1"])
"""
    done = subprocess.run([sys.executable, "-c", limited], cwd=project.folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("RunError: The checkpoint of step 1 can't be written: "), done.stderr
    assert error.endswith(f"make room, then agenttrain fit --resume {project.run.id}.")
    assert list(project.run.checkpoints.iterdir()) == []
    again = command("fit", "--resume", project.run.id, "--json")
    assert again.code == 0, again.err
    check_account(again.json["tokens"])


@pytest.mark.long
def test_the_process_ends_though_a_tool_hangs(new_project: Any) -> None:
    """A thread that Python would wait for doesn't keep a command from ending."""
    body = """
from langgraph.prebuilt import ToolNode
from langchain_core.messages import AIMessage

@tool
def hang(x: int) -> int:
    "Hang."
    time.sleep(3600)

def call(state):
    return {"messages": [AIMessage("", tool_calls=[{"name": "hang", "args": {"x": 1}, "id": "1"}])]}

builder.add_node("agent", agent)
builder.add_node("call", call)
builder.add_node("tools", ToolNode([hang]))
builder.set_entry_point("agent")
builder.add_edge("agent", "call")
builder.add_edge("call", "tools")
"""
    project = new_project(body)
    command = [sys.executable, "-m", "agenttrain", "eval", "graph.py", "--json", "--set", "limits.seconds=0.5"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert '"environment_failures": 3' in done.stdout


def test_a_bug_of_the_graph_after_a_cut_turn_is_the_environments(new_project: Any, command: Any) -> None:
    """An exception of a later node is not blamed on the policy, however the policy's last turn ended."""
    body = """
def boom(state: MessagesState):
    raise ZeroDivisionError("in a later node")

builder.add_node("agent", agent)
builder.add_node("boom", boom)
builder.set_entry_point("agent")
builder.add_edge("agent", "boom")
"""
    project = new_project(body)
    done = command("fit", "graph.py")
    assert done.code == 1
    assert "ZeroDivisionError" in done.err
    rollouts = project.store.rollouts()
    assert {rollout.status for rollout in rollouts} == {"environment_failure"}
    assert all("ZeroDivisionError" in rollout.cause for rollout in rollouts)


# Time


def test_a_last_tool_that_oversleeps_ends_a_budget(new_project: Any) -> None:
    """The seconds are over whether or not another call asks: scored on the last state, and not tried again."""
    body = """
def sleeps(state):
    time.sleep(0.4)
    return {}
builder.add_node("agent", agent)
builder.add_node("sleeps", sleeps)
builder.set_entry_point("agent")
builder.add_edge("agent", "sleeps")
"""
    project = new_project(body)
    ((attempt,),) = rollouts(project, "seconds=0.3")
    assert (attempt.rollout.status, attempt.rollout.cause) == ("budget_exhausted", "seconds: 0.3 seconds are over")
    assert attempt.rollout.reward is not None


JUMPS = """
import itertools
REAL, N = time.time, itertools.count()

def jumps(state):
    hours = (next(N) % 5 - 2) * 1000
    time.time = lambda: REAL() + 3600 * hours
    return agent(state)

builder.add_node("agent", jumps)
builder.set_entry_point("agent")
"""


@pytest.mark.slow
def test_a_clock_that_jumps(new_project: Any, command: Any) -> None:
    """Weeks back and forth at each call: no duration, limit or order follows the clock, and a resume keeps all."""
    project = new_project(JUMPS)
    real = time.time
    try:
        done = command("fit", "graph.py", "--json")
        assert done.code == 0, done.err
        more = command("fit", "--resume", project.run.id, "--json", "--set", "trainer.steps=3")
        assert more.code == 0, more.err
    finally:
        time.time = real
    made = project.store.rollouts()
    assert {rollout.status for rollout in made} <= {"completed", "truncated", "policy_failure"}
    assert all(0 <= rollout.seconds < 100 for rollout in made)
    turns = [turn for rollout in made for turn in project.store.turns(rollout.id)]
    assert all(0 <= turn.ended_at - turn.started_at < 100 for turn in turns)
    assert max(made, key=lambda r: r.started_at).started_at - min(r.started_at for r in made) > 3600
    assert all(0 < seconds < 1000 for key, seconds in more.json["wall_s"].items() if key != "sync")
    assert [row["step"] for row in project.run.metrics()] == [1, 2, 3]
    assert Counter(r.life for r in made if r.phase == "baseline") == {0: 3}
    check_account(more.json["tokens"])


# Memory

LEAKS = """
import os
KEPT = []

def leaks(state):
    KEPT.append(bytearray(os.urandom(1) * {n_bytes}))
    return agent(state)

builder.add_node("agent", leaks)
builder.set_entry_point("agent")
"""


def fit_of(project: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fit in a process whose memory is its own."""
    command = [sys.executable, "-m", "agenttrain", "fit", *arguments]
    return subprocess.run(command, cwd=project.folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_graph_that_leaks_memory(new_project: Any, command: Any) -> None:
    """The run says that memory grows; before its limit it saves and ends, and a new process goes on."""
    project = new_project(LEAKS.format(n_bytes=8 * 2**20))
    done = fit_of(project, "graph.py", "--set", "trainer.steps=200", "--set", "run.memory_mib=1100")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "loud: Memory grows: " in done.stderr
    assert " MiB a rollout. Does the graph keep what it should let go? At this rate it lasts for " in done.stderr
    (last,) = done.stderr.splitlines()[-1:]
    assert last.startswith("memory is nearly used up: this process holds ")
    assert last.endswith(f", and run.memory_mib is 1,100. Saved; go on with: agenttrain fit --resume {project.run.id}")
    steps = len(project.run.metrics())
    assert project.run.checkpoint_folders()[-1][0] == steps >= 5
    go_on = fit_of(project, "--resume", project.run.id, "--json", "--set", f"trainer.steps={steps + 1}")
    assert go_on.returncode == 0, go_on.stderr
    report = json.loads(go_on.stdout)
    check_account(report["tokens"])
    assert report["steps"] == steps + 1
    assert "memory_grows" in {alarm["code"] for alarm in report["alarms"]}


# Read-only


@pytest.mark.slow
def test_a_run_on_a_disk_that_may_not_be_written(
    project: Any, command: Any, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at it works; going on with it, and starting one there, are refused in one line that says where."""
    monkeypatch.chdir(small_disk)
    done = command("fit", project.graph, "--set", "trainer.steps=1")
    assert done.code == 0, done.err
    (run,) = (small_disk / "runs").iterdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        looked = command("inspect", run.name, "--json")
        assert (looked.code, len(looked.json["rollouts"])) == (0, 3 + 4 + 3), looked.err
        for arguments in (("--resume", run.name, "--set", "trainer.steps=2"), (project.graph,)):
            refused = command("fit", *arguments)
            assert (refused.code, refused.out) != (0, ""), arguments
            assert "Traceback" not in refused.err
            error = refused.err.splitlines()[-1]
            assert error.startswith(f"RunError: {small_disk / 'runs'}")
            assert "can't be written: Read-only file system" in error
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    done = command("fit", "--resume", run.name, "--json", "--set", "trainer.steps=2")
    assert done.code == 0, done.err
    check_account(done.json["tokens"])


# A policy that says nothing sensible


@pytest.mark.slow
def test_a_policy_that_answers_only_garbage(order_desk: Any, command: Any, policy_folder: Path) -> None:
    """Random weights: nothing succeeds, the run ends, and its report says so in its verdict and by its alarms."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    project = order_desk("pass")
    garbage = project.folder / "garbage"
    shutil.copytree(policy_folder, garbage)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy_folder)).save_pretrained(garbage)
    text = (
        Path(project.graph)
        .read_text()
        .replace('return sum(map(ord, repr(state["messages"][-1]))) % 5 / 4', "return 0.0")
    )
    project.write("graph.py", text)
    done = command("fit", "graph.py", "--json", "--model", garbage, "--set", "limits.tokens=60")
    assert done.code == 0, done.err
    report = done.json
    assert report["baseline"]["success"] == report["trained"]["success"] == 0.0
    assert report["baseline"]["environment_failures"] == 0
    assert report["difference"]["ci95"][0] < 0 < report["difference"]["ci95"][1]
    assert (report["tokens"]["trained"], report["tokens"]["sampled"] > 0) == (0, True)
    check_account(report["tokens"])
    assert {(alarm["code"], alarm["severity"]) for alarm in report["alarms"]} >= {("all_rewards_equal", "loud")}
    assert (project.run.path / "report.md").read_text().splitlines()[2].startswith("Nothing was trained")


# Those who write


BAD_TRAINER = """
from agenttrain import hookimpl
from agenttrain.local.trainer import LocalTrainer

class Bad(LocalTrainer):
    name = "bad"

    def save(self, folder):
        raise KeyError("momentum")

@hookimpl
def agenttrain_register_trainers(register):
    register("bad", Bad)
"""


def test_a_trainer_that_fails_to_save_is_no_full_disk(new_project: Any, command: Any) -> None:
    """The error names the trainer and what it raised; no half checkpoint is left."""
    project = new_project()
    project.write("graph.py", Path(project.graph).read_text() + BAD_TRAINER)
    done = command("fit", "graph.py", "--trainer", "bad", "--set", "trainer.steps=1")
    assert done.code == 1
    error = "TrainerError: The checkpoint of step 1 can't be made: the bad trainer raised KeyError: 'momentum'. "
    assert error in done.err
    assert "can't be written" not in done.err
    assert list(project.run.checkpoints.iterdir()) == []


KILLS_ENGINE = """
import itertools, os, signal
N = itertools.count(1)

def kills(task, state):
    if next(N) == 6 and not os.path.exists("killed"):
        open("killed", "w").close()
        for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
            os.kill(int(child), signal.SIGKILL)
    return score(task, state)

builder.add_node("agent", agent)
builder.add_node("again", agent)
builder.set_entry_point("agent")
builder.add_edge("agent", "again")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=kills)
"""


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_in_a_step(new_project: Any) -> None:
    """One error with the signal's name and the way on; what had ended before it is kept."""
    project = new_project(KILLS_ENGINE, decorated="")
    own = ("--set", "engine.process=own", "--set", "engine.concurrency=1")
    done = fit_of(project, "graph.py", *own)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "signal SIGKILL" in done.stderr
    assert f"agenttrain fit --resume {project.run.id}" in done.stderr
    go_on = fit_of(project, "--resume", project.run.id, "--json")
    assert go_on.returncode == 0, go_on.stderr
    report = json.loads(go_on.stdout)
    check_account(report["tokens"])
    kept = [r for r in project.store.rollouts() if r.life == 0 and r.reward is not None]
    assert Counter((r.phase, r.step) for r in kept)["baseline", 0] == 3


def test_calls_past_the_gate_are_counted_where_they_are_allowed(new_project: Any, command: Any) -> None:
    """Each phase and step says how many there were and where the first was made; nothing of them is in the record."""
    body = """
import threading
from langchain_core.language_models import fake_chat_models

def titled(state):
    own = fake_chat_models.FakeListChatModel(responses=["mine"])
    thread = threading.Thread(target=own.invoke, args=("a title?",), name="title maker")
    thread.start()
    thread.join()

builder.add_node("agent", agent)
builder.add_node("title", titled)
builder.set_entry_point("agent")
builder.add_edge("agent", "title")
"""
    decorated = """
@trainable(model=POLICY, tasks="tasks.jsonl", verifier=score, allow_escapes=True)
def graph():
    return builder.compile()
"""
    project = new_project(body, decorated=decorated)
    done = command("fit", "graph.py", "--json")
    assert done.code == 0, done.err
    told = [alarm for alarm in done.json["alarms"] if alarm["code"] == "escapes"]
    assert sorted((alarm["severity"], alarm["step"]) for alarm in told) == [("note", n) for n in (0, 0, 1, 2)]
    counts = {alarm["step"]: alarm["message"].split(" model calls")[0] for alarm in told}
    assert counts == {0: "3", 1: "4", 2: "4"}
    past = "model calls got past the gate, and your own model answered: nothing of it is trained. For example "
    assert all(past + "FakeListChatModel was called while " in alarm["message"] for alarm in told)
    assert all("'title'" in alarm["message"] and "on thread 'title maker'" in alarm["message"] for alarm in told)
    assert {turn.site.node for each in project.store.rollouts() for turn in project.store.turns(each.id)} == {"agent"}
