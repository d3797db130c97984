"""What can be told before anything runs: all of it at once, where a fit would end at the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agenttrain.check import Prepared, prepared
from agenttrain.check.task_findings import rows_of, schema_findings, split_findings
from agenttrain.errors import ConfigError, GraphError
from agenttrain.tasks import Misfit


def look(project: Any, **flags: Any) -> Prepared:
    return prepared("graph.py", cwd=project.folder, flags=flags, runs=project.folder / "runs")


def codes(found: Prepared) -> list[tuple[str, str, str]]:
    return [(each.severity, each.code, each.where) for each in found.findings]


def test_a_small_project_has_few_held_out_tasks(project: Any) -> None:
    """And is tried all the same; nothing is written."""
    found = look(project)
    assert codes(found) == [("warning", "few_held_out", "tasks.jsonl")]
    assert found.findings[0].cause.startswith(
        "Only 3 held-out tasks: they can show a difference in success of 100 points"
    )
    assert (found.can_try, found.verifiers, len(found.to_try)) == (True, ("score",), 4)
    assert found.models == (("ChatOpenAI", "gpt-4o", ""),)
    assert project.runs == []


def test_nothing_is_there(new_project: Any) -> None:
    """No verifier, no tasks, no policy: three findings, and none of them hides another."""
    project = new_project(decorated="graph = trainable(builder)\n")
    found = look(project)
    assert codes(found) == [
        ("error", "no_verifier", "@trainable"),
        ("error", "tasks_unreadable", "tasks"),
        ("error", "no_policy", "model"),
    ]
    assert found.can_try is False


def test_a_graph_that_is_not_decorated(new_project: Any, policy_folder: Path) -> None:
    """It can be tried with what flags name; only the verifier is missing."""
    project = new_project(decorated="graph = builder.compile()\ndel builder\n")
    found = look(project, model=str(policy_folder), tasks="tasks.jsonl")
    assert [code for _, code, _ in codes(found)] == ["no_verifier", "few_held_out"]
    assert found.can_try is True


def test_functions_that_can_not_be_called(new_project: Any) -> None:
    """Each by its name."""
    project = new_project(
        decorated="""
def wrong(task, state, colour): return 1
def right(task, state): return 1
def answers(question): return 1
graph = trainable(
    builder,
    model=POLICY,
    tasks="tasks.jsonl",
    verifiers={"wrong": (wrong, 1.0), "right": (right, 1.0)},
    on_interrupt=answers,
)
"""
    )
    found = look(project)
    assert codes(found)[:2] == [
        ("error", "function_refused", "verifier wrong"),
        ("error", "function_refused", "on_interrupt="),
    ]
    assert "'colour'" in found.findings[0].cause
    assert found.can_try is False


def test_selectors(new_project: Any) -> None:
    """One that misspells a node is an error; one whose node may come later is a note."""
    line = "graph = trainable(builder, model=POLICY, tasks='tasks.jsonl', verifier=score, frozen=['agnet', 'title'])\n"
    project = new_project(decorated=line)
    found = look(project)
    assert codes(found)[0] == ("error", "selector_unmatched", "frozen=['agnet']")
    assert "Did you mean 'agent'?" in found.findings[0].cause
    assert any("frozen=['title'] names no node that can be seen" in note for note in found.notes)
    assert found.models == ()


def test_a_policy_that_can_not_be_used(project: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = look(project, model=str(empty))
    assert ("error", "no_policy", str(empty)) in codes(found)
    assert "holds no config.json" in next(each.cause for each in found.findings if each.code == "no_policy")


def test_memory_and_disk_that_are_not_there(project: Any) -> None:
    """A vast micro-batch is refused by its figures; a file in the place of runs/ is told too."""
    project.write("runs", "")
    found = look(project, trainer={"micro_batch_tokens": 10**9, "group_size": 10**4, "tasks_per_step": 10**4})
    told = {code: where for _, code, where in codes(found)}
    assert told["memory"] == "this machine"
    assert told["disk"].endswith("runs")


def test_a_family_that_was_guessed(new_project: Any, settings: str) -> None:
    project = new_project(settings=settings.replace('family = "default"', ""))
    found = look(project)
    assert [code for _, code, _ in codes(found)] == ["few_held_out", "family_guessed"]
    assert found.findings[1].fix.split("\n")[1:] == ["[renderer]", 'family = "default"']


def test_what_leaves_nothing_to_look_at_is_raised(project: Any) -> None:
    """As by any other command."""
    with pytest.raises(GraphError, match="is not a file"):
        prepared("grph.py", cwd=project.folder, flags={}, runs=Path("runs"))
    with pytest.raises(ConfigError, match="no key of the configuration"):
        look(project, traner={"steps": 1})


def test_rows_with_one_fault_are_one_finding() -> None:
    """The first few are named."""
    misfits = [Misfit(row=i, task_id=f"t{i}", what="input", text=" is empty.") for i in range(7)]
    misfits.append(Misfit(row=9, task_id="t9", what="context", text=" is given."))
    found = schema_findings(misfits, "/x/tasks.jsonl")
    assert [(each.where, each.cause) for each in found] == [
        ("tasks.jsonl, 7 tasks t0, t1, t2, t3, t4 and 2 more", "input is empty."),
        ("tasks.jsonl, task t9", "context is given."),
    ]


@pytest.mark.parametrize(
    ("n_train", "n_held_out", "expected"),
    [
        (1, 100, []),
        (0, 100, [("error", "no_train_tasks")]),
        (1, 99, [("warning", "few_held_out")]),
        (1, 0, [("error", "few_held_out")]),
    ],
)
def test_the_split(n_train: int, n_held_out: int, expected: list[tuple[str, str]]) -> None:
    found = split_findings(n_train, n_held_out, "tasks.jsonl")
    assert [(each.severity, each.code) for each in found] == expected


def test_rows_that_do_not_fit_are_not_tried(tmp_path: Path) -> None:
    """Those that do are, held-out ones where no other is left."""
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        '{"id": "a", "input": {"x": "one"}, "split": "train"}\n{"id": "b", "input": {"x": 1}, "split": "held_out"}\n'
    )
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    rows = rows_of(str(file), n_evaluated=None, input_schema=schema, context_schema=None)
    assert [misfit.task_id for misfit in rows.misfits] == ["a"]
    assert [task.id for task in rows.to_try()] == ["b"]
