"""The regression set: rows are added and taken out whole, and everyone can see where they came from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from agenttrain.errors import PromotionError
from agenttrain.promotion.cases import Case, Origin, RegressionSet
from agenttrain.records import Task
from agenttrain.tasks import read_tasks

TASK = Task(
    id="4",
    input={"messages": [{"role": "user", "content": "Größe?"}]},
    reference={"total": 3},
    split="held_out",
    metadata={"kind": "refund"},
    context={"user": "ada"},
)
ORIGIN = Origin(
    run_id="desk-1",
    rollout_id="held_out-0-4-0-0",
    status="completed",
    score=0.25,
    success=False,
    why="a customer saw it",
    at=17.5,
    by="ada@atlas",
)


@pytest.fixture
def cases(tmp_path: Path) -> RegressionSet:
    """An empty one."""
    return RegressionSet(tmp_path / "promotions" / "desk", read_tasks)


def test_a_case_is_a_task_with_where_it_came_from(cases: RegressionSet) -> None:
    """The file is a task file: the same task is read from it, its metadata untouched."""
    assert cases.tasks() == ()
    cases.add(TASK, ORIGIN)
    other, lost = replace(TASK, id="5", context=None), replace(ORIGIN, score=None, status="environment_failure")
    cases.add(other, lost)
    assert read_tasks(cases.file) == (TASK, other) == cases.tasks()
    assert cases.cases() == (Case(task=TASK, origin=ORIGIN), Case(task=other, origin=lost))


def test_rows_written_by_hand_stay_as_they_are(cases: RegressionSet) -> None:
    """Also one without an id, under LangSmith's names, and lines between."""
    cases.folder.mkdir(parents=True)
    rows = ['{"inputs": {"a": 1},  "outputs": 2}', '{"id": "7", "input": {"a": 2}}']
    cases.file.write_text(f"{rows[0]}\n\n{rows[1]}")
    cases.add(TASK, ORIGIN)
    assert cases.file.read_text().splitlines()[:2] == rows
    assert [case.origin for case in cases.cases()] == [None, None, ORIGIN]
    unnamed = cases.tasks()[0].id
    cases.remove(unnamed, why="fixed elsewhere", at=1.0, by="ada@atlas")
    assert [task.id for task in cases.tasks()] == ["7", "4"]


def test_a_case_is_added_once(cases: RegressionSet) -> None:
    """The same task, whatever split it fell into since; and no other one under its id."""
    cases.add(TASK, ORIGIN)
    with pytest.raises(PromotionError, match="Task '4' is a case already, of rollout held_out-0-4-0-0 of desk-1"):
        cases.add(replace(TASK, split="train"), ORIGIN)
    with pytest.raises(
        PromotionError, match=r"has a case '4' with another content.*agenttrain cases remove 4 --why TEXT"
    ):
        cases.add(replace(TASK, reference={"total": 4}), ORIGIN)
    assert cases.tasks() == (TASK,)


def test_what_is_taken_out_is_noted(cases: RegressionSet) -> None:
    """With its whole row, why, when and by whom; the last one leaves an empty set."""
    cases.add(TASK, ORIGIN)
    cases.add(replace(TASK, id="5"), ORIGIN)
    (row, _) = map(json.loads, cases.file.read_text().splitlines())
    with pytest.raises(PromotionError, match=r"has no case '6'\. Cases there: 4, 5\."):
        cases.remove("6", why="", at=0.0, by="")
    assert not cases.removed.exists()
    assert cases.remove("4", why="sold out", at=18.5, by="bob@atlas") == TASK
    cases.remove("5", why="too", at=19.5, by="bob@atlas")
    assert (cases.tasks(), cases.cases()) == ((), ())
    noted = [json.loads(line) for line in cases.removed.read_text().splitlines()]
    assert noted[0] == {"removed": {"why": "sold out", "at": 18.5, "by": "bob@atlas"}, "row": row}
    assert noted[1]["row"]["id"] == "5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"id": "1", "input": {}}]', "is no JSON lines"),
        ('{"examples": [{"id": "1", "input": {}}, {"id": "2", "input": {}}]}', "is no JSON lines"),
        ('{"id": "1", "input": {}, "case": {"run": "x"}}', "row of case '1' says under 'case' what no case says"),
        ('{"id": "1", "input": {}, "case": 3}', "row of case '1' says under 'case' what no case says"),
        (json.dumps({"id": "1", "input": {}, "case": {**asdict(ORIGIN), "at": "today"}}), "what no case says"),
        ('{"id": "\xff", "input": {}}', "is no UTF-8: .* can't decode byte 0xff"),
    ],
)
def test_what_can_not_be_added_to_is_refused(cases: RegressionSet, text: str, said: str) -> None:
    """Nothing is written over."""
    cases.folder.mkdir(parents=True)
    cases.file.write_text(text, encoding="latin-1")
    with pytest.raises(PromotionError, match=said):
        cases.add(TASK, ORIGIN)
    assert cases.file.read_text(encoding="latin-1") == text
