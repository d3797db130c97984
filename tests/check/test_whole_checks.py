"""Graphs as users have them, checked whole: broken ones, clean ones, published ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agenttrain.tasks import smallest_effect

HERE = Path(__file__).parent
ORDER_DESK = Path(__file__).parents[2] / "examples" / "order-desk" / "graph.py"
POLICY = ORDER_DESK.parent / "policy"
BROKEN = {
    "all_zero_rewards": ("error", "answered"),
    "escape": ("error", "node agent"),
    "node_cache": ("warning", "agent"),
    "schema_mismatch": ("error", "tasks.jsonl, 3 tasks 1, 50, 99"),
    "second_model": ("error", "node judge"),
    "shared_checkpointer": ("warning", "helper"),
    "template_not_append_only": ("error", None),
    "unscripted_interrupt": ("error", "approve"),
}
"""Code to (severity, where); None: a folder that is made anew each time."""
PUBLISHED = {
    "create_agent": {("model", "trained")},
    "deepagents": {("model", "trained")},
    "supervisor": {("supervisor:agent", "trained")},
    "swarm": {("prices:model", "trained")},
}
"""Name to (place, role) of the calls."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no run was made."""
    monkeypatch.chdir(tmp_path)


def test_there_is_a_graph_for_each_code() -> None:
    """And a case for each graph."""
    assert sorted(BROKEN) == sorted(folder.name for folder in (HERE / "broken").iterdir())
    assert sorted(PUBLISHED) == sorted(folder.name for folder in (HERE / "published").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_graph_is_found_by_its_code_alone(command: Any, code: str) -> None:
    """One finding, with a cause and a fix; the exit code and `ready` follow its severity."""
    severity, where = BROKEN[code]
    done = command("check", HERE / "broken" / code / "graph.py", "--json", "--n-tasks", "2")
    assert [(found["code"], found["severity"]) for found in done.json["findings"]] == [(code, severity)], done.err
    (found,) = done.json["findings"]
    assert where in (None, found["where"])
    assert found["cause"]
    assert found["fix"]
    assert (done.code, done.json["ready"]) == ((1, False) if severity == "error" else (0, True))
    assert done.json["verdict"]["missing"] == ([code] if severity == "error" else [])


def test_a_clean_graph_has_no_finding(command: Any) -> None:
    """Who answers which call is told with its reason, and the subgraph by its path."""
    done = command("check", HERE / "clean" / "graph.py", "--json", "--n-tasks", "2")
    assert (done.code, done.json["findings"], done.json["ready"]) == (0, [], True), done.err
    assert [(row["place"], row["role"], row["reason"], row["n"]) for row in done.json["calls"]] == [
        ("agent", "trained", "the graph's one model", 8),
        ("reviewer:review", "frozen", "frozen: reviewer", 8),
    ]


def test_a_misspelt_selector_is_told_once(new_project: Any, command: Any) -> None:
    """It matches no call either, which follows."""
    line = "graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, frozen=['agnet'])\n"
    new_project(decorated=line)
    done = command("check", "graph.py", "--json", "--n-tasks", "1", "--siblings", "1")
    found = [
        (each["severity"], each["where"]) for each in done.json["findings"] if each["code"] == "selector_unmatched"
    ]
    assert found == [("error", "frozen=['agnet']")], done.err


WITH_PLAN = """
class State(MessagesState):
    plan: str

def planner(state: State):
    return {"plan": {returned}}

def agent(state: State):
    return {"messages": [model.invoke(state["messages"][: len(state["plan"])])]}

builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("agent", agent)
builder.set_entry_point("planner")
builder.add_edge("planner", "agent")
"""


@pytest.mark.parametrize(("returned", "n_notes"), [("'1. answer'", 0), ("state['plan']", 1)])
def test_a_key_that_no_task_gives(new_project: Any, command: Any, returned: str, n_notes: int) -> None:
    """It is no note where the graph ran to its end without it, and one where it fails."""
    new_project(WITH_PLAN.replace("{returned}", returned))
    done = command("check", "graph.py", "--json", "--n-tasks", "2")
    assert sum("No task gives input key 'plan'" in note for note in done.json["notes"]) == n_notes
    failed = any(found["code"] == "environment_failures" for found in done.json["findings"])
    assert failed == bool(n_notes), done.json["findings"]


def test_two_graphs_without_a_name_are_told_once(new_project: Any, command: Any) -> None:
    """Each with a checkpointer in memory, which rollouts don't share."""
    new_project(
        """
from langgraph.checkpoint.memory import InMemorySaver

def agent(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}

inner = StateGraph(MessagesState)
inner.add_node("agent", agent)
inner.set_entry_point("agent")
builder.add_node("inner", inner.compile(checkpointer=InMemorySaver()))
builder.set_entry_point("inner")
""",
        decorated="""
kept = builder.compile(checkpointer=InMemorySaver())
graph = trainable(kept, model=POLICY, tasks="tasks.jsonl", verifier=score)
""",
    )
    found = command("check", "graph.py", "--json", "--n-tasks", "1", "--siblings", "1").json["findings"]
    assert [each["where"] for each in found if each["code"] == "shared_checkpointer"] == ["a graph without a name"]


def test_zero_rewards_name_the_run_and_an_answer(command: Any) -> None:
    """So that a verifier that is wrong is seen at once."""
    done = command("check", HERE / "broken" / "all_zero_rewards" / "graph.py", "--json", "--n-tasks", "1")
    (found,) = done.json["findings"]
    assert f"agenttrain inspect {done.json['run_id']};" in found["fix"]
    assert re.search(r"Task '.+': the reference is '.+', the last reply '.+'\.$", found["cause"])


def test_errors_come_first(new_project: Any, command: Any) -> None:
    """Whatever was looked at first."""
    new_project(
        decorated="""
def wrong(task, state, colour): return 1
stops = builder.compile(interrupt_before=["agent"])
graph = trainable(stops, model=POLICY, tasks="tasks.jsonl", verifier=wrong)
"""
    )
    found = command("check", "graph.py", "--json").json["findings"]
    assert [(each["severity"], each["code"]) for each in found] == [
        ("error", "function_refused"),
        ("warning", "unscripted_interrupt"),
        ("warning", "few_held_out"),
    ]


def test_the_fit_that_comes_next_is_the_one_that_was_checked(project: Any, command: Any) -> None:
    """With its flags, so that it can be pasted."""
    flags = ("--model", "../desk of mine", "--seed", "3", "--set", "trainer.steps=2", "--set", "limits.tokens=30")
    (project.folder.parent / "desk of mine").symlink_to(POLICY)
    done = command("check", "graph.py", *flags)
    assert done.out.splitlines()[-1] == (
        "agenttrain fit graph.py --model '../desk of mine' --seed 3 --set trainer.steps=2 --set limits.tokens=30"
    )


def test_a_prompt_that_the_engine_does_not_take(new_project: Any, command: Any) -> None:
    """It is told as what it is: no zero reward, no missing call, no limit."""
    long = {"messages": [{"role": "user", "content": "How many? " * 2000}]}
    tasks = [{"id": str(i), "input": long, "split": "train" if i < 4 else "held_out"} for i in range(104)]
    new_project(tasks=tasks)
    found = command("check", "graph.py", "--json", "--n-tasks", "1").json["findings"]
    assert [(each["severity"], each["code"]) for each in found] == [("error", "no_room")]
    assert "max_position_embeddings" in found[0]["fix"]


def test_mermaid_alone_is_on_standard_output(command: Any) -> None:
    """Why it ends with 1 stands on standard error."""
    done = command("check", HERE / "broken" / "escape" / "graph.py", "--mermaid", "--n-tasks", "1", "--siblings", "1")
    assert (done.code, done.out.splitlines()[0]) == (1, "graph TD")
    assert "\nNot ready: 1 error (escape), 0 warnings. " in done.err


@pytest.mark.slow
def test_the_order_desk_has_no_finding(command: Any) -> None:
    """With its own settings."""
    done = command("check", ORDER_DESK, "--json")
    assert (done.code, done.json["findings"], done.json["ready"]) == (0, [], True), done.err
    verdict = done.json["verdict"]
    assert (verdict["verifiers"], verdict["n_train"], verdict["n_held_out"]) == (["answered"], 1000, 500)
    assert verdict["cost"]["rollouts"] == 16 * 20 * 8 + 2 * 500
    assert verdict["smallest_effect"] == smallest_effect(500)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # langgraph-supervisor 0.0.31 calls it
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_agent(command: Any, name: str) -> None:
    """With a policy of random weights: nothing but its own babble is found."""
    done = command("check", HERE / "published" / name / "graph.py", "--json")
    assert {(row["place"], row["role"]) for row in done.json["calls"]} >= PUBLISHED[name], done.err
    assert [found for found in done.json["findings"] if found["severity"] == "error"] == []
    assert done.json["verdict"]["spread"]["n"] == 16
