"""No side effects in training: a payment service in SQLite counts what really reached it, by key."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.store import read_store
from agenttrain.graph.effects import effects_of, open_effects
from agenttrain.graph.load import load_graph, load_module
from agenttrain.records import RolloutRequest, RolloutResult, Task

pytestmark = pytest.mark.slow

DESK = """
import itertools, os, signal, sqlite3
from pathlib import Path
from langgraph.types import RetryPolicy
from agenttrain import External, idempotency_key

SERVICE = Path(__file__).parent / "payments.db"
N = itertools.count(1)

def write(order: str, key: str) -> None:
    with sqlite3.connect(SERVICE, timeout=30) as db:
        db.execute("create table if not exists payments (key text, ordered text)")
        db.execute("insert into payments values (?, ?)", (key, order))

@tool
def refund(order: str) -> str:
    "Refund an order."
    write(order, idempotency_key())
    return "refunded"

@tool
def look_up(order: str) -> str:
    "Look an order up."
    return "late"

def fake_refund(order: str) -> str:
    return "refunded, in play"

def pay(state: MessagesState):
    order = current_task().id
    look_up.invoke({"order": order})
    said = [refund.invoke({"order": order}) for _ in range(2)]
    BREAK
    return {"messages": [("user", ", ".join(said))]}

builder.add_node("pay", pay, retry_policy=RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False,
                                                      retry_on=ConnectionError))
builder.add_node("agent", agent)
builder.add_edge("__start__", "pay")
builder.add_edge("pay", "agent")
"""
DECORATED = """
@trainable(model=POLICY, tasks="tasks.jsonl", verifier=score, tools={tools})
def graph():
    return builder.compile()
"""
PLAYED = '{"look_up": "read_only", "refund": External(stand_in=fake_refund)}'
PERMITTED = '{"look_up": "read_only", "refund": External(permitted=True)}'


@pytest.fixture
def desk(new_project: Any) -> Any:
    def make(tools: str, *, breaks: str = "", decorated: str = DECORATED, head: str = DESK) -> Any:
        return new_project(head.replace("BREAK", breaks or "pass"), decorated=decorated.format(tools=tools))

    return make


def payments(project: Any) -> dict[str, int]:
    """Key to how often it reached the service."""
    if not (project.folder / "payments.db").exists():
        return {}
    with sqlite3.connect(project.folder / "payments.db") as db:
        return dict(db.execute("select key, count(*) from payments group by key").fetchall())


def results(project: Any) -> list[RolloutResult]:
    return list(read_store(project.run.rollouts).results())


def test_a_fit_with_a_stand_in_reaches_no_service(desk: Any, command: Any) -> None:
    """In the baseline, in training, and in the last evaluation; the records tell what ran."""
    project = desk(PLAYED)
    done = command("fit", "graph.py", "--json", "--set", "trainer.steps=1")
    assert done.code == 0, done.err
    assert payments(project) == {}
    made = results(project)
    assert {result.rollout.phase for result in made} == {"baseline", "train", "held_out"}
    assert all(result.rollout.tools_run == {"look_up": 1} for result in made)
    assert all(result.rollout.stand_ins_run == {"refund": 2} for result in made)
    assert "external_calls" not in done.json


def test_a_fit_that_may_pay_pays_under_keys_of_its_own(desk: Any, command: Any) -> None:
    """Two a rollout, and no two rollouts share one; the report counts the calls."""
    project = desk(PERMITTED)
    done = command("fit", "graph.py", "--json", "--set", "trainer.steps=1")
    assert done.code == 0, done.err
    found = payments(project)
    assert len(found) == 2 * len(results(project)) == 2 * (3 + 4 + 3)
    assert set(found.values()) == {1}
    assert done.json["external_calls"] == {"refund": 20}
    assert "external tools that really ran: refund 20" in (project.run.path / "report.md").read_text()


def test_retries_of_node_and_rollout_share_their_keys(desk: Any, command: Any) -> None:
    """LangGraph tries each node twice, and each rollout's first attempt fails: a service that heeds keys pays once."""
    breaks = """tried = state_of.setdefault(order, next(N))
    n = calls[order] = calls.get(order, 0) + 1
    if n == 1:
        raise ConnectionError
    if n == 2:
        raise OSError("the desk is closed")"""
    project = desk(
        PERMITTED, breaks=breaks, head=DESK.replace("N = itertools", "state_of, calls = {}, {}\nN = itertools")
    )
    done = command("eval", "graph.py", "--run", "base", "--json")
    assert done.code == 0, done.err
    assert (done.json["rollouts"], done.json["environment_failures"]) == (3, 0)
    assert [result.rollout.status for result in results(project)].count("environment_failure") == 3
    found = payments(project)
    assert len(found) == 2 * 3
    assert set(found.values()) == {3}
    assert done.json["external_calls"] == {"refund": 18}


def test_as_is_the_stand_in_runs_too(desk: Any, command: Any) -> None:
    """The user's own models answer there; what a rollout may do is the same."""
    with_own_model = DESK.replace("builder.add_node", "from langchain_core.language_models import FakeListChatModel\n"
        "model = FakeListChatModel(responses=['fine'])\nbuilder.add_node", 1)  # fmt: skip
    project = desk(PLAYED, head=with_own_model)
    done = command("eval", "graph.py", "--run", "as-is", "--json")
    assert done.code == 0, done.err
    assert payments(project) == {}
    assert all(result.rollout.stand_ins_run == {"refund": 2} for result in results(project))


def test_what_is_wrong_is_told_before_anything_starts(desk: Any, command: Any) -> None:
    """A name that no tool has: the real tool would have run."""
    project = desk('{"look_up": "read_only", "refunds": External(stand_in=fake_refund)}')
    for name in ("fit", "eval"):
        done = command(name, "graph.py", *(("--run", "base") if name == "eval" else ()))
        assert done.code == 2
        assert "ConfigError: tools={'refunds': …} names no tool that can be seen" in done.err
        assert "Did you mean 'refund'?" in done.err
    assert payments(project) == {}
    done = command("check", "graph.py", "--json")
    (found,) = [each for each in done.json["findings"] if each["code"] == "tools_refused"]
    assert (done.code, found["severity"], found["where"]) == (1, "error", "tools=")
    assert done.json["trial"] is None
    assert payments(project) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tools", "codes"),
    [
        (PLAYED, []),
        (PERMITTED, ["external_permitted"]),
        ('{"look_up": "read_only"}', ["undeclared_tools"]),
        ("{}", []),
    ],
)
def test_a_check_tells_what_may_run_and_what_ran(tools: str, codes: list[str], desk: Any, command: Any) -> None:
    """Tools of which nothing is declared with the line to paste; a note where nothing is declared at all."""
    project = desk(tools)
    done = command("check", "graph.py", "--json", "--n-tasks", "1", "--siblings", "2")
    about = [each for each in done.json["findings"] if each["where"] == "tools="]
    assert [each["code"] for each in about] == codes
    ran = "the stand-in of refund 4 times" if tools == PLAYED else "refund ran 4 times"
    assert f"Tools in this check: look_up ran 2 times, {ran}." in done.json["notes"]
    assert len(payments(project)) == (0 if tools == PLAYED else 4)
    paste = {
        "undeclared_tools": 'Add to @trainable: tools={"refund": …}. For … write "read_only" where',
        "external_permitted": "External(stand_in=function)",
    }
    assert all(paste[each["code"]] in each["fix"] for each in about)
    assert sum('tools={"look_up": …, "refund": …}' in each for each in done.json["notes"]) == (tools == "{}")


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "n"), [('{"look_up": "read_only"}', 1), ("{}", 0), (PLAYED, 0)])
def test_tools_of_which_nothing_is_declared_are_noted(tools: str, n: int, desk: Any, command: Any) -> None:
    """Where something is declared of others: that they run themselves should surprise nobody."""
    desk(tools)
    said = command("eval", "graph.py").err
    assert said.count("not declared") == n
    note = (
        "note: The tool 'refund' is not declared: a rollout that calls it runs the tool itself. "
        "agenttrain check tells what to add to tools=.\n"
    )
    assert said.count(note) == n


CAUGHT = """
def pay(state: MessagesState):
    made = StructuredTool.from_function(lambda order: write(order, "none"), name="refund", description="x")
    try:
        made.invoke({"order": "A1"})
    except Exception as error:
        return {"messages": [("user", str(error))]}

builder.add_node("pay", pay)
"""


def test_a_refusal_that_the_graph_catches_ends_the_run(desk: Any, command: Any) -> None:
    """The tool is made so late that nobody could see it, and its stand-in takes other arguments."""
    head = DESK.partition("def pay")[0] + "from langchain_core.tools import StructuredTool" + CAUGHT
    head = head.replace("@tool\ndef refund", "def refund").replace(
        "fake_refund(order: str)", "fake_refund(number: int)"
    )
    rest = DESK[DESK.index('builder.add_node("agent"') :]
    project = desk(PLAYED, head=head + rest)
    done = command("eval", "graph.py", "--run", "base")
    assert done.code == 2
    assert "EffectError: The stand-in fake_refund of the tool 'refund' can't be called as the tool is" in done.err
    assert payments(project) == {}


@pytest.fixture
def documented(new_project: Any, policy_folder: Path) -> Any:
    """The project of docs/side-effects.md."""
    text = (Path(__file__).parents[1] / "docs" / "side-effects.md").read_text()
    graph = text.partition("```python\n")[2].partition("```")[0]
    return new_project(graph.replace('model="policy"', f"model={str(policy_folder)!r}"), head="", decorated="")


def test_the_documented_graph(documented: Any, command: Any) -> None:
    """It is ready to be looked at, its stand-in runs in a rollout, and the tool itself outside of one."""
    done = command("check", "graph.py", "--json", "--n-tasks", "1", "--siblings", "1")
    assert [each for each in done.json["findings"] if each["where"] == "tools="] == []
    loaded = load_graph("graph.py", cwd=documented.folder)
    assert loaded.trainable is not None
    module, tools = load_module(loaded.file), loaded.trainable.tools
    request = RolloutRequest(task=Task(id="t", input={}), phase="train")
    call = {"type": "tool_call", "name": "refund", "args": {"order": "A41"}, "id": "c1"}
    with open_effects(tools), effects_of(request, tools, run_id="run"):
        assert module.refund.invoke(call).content == "A41 is paid back"
    assert payments(documented) == {}
    for _ in range(2):
        assert module.refund.invoke(call).content == "A41 is paid back"
    assert list(payments(documented).values()) == [1]


@pytest.mark.long
@pytest.mark.parametrize("at", [4, 9])
def test_a_run_that_is_killed_pays_once(desk: Any, at: int) -> None:
    """SIGKILL behind both payments of the n-th rollout, in the first training step and in the second.

    Those of the rollouts that were under way are made again under their keys: two of the one that killed, and of each
    of its three siblings none, one or two, since they pay meanwhile.
    """
    breaks = """if os.environ.get("KILL_AT") == str(next(N)):
        os.kill(os.getpid(), signal.SIGKILL)"""
    project = desk(PERMITTED, breaks=breaks)
    settings = ("--set", "trainer.steps=2", "--set", "checkpoint.every=1", "--set", "engine.process=own")
    fit = [sys.executable, "-m", "agenttrain", "fit", "graph.py", *settings]
    died = subprocess.run(fit, cwd=project.folder, env=os.environ | {"KILL_AT": str(at)}, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    before = payments(project)
    goes_on = [sys.executable, "-m", "agenttrain", "fit", "--resume", project.run.id]
    done = subprocess.run(goes_on, cwd=project.folder, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found = payments(project)
    assert len(found) == 2 * (3 + 2 * 4 + 3), json.dumps(found)
    again = [key for key, n in found.items() if n > 1]
    assert len(again) in range(2, 9)
    assert set(again) <= set(before)
    assert Path(project.run.path).is_dir()
