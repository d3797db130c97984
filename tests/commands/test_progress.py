"""What a person sees while a run goes on."""

from __future__ import annotations

from typing import Any

EQUAL = """
def equal(task, state):
    return 0.5
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=equal)
"""


def test_an_alarm_is_told_once_and_counted(new_project: Any, command: Any) -> None:
    """The first time in words, at the end how often; each stands in metrics.jsonl."""
    project = new_project(decorated=EQUAL)
    done = command("fit", "graph.py", "--set", "trainer.steps=3")
    assert done.code == 0
    assert done.err.count("loud: All rewards of this step are 0.5") == 1
    assert done.err.endswith("alarm all_rewards_equal: 3 times; metrics.jsonl and the report hold each\n")
    codes = [[alarm["code"] for alarm in row["alarms"]] for row in project.run.metrics()]
    assert [each.count("all_rewards_equal") for each in codes] == [1, 1, 1]
    assert done.out.count("All rewards of this step are 0.5") == 1
    assert "- loud, steps 1, 2, 3: All rewards of this step are 0.5" in done.out


def test_an_evaluation_says_what_it_evaluates(project: Any, command: Any) -> None:
    """And nothing of training tasks."""
    done = command("eval", "graph.py")
    assert done.err.startswith(f"run {project.run.id}: 3 tasks\n")
    assert "training" not in done.err


def test_one_is_no_plural(project: Any, command: Any) -> None:
    """One task and one rollout."""
    done = command("eval", "graph.py", "--set", "eval.tasks=1")
    assert done.err.startswith(f"run {project.run.id}: 1 task\n")
    assert "\nevaluation: 1 rollout\n" in done.err
    assert " on 1 task, " in done.err
