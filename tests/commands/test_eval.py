"""`agenttrain eval`: whose weights, which tasks, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

KEYS = {"run_id", "graph", "engine", "model", "tasks", "success", "reward", "turns", "by_slice", "wall_s", "alarms"}
FAKE = """
from langchain_core.language_models.fake_chat_models import FakeListChatModel
model = FakeListChatModel(responses=["right"])

def right(task, state):
    return state["messages"][-1].text == "right"
"""


@pytest.fixture
def fitted(project: Any, command: Any) -> Any:
    """A project after a fit of one step."""
    done = command("fit", "graph.py", "--set", "trainer.steps=1", "--set", "trainer.learning_rate=0.01")
    assert done.code == 0, done.err
    return project


def newest(project: Any) -> Any:
    return max(project.runs, key=lambda run: (run.path / "config.toml").stat().st_mtime_ns)


def test_eval_of_the_base_and_of_a_run(fitted: Any, command: Any, policy_folder: Path) -> None:
    """The keys of an evaluation stand at top level; each writes a run of its own; a run's policy gives its figures."""
    (run,) = fitted.runs
    report = run.read_report()
    base = command("eval", "graph.py", "--json")
    trained = command("eval", "graph.py", "--run", run.id, "--json")
    assert base.json.keys() >= KEYS
    assert (base.json["tasks"], base.json["rollouts"], base.json["temperature"]) == (3, 3, 0.0)
    assert base.json["model"] == {"base": str(policy_folder), "parameters": 868352, "replaces": "ChatOpenAI gpt-4o"}
    assert trained.json["model"]["base"] == str(run.policy)
    for done, before in ((base, report["baseline"]), (trained, report["trained"])):
        assert {key: done.json[key] for key in ("tokens", "turns", "tool_calls")} == {
            key: before[key] for key in ("tokens", "turns", "tool_calls")
        }
    written = newest(fitted).read_report()
    assert written["run_id"] == trained.json["run_id"]
    assert written["result"]["success"] == trained.json["success"]
    assert "evaluation: 3 rollouts" in trained.err


def test_a_run_is_evaluated_with_its_own_settings(fitted: Any, command: Any) -> None:
    """Its config.toml is the truth, not today's files; flags stand over it."""
    (run,) = fitted.runs
    settings = (fitted.folder / "agenttrain.toml").read_text()
    fitted.write("agenttrain.toml", settings.replace("tokens = 64", "tokens = 1") + "[eval]\ntasks = 1\n")
    trained = command("eval", "graph.py", "--run", run.id, "--json").json
    assert {key: trained[key] for key in ("tokens", "tasks")} == {
        key: run.read_report()["trained"][key] for key in ("tokens", "tasks")
    }
    flagged = command("eval", "graph.py", "--run", run.id, "--set", "limits.tokens=2", "--json").json
    assert (flagged["tokens"], flagged["tasks"]) == (2.0, 3)


def test_rows_of_an_array_are_all_evaluated(project: Any, command: Any, task_rows: list[dict[str, Any]]) -> None:
    """A LangSmith export on one line is as many tasks as it holds examples."""
    rows = [{"id": str(i), "inputs": row["input"], "outputs": {"x": 1}} for i, row in enumerate(task_rows[:3])]
    project.write("export.json", json.dumps(rows))
    done = command("eval", "graph.py", "--tasks", "export.json", "--json")
    assert done.json["tasks"] == 3, done.err


def test_model_and_run_both_name_weights(fitted: Any, command: Any, policy_folder: Path) -> None:
    """Of two, none is chosen in silence; a run that has not ended has no weights yet."""
    (run,) = fitted.runs
    done = command("eval", "graph.py", "--run", run.id, "--model", policy_folder)
    assert (done.code, done.err) == (2, "ConfigError: --model and --run RUN both name weights. Keep one.\n")
    run.policy.rename(run.path / "elsewhere")
    done = command("eval", "graph.py", "--run", run.id)
    said = f"{run.id} has no policy/ yet: the run has not ended. agenttrain fit --resume {run.id}"
    assert (done.code, done.err) == (2, f"ConfigError: {said}\n")


def test_tasks_split_and_repeats(project: Any, command: Any, task_rows: list[dict[str, Any]]) -> None:
    """All rows of a named file, whatever their split; a split of the configured one; each task several times."""
    project.write_tasks([{**row, "id": f"new-{row['id']}"} for row in task_rows], "fresh.jsonl")
    fresh = command("eval", "graph.py", "--tasks", "fresh.jsonl", "--set", "eval.temperature=1.0", "--json").json
    assert (fresh["tasks"], fresh["rollouts"], fresh["temperature"]) == (7, 7, 1.0)
    train = command("eval", "graph.py", "--tasks", "fresh.jsonl", "--split", "train", "--repeats", "2", "--json").json
    assert (train["tasks"], train["rollouts"]) == (4, 8)
    assert command("eval", "graph.py", "--split", "train", "--json").json["tasks"] == 4


def test_as_is_asks_the_users_own_model(new_project: Any, command: Any) -> None:
    """No policy and no template is needed, and nothing is sampled; people get a table."""
    project = new_project(
        FAKE + "builder.add_node('agent', agent)\nbuilder.set_entry_point('agent')\n",
        decorated="graph = trainable(builder, model='nowhere', tasks='tasks.jsonl', verifier=right)\n",
    )
    done = command("eval", "graph.py", "--run", "as-is", "--json")
    assert done.code == 0, done.err
    assert (done.json["success"], done.json["tokens"], done.json["engine"]) == (1.0, None, "as-is")
    assert [turn.role for rollout in project.store.rollouts() for turn in project.store.turns(rollout.id)] == (
        ["auxiliary"] * 3
    )
    said = command("eval", "graph.py", "--run", "as-is").out
    assert "| as-is on 3 tasks (its models as they are set) | |\n|---|---|\n| success | 1 |" in said


TALKS = """
from agenttrain import hookimpl
from agenttrain.local.engine import LocalEngine

class Talks(LocalEngine):
    def news(self):
        return ["a server was replaced"]

@hookimpl
def agenttrain_register_engines(register):
    register("talks", Talks.from_context)

builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""


BROKEN = """
def agent(state):
    raise OSError("the desk is closed")
builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""


def test_an_evaluation_without_any_result_is_no_success_of_0(new_project: Any, command: Any) -> None:
    """It ends as a fit does whose baseline fails: with the cause; the rollouts stay, and no report is written."""
    project = new_project(BROKEN)
    done = command("eval", "graph.py", "--run", "base", "--json")
    said = (
        "None of the 3 evaluation rollouts has a reward, so nothing was measured. The commonest cause (3 of them): "
        "OSError: the desk is closed"
    )
    assert done.code == 1
    assert done.json["error"]["type"] == "TrainerError"
    assert done.json["error"]["message"].startswith(said)
    assert f"\nTrainerError: {said}" in done.err
    assert "\nevaluation: nothing measured on 3 tasks, 3 environment failures\n" in done.err
    assert "(after 0 turns). Mend what this says, then start again." in done.err
    assert {rollout.status for rollout in project.store.rollouts()} == {"environment_failure"}
    assert not (project.run.path / "report.json").exists()


def test_what_happened_to_the_engine_is_told(new_project: Any, command: Any) -> None:
    new_project(TALKS)
    done = command("eval", "graph.py", "--json", "--set", "engine.name=talks")
    assert done.code == 0, done.err
    told = [(a["severity"], a["step"], a["message"]) for a in done.json["alarms"] if a["code"] == "engine"]
    assert told == [("note", 0, "a server was replaced")]
