"""The regression set rolled out: what passes, what fails, and what could not be measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agenttrain.commands.progress import Progress
from agenttrain.errors import TaskError
from agenttrain.evaluated import find_evaluation
from agenttrain.gate.replay import CaseOutcome, Replay, outcome_of, replayed
from agenttrain.prepare import prepare
from agenttrain.run_folder import RunFolder
from agenttrain.tasks import read_tasks
from agenttrain.testing.small_model import tiny_model

JUDGED = """
def judged(task, state):
    if task.reference == "broken":
        raise ConnectionError("the shop is closed")
    return task.reference == "good"

@trainable(model=POLICY, tasks="tasks.jsonl", verifier=judged)
def graph():
    return builder.compile()
"""


@pytest.mark.parametrize(
    ("successes", "repeats", "outcome"),
    [
        ([True], 1, "passed"),
        ([False], 1, "failed"),
        ([None], 1, "unmeasured"),
        ([], 1, "unmeasured"),
        ([True, False], 2, "passed"),
        ([True, None], 2, "passed"),
        ([False, None], 2, "unmeasured"),
        ([False, False, None], 3, "failed"),
        ([True, False, None], 3, "unmeasured"),
        ([True, True, None], 3, "passed"),
        ([True, False, False], 3, "failed"),
        ([False, False], 4, "unmeasured"),
    ],
)
def test_a_case_passes_in_half_of_its_repeats(
    successes: Sequence[bool | None], repeats: int, outcome: CaseOutcome
) -> None:
    """What was not measured decides nothing: neither of what it could have been would change the outcome."""
    assert outcome_of(successes, repeats) == outcome


@pytest.fixture
def shop(new_project: Any) -> Any:
    """A project whose verifier goes by the reference."""
    return new_project(decorated=JUDGED)


def replay_of(project: Any, rows: Sequence[tuple[str, str]], policy: Path | None = None, **tables: Any) -> Replay:
    file = project.write_tasks(
        [{"id": id, "input": {"messages": [["user", "?"]]}, "reference": reference} for id, reference in rows],
        "cases.jsonl",
    )
    job = prepare("graph.py", cwd=project.folder, flags=tables)
    cases = read_tasks(file)
    return replayed(job, cases, policy=policy, runs=project.folder / "runs", watcher=Progress(job))


def test_cases_are_told_apart(shop: Any) -> None:
    """In the order of the cases; the run can be looked at like any evaluation."""
    replay = replay_of(shop, [("1", "good"), ("2", "broken"), ("3", "bad")], eval={"repeats": 2})
    assert list(replay.outcomes.items()) == [("1", "passed"), ("2", "unmeasured"), ("3", "failed")]
    assert list(replay.causes) == ["2"]
    assert "the shop is closed" in replay.causes["2"]
    assert replay.run_id is not None
    assert replay.run_id.startswith("replay-desk-")
    evaluation = find_evaluation(replay.run_id, shop.folder / "runs")
    assert [task.id for task in evaluation.tasks] == ["1", "2", "3"]
    assert (evaluation.repeats, evaluation.temperature) == (2, 0.0)


@pytest.mark.slow
def test_a_replay_in_which_nothing_can_be_measured_tells_it(shop: Any) -> None:
    replay = replay_of(shop, [("1", "broken")])
    assert dict(replay.outcomes) == {"1": "unmeasured"}
    assert "the shop is closed" in replay.causes["1"]


def test_the_policy_answers_as_its_own_run_had_it(shop: Any, tmp_path: Path) -> None:
    """Its weights, and how its run writes messages, with everything else as the job has it."""
    run = RunFolder(tmp_path / "run-1")
    run.path.mkdir()
    run.write_config({"renderer": {"family": "default", "history": "template"}}, {})
    tiny_model(run.policy)
    replay = replay_of(shop, [("1", "good")], run.policy, limits={"tokens": 5})
    evaluation = find_evaluation(str(replay.run_id), shop.folder / "runs")
    assert evaluation.policy == str(run.policy)
    assert evaluation.tables["renderer"]["history"] == "template"
    assert evaluation.tables["limits"]["tokens"] == 5


def test_no_case_runs_nothing(shop: Any) -> None:
    job = prepare("graph.py", cwd=shop.folder, flags={})
    replay = replayed(job, (), policy=None, runs=shop.folder / "runs", watcher=Progress(job))
    assert (replay.run_id, replay.outcomes, shop.runs) == (None, {}, [])


def test_a_case_that_the_graph_takes_no_longer_is_told(shop: Any) -> None:
    """Before anything starts."""
    shop.write_tasks([{"id": "1", "input": {"question": "?"}}], "cases.jsonl")
    job = prepare("graph.py", cwd=shop.folder, flags={})
    cases = read_tasks(shop.folder / "cases.jsonl")
    with pytest.raises(TaskError, match="question"):
        replayed(job, cases, policy=None, runs=shop.folder / "runs", watcher=Progress(job))
    assert shop.runs == []
