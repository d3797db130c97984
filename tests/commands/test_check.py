"""`agenttrain check`: what it prints, its exit code, and the RUN that it leaves."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from agenttrain.check import Checked
from agenttrain.check.finding import warning

KEYS = ["run_id", "graph", "ready", "findings", "notes", "verdict", "calls", "trial", "mermaid"]
ROWS = [
    {
        "id": f"task-{i}",
        "input": {"messages": [{"role": "user", "content": f"Price of item {i}?"}]},
        "split": "train" if i < 4 else "held_out",
    }
    for i in range(104)
]
BROKEN = """
def broken(task, state):
    raise ValueError("no")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=broken)
"""
ZERO = """
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=lambda task, state: 0.25)
"""
HANGS = """
import threading

def agent(state: MessagesState):
    threading.Event().wait(30)
    return {}

builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""
CTRL_C = """
import os, signal

def interrupted(task, state):
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0

graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=interrupted)
"""


@pytest.fixture
def desk(new_project: Any) -> Any:
    """A project of which only the words of its policy can be cut."""
    return new_project(tasks=ROWS)


def test_one_object_and_a_run_that_inspect_opens(desk: Any, command: Any) -> None:
    """The report is that very object; the rollouts are told as a check's."""
    done = command("check", "graph.py", "--json", "--n-tasks", "2", "--siblings", "3")
    assert done.code == 0, done.err
    assert list(done.json) == KEYS
    assert (done.json["ready"], done.json["graph"]) == (True, "graph.py:graph")
    assert desk.run.id == done.json["run_id"]
    assert desk.run.read_report() == done.json
    assert done.json["calls"][0] == {
        "place": "agent",
        "model": "ChatOpenAI:gpt-4o",
        "role": "trained",
        "reason": "the graph's one model",
        "n": 6,
        "n_tokens": sum(rollout.n_sampled_ids for rollout in desk.store.rollouts()),
    }
    listed = command("inspect", desk.run.id, "--json").json["rollouts"]
    assert {row["id"] for row in listed} == {f"check-0-task-{task}-{i}-0" for task in (0, 2) for i in range(3)}
    assert "measured for a check, and never trained" in command("inspect", desk.run.id, "check-0-task-0-0-0").out
    assert done.err.startswith(f"run {desk.run.id}\ncheck: 6 rollouts")


def test_people_see_the_graph_the_calls_the_findings_and_the_verdict(desk: Any, command: Any) -> None:
    """And what to type next."""
    done = command("check", "graph.py")
    lines = done.out.splitlines()
    assert lines[0].split() == ["○", "start", "→", "agent"]
    assert lines[1].split() == ["●", "agent", "trained", "16", "→", "end"]
    assert lines[3].split() == ["calls", "tokens", "node", "model", "role", "why"]
    assert "warning most_cut: graph.py:graph" in lines
    assert any(line.startswith("Ready to train, with ") for line in lines)
    can_show = "which can show 20 points or more (unpaired, before anything was measured)"
    assert f"  tasks: 4 to train on, 100 held out, {can_show}" in lines
    assert lines[-2].startswith(f"agenttrain inspect {desk.run.id}")
    assert lines[-1] == "agenttrain fit graph.py"
    text = (desk.run.path / "report.md").read_text()
    assert "## warning `most_cut`: graph.py:graph" in text


CALLS_NOTHING = """
@tool
def price(item: int) -> str:
    \"\"\"The price.\"\"\"
    return "5"

def reviewer(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}

def caller(state: MessagesState):
    return {"messages": [model.bind_tools([price]).invoke(state["messages"])]}

builder.add_node("caller", caller)
builder.add_node("reviewer", reviewer)
builder.set_entry_point("caller")
builder.add_conditional_edges("caller", lambda state: "__end__", ["reviewer", "__end__"])
"""


def test_ready_but_some_model_is_never_asked(new_project: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line says so, and so does the report; the findings of the trial are put in its place."""
    invalid = warning("invalid_tool_calls", "the policy", "3 of 4 tool calls are invalid.")
    monkeypatch.setattr(sys.modules[Checked.__module__], "_findings", lambda prepared, trial: (invalid,))
    project = new_project(CALLS_NOTHING, decorated=ZERO, tasks=ROWS)
    line = "most tool calls are invalid, none of 2 rollouts succeeded, and no rollout called the model of reviewer"
    done = command("check", "graph.py", "--n-tasks", "1", "--siblings", "2")
    assert f"Ready to train, but {line} (1 warning)." in done.out.splitlines()
    assert f": ready, but {line}.\n" in (project.run.path / "report.md").read_text()


def test_mermaid_alone(desk: Any, command: Any) -> None:
    done = command("check", "graph.py", "--mermaid", "--n-tasks", "1", "--siblings", "1")
    assert done.out.startswith("graph TD\n")
    assert '  agent_["agent<br/>trained 1"]:::trained\n' in done.out


def test_an_error_is_exit_1(new_project: Any, command: Any) -> None:
    """A verifier that raises; the object is the same, and the run is there."""
    project = new_project(decorated=BROKEN, tasks=ROWS)
    done = command("check", "graph.py", "--json")
    assert (done.code, done.json["ready"], done.json["verdict"]["missing"]) == (1, False, ["verifier_errors"])
    assert "ValueError" in done.json["findings"][0]["cause"]
    assert done.json["verdict"]["spread"] is None
    assert len(command("inspect", project.run.id, "--json").json["rollouts"]) == 16
    assert "Not ready: 1 error (verifier_errors)" in command("check", "graph.py").out


def test_without_a_trial_there_is_a_run_all_the_same(new_project: Any, command: Any) -> None:
    """What is missing is told whole."""
    project = new_project(decorated="graph = trainable(builder)\n")
    done = command("check", "graph.py", "--json")
    assert (done.code, done.json["trial"], done.json["calls"]) == (1, None, [])
    assert done.json["verdict"]["missing"] == ["no_verifier", "tasks_unreadable", "no_policy"]
    assert command("inspect", project.run.id, "--json").json["rollouts"] == []
    assert "report: " in command("check", "graph.py").out


def test_flags_win(desk: Any, command: Any) -> None:
    """As in a fit, and the run says so."""
    command("check", "graph.py", "--seed", "7", "--set", "limits.tokens=3", "--siblings", "1")
    tables, made_by = desk.run.read_config()
    assert (tables["seed"], tables["limits"]["tokens"], made_by["attribute"]) == (7, 3, "graph")
    assert {rollout.n_sampled_ids for rollout in desk.store.rollouts()} == {3}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("grph.py",), "GraphError"),
        (("graph.py", "--set", "traner.steps=1"), "ConfigError"),
        (("graph.py", "--trainer", "lokal"), "PluginError"),
        (("graph.py", "--n-tasks", "0"), "UsageError"),
    ],
)
def test_wrong_use_is_exit_2(desk: Any, command: Any, arguments: tuple[str, ...], kind: str) -> None:
    """Nothing is made then."""
    done = command("check", *arguments, "--json")
    assert (done.code, done.json["error"]["type"]) == (2, kind)
    assert desk.runs == []


def test_ctrl_c(new_project: Any, command: Any) -> None:
    """It ends with what was made; there is no verdict."""
    project = new_project(decorated=CTRL_C, tasks=ROWS)
    done = command("check", "graph.py", "--json")
    assert (done.code, done.json) == (130, {"error": {"type": "RunStopped", "message": "Stopped by Ctrl-C."}})
    assert project.run.read_report() is None


@pytest.mark.slow
def test_a_graph_that_hangs(new_project: Any, command: Any, settings: str) -> None:
    """It is given up at limits.seconds and told as what it is, with its cause."""
    project = new_project(HANGS, tasks=ROWS, settings=settings.replace("seconds = 20", "seconds = 1"))
    done = command("check", "graph.py", "--json", "--n-tasks", "1", "--siblings", "2")
    assert done.code == 1
    (found,) = done.json["findings"]
    assert (found["code"], found["severity"]) == ("environment_failures", "error")
    assert "the graph did not return in time" in found["cause"]
    assert json.loads((project.run.path / "report.json").read_text())["ready"] is False
