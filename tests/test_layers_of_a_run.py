"""Layers in whole runs: a gate, an outcome, terms and a judge with its own model; metrics, report and alarms."""

from __future__ import annotations

from typing import Any

import pytest

BODY = """
from agenttrain import Part
from agenttrain.verifiers import turns_used
from langchain_core.language_models import FakeListChatModel

builder.add_node("agent", agent)
builder.set_entry_point("agent")
judge_model = FakeListChatModel(responses=["0.25"])

def no_odd_task(task: Task) -> bool:
    return task.reference % 2 == 0

def judge(state: dict) -> dict:
    said = judge_model.invoke([("user", "How good is it?"), *state["messages"]])
    return {"score": float(said.text), "comment": "by a model", "evidence": {"asked": 1}}

def broken(task: Task) -> float:
    raise KeyError(task.id)
"""
DECORATED = """
@trainable(model=POLICY, tasks="tasks.jsonl", verifiers={
    "no_odd": Part(no_odd_task, kind="safety", closed=-9.0),
    "score": score,
    "judge": Part(judge, 0.5, kind="process", low=0.0, high=1.0),
    "turns": Part(turns_used(limit=2), -4.0, kind="cost"),
    "broken": Part(broken, kind="process", on_error="leave_out"),
})
def graph():
    return builder.compile()
"""


@pytest.mark.slow
def test_a_fit_with_every_layer(new_project: Any, command: Any) -> None:
    """Rewards follow the gate, each step and the report tell the parts, and the judge's calls are nobody's turns."""
    project = new_project(BODY, decorated=DECORATED)
    done = command("fit", "graph.py", "--json")
    assert done.code == 0, done.err
    for rollout in project.store.rollouts():
        check_reward(rollout, is_odd=int(rollout.task_id.removeprefix("task-")) % 2 == 1)
    assert {(turn.site.node, turn.role, turn.site.model_class) for rollout in project.store.rollouts()
            for turn in project.store.turns(rollout.id)} == {("agent", "trained", "ChatOpenAI")}  # fmt: skip
    check_metrics(project)
    check_report(done.json, project)
    text = (project.run.path / "report.md").read_text()
    assert "\n| closed by a gate | 1 | 1 |\n| safety violations | 1 | 1 |\n" in text
    assert text.partition("## Parts of the reward\n```\n")[2].startswith(
        "no_odd: safety, gate; mean 0.667 before, 0.667 after; closed 1 of 3 before, 1 of 3 after\n"
        "     before                  after\n"
        "  0  █████            33 %   █████            33 %\n"
        "  1  ██████████       67 %   ██████████       67 %\n"
    )


def check_reward(rollout: Any, *, is_odd: bool) -> None:
    reward = rollout.reward
    parts = {part.name: part for part in reward.parts}
    assert list(parts) == ["no_odd", "score", "judge", "turns", "broken"]
    assert parts["broken"].error.startswith("Verifier 'broken' raised KeyError on task")
    assert (parts["judge"].score, parts["judge"].comment, parts["judge"].evidence) == (0.25, "by a model", {"asked": 1})
    if is_odd:
        assert (reward.score, reward.closed, rollout.success) == (-9.0, "no_odd", False)
    else:
        assert (reward.score, reward.closed) == (pytest.approx(parts["score"].score + 0.125 - 2.0), "")


def check_metrics(project: Any) -> None:
    rows = project.run.metrics()
    for row in rows:
        rewards = [r.reward for r in project.store.rollouts() if r.step == row["step"]]
        assert row["part.judge"] == 0.25
        assert row["part.turns"] == 0.5
        assert row["part.score"] == pytest.approx(sum(reward.parts[1].score for reward in rewards) / len(rewards))
        assert "part.broken" not in row
        assert row["gates_closed"] == row["safety_violations"] == sum(reward.score == -9.0 for reward in rewards)
    assert {alarm["code"] for row in rows for alarm in row["alarms"]} >= {"terms_outweigh_outcome", "part_left_out"}


def check_report(report: Any, project: Any) -> None:
    for phase in ("baseline", "trained"):
        summary = report[phase]
        assert (summary["gates_closed"], summary["safety_violations"]) == (1, 1)
        parts = summary["reward_parts"]
        assert list(parts) == ["no_odd", "score", "judge", "turns", "broken"]
        assert parts["no_odd"] == {
            "kind": "safety",
            "weight": None,
            "low": None,
            "high": None,
            "n": 3,
            "mean": pytest.approx(2 / 3),
            "errors": 0,
            "histogram": {"edges": [0.0, 0.5, 1.0], "counts": [1, 2]},
            "closed": 1,
        }
        assert parts["judge"]["histogram"]["counts"] == [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
        assert (parts["broken"]["n"], parts["broken"]["errors"], parts["broken"]["histogram"]) == (0, 3, None)
        assert parts["score"]["histogram"]["edges"] == report["baseline"]["reward_parts"]["score"]["histogram"]["edges"]
    assert "safety_violations" not in {alarm["code"] for alarm in report["alarms"]}


def test_an_eval_tells_the_parts_and_inspect_shows_them(new_project: Any, command: Any) -> None:
    """Of the user's own model's rollouts too; the gate that decided is named."""
    project = new_project(BODY, decorated=DECORATED)
    done = command("eval", "graph.py", "--run", "base", "--json")
    assert done.code == 0, done.err
    assert done.json["safety_violations"] == 1
    assert done.json["reward_parts"]["turns"]["histogram"] == {"edges": [0.0, 1.0], "counts": [3]}
    odd = next(rollout.id for rollout in project.store.rollouts() if rollout.reward.closed)
    said = command("inspect", project.run.id, odd).out
    assert "\nreward: -9, by the closed gate no_odd\n  no_odd: safety 0, closed\n  score: outcome " in said
    assert "\n  judge: process 0.25 × 0.5, by a model\n    asked: 1\n  turns: cost 0.5 × -4, 1 turns of 2\n" in said
    assert "\n  broken: process, left out: Verifier 'broken' raised KeyError" in said
