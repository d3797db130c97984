"""`agenttrain cases`: from a rollout to a case, and out again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agenttrain.tasks import read_tasks


@pytest.fixture
def evaluated(project: Any, command: Any) -> Any:
    """A project after an evaluation of two tasks."""
    done = command("eval", "graph.py", "--set", "eval.tasks=2")
    assert done.code == 0, done.err
    return project


def test_a_case_is_added_listed_evaluated_and_taken_out(evaluated: Any, command: Any) -> None:
    """The way of one case; eval takes the file as it is."""
    file = evaluated.folder / "promotions" / "desk" / "cases.jsonl"
    done = command("cases", "add", evaluated.run.id, "eval-0-task-5", "--why", "a customer saw it")
    assert (done.code, done.out) == (0, "promotions/desk/cases.jsonl: task-5 is case 1.\n")
    added = command("cases", "add", evaluated.run.path, "eval-0-task-4", "--json")
    assert added.json == {"case": "task-4", "file": "promotions/desk/cases.jsonl", "cases": 2}
    evaluated_tasks = {task.id: task for task in read_tasks(evaluated.run.evaluated_tasks)}
    assert read_tasks(file) == (evaluated_tasks["task-5"], evaluated_tasks["task-4"])

    rollout = next(rollout for rollout in evaluated.store.rollouts() if rollout.task_id == "task-5")
    listed = command("cases", "list", "--json").json["cases"]
    assert [row["id"] for row in listed] == ["task-5", "task-4"]
    origin = listed[0]["origin"]
    assert origin.pop("at") > rollout.ended_at
    assert "@" in origin.pop("by")
    assert origin == {
        "run_id": evaluated.run.id,
        "rollout_id": rollout.id,
        "status": rollout.status,
        "score": rollout.reward.score,
        "success": rollout.success,
        "why": "a customer saw it",
    }
    said = command("cases", "list").out.splitlines()
    assert said[0] == "promotions/desk/cases.jsonl: 2 cases"
    assert said[1].startswith("task-5  ")
    assert said[1].endswith(": a customer saw it")

    assert command("eval", "graph.py", "--tasks", file, "--json").json["tasks"] == 2
    taken = command("cases", "remove", "task-5", "--why", "it may")
    assert (taken.code, taken.out) == (
        0,
        "promotions/desk/cases.jsonl: task-5 is taken out, 1 left; promotions/desk/cases_removed.jsonl keeps it.\n",
    )
    assert [task.id for task in read_tasks(file)] == ["task-4"]


def test_what_can_not_be_added_is_told(evaluated: Any, command: Any) -> None:
    """No such rollout; one of several; twice; a task that was changed since; a run without its tasks."""
    run = evaluated.run.id
    unknown = command("cases", "add", run, "eval-0-task-9")
    assert unknown.code == 2
    assert "No rollout is named 'eval-0-task-9' in this run." in unknown.err
    assert "2 rollouts begin with 'eval-0-task'" in command("cases", "add", run, "eval-0-task").err
    assert command("cases", "add", run, "eval-0-task-4").code == 0
    assert "Task 'task-4' is a case already" in command("cases", "add", run, "eval-0-task-4").err
    file = evaluated.run.evaluated_tasks
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["reference"] = "another"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "has a case 'task-4' with another content" in command("cases", "add", run, "eval-0-task-4").err
    file.unlink()
    without = command("cases", "add", run, "eval-0-task-5")
    assert (without.code, f"{run} doesn't hold the task 'task-5'" in without.err) == (2, True)


def test_the_set_of_several_graphs_is_named(project: Any, command: Any) -> None:
    """None, one and several regression sets; a removal without a reason."""
    none = command("cases", "list")
    assert (none.code, none.out.startswith("There are no cases under ")) == (0, True)
    assert command("cases", "list", "--json").json == {"file": None, "cases": []}
    assert "There is no regression set under" in command("cases", "remove", "1", "--why", "sold out").err
    for name in ("desk", "shop"):
        (project.folder / "promotions" / name).mkdir(parents=True)
        project.write(f"promotions/{name}/cases.jsonl", '{"id": "1", "input": {}}\n')
    assert "Name one of these with --name: desk, shop." in command("cases", "list").err
    assert "'shep' has no regression set." in command("cases", "list", "--name", "shep").err
    listed = command("cases", "list", "--name", "shop")
    assert listed.out == "promotions/shop/cases.jsonl: 1 case\n1  written by hand\n"
    assert command("cases", "remove", "1", "--why", " ", "--name", "shop").err.startswith(
        "ConfigError: --why is empty."
    )
    assert command("cases", "remove", "1").code == 2
