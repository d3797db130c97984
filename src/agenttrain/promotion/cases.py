"""The regression set: tasks that must not fail again, in promotions/<name>/cases.jsonl.

A task file like any other, to be read, evaluated and also written by hand. A row that a rollout was the reason for says
so under `CASE_KEY`, which is no part of the task. What is taken out stands in cases_removed.jsonl. Knows nothing of
runs: the task and the rollout are handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agenttrain.disk import append_line, replace_file
from agenttrain.errors import PromotionError
from agenttrain.promotion.alone import alone, cant
from agenttrain.promotion_record import CASE_KEY
from agenttrain.records import Status, Task

TaskReader = Callable[[Path], Sequence[Task]]
"""How a task file is read: `tasks.read_tasks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a case came from."""

    run_id: str
    rollout_id: str
    status: Status
    score: float | None
    """None: the rollout has no reward."""
    success: bool
    why: str
    """In the words of who added it; may be empty."""
    at: float
    """Unix seconds."""
    by: str
    """User and machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the regression set."""

    task: Task
    origin: Origin | None
    """None: the row was written by hand."""


@dataclass(frozen=True, slots=True)
class RegressionSet:
    """The cases of one graph."""

    folder: Path
    """As of `ledger.ledger_folder`; made by the first case."""
    read_tasks: TaskReader

    @property
    def file(self) -> Path:
        return self.folder / "cases.jsonl"

    @property
    def removed(self) -> Path:
        """One JSON object a line: `removed` {why, at, by} and `row`, the case as it stood."""
        return self.folder / "cases_removed.jsonl"

    def tasks(self) -> tuple[Task, ...]:
        """In the order of the file; none where there is no case.

        Raises:
            TaskError: a row that is no task.
            PromotionError: the file can't be read, or is no JSON lines.
        """
        return tuple(case.task for case in self.cases())

    def cases(self) -> tuple[Case, ...]:
        """As `tasks`, each with where it came from."""
        return tuple(Case(task=task, origin=_origin(json.loads(row), self.file)) for row, task in self._pairs())

    def add(self, task: Task, origin: Origin) -> None:
        """Add a case, on disk when this returns.

        Raises:
            PromotionError: it is one already, or another task has its id; or the file can't be read or written.
        """
        with alone(self.folder):
            for case in self.cases():
                if case.task.id == task.id:
                    raise PromotionError(self._twice(case, task))
            self._write([*self._rows(), _row(task, origin)])

    def remove(self, task_id: str, *, why: str, at: float, by: str) -> Task:
        """Take a case out, and note it beside first.

        Raises:
            PromotionError: there is none of that id; or the file can't be read or written.
        """
        with alone(self.folder):
            by_id = {task.id: (row, task) for row, task in self._pairs()}
            if task_id not in by_id:
                known = ", ".join([*by_id][:8]) or "none"
                raise PromotionError(f"{self.file} has no case {task_id!r}. Cases there: {known}.")
            row, task = by_id.pop(task_id)
            self._note({"removed": {"why": why, "at": at, "by": by}, "row": json.loads(row)})
            self._write([row for row, _ in by_id.values()])
            return task

    def _pairs(self) -> list[tuple[str, Task]]:
        """Each row as it is written, and the task that it is."""
        rows = self._rows()
        tasks = self.read_tasks(self.file) if rows else ()
        if len(rows) != len(tasks):
            raise PromotionError(self._no_lines())
        return list(zip(rows, tasks, strict=True))

    def _rows(self) -> list[str]:
        """The lines that hold a row, as they are written."""
        try:
            text = self.file.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PromotionError(cant("read", self.file, error)) from error
        except UnicodeDecodeError as error:
            raise PromotionError(
                f"{self.file} is no UTF-8: {error}. Save it as UTF-8, a task file as any other."
            ) from None
        rows = [line for line in text.split("\n") if line.strip()]
        if rows and not rows[0].lstrip().startswith("{"):
            raise PromotionError(self._no_lines())
        return rows

    def _note(self, note: Mapping[str, Any]) -> None:
        try:
            append_line(self.removed, json.dumps(note).encode() + b"\n")
        except OSError as error:
            raise PromotionError(cant("written", self.removed, error)) from error

    def _write(self, rows: Sequence[str]) -> None:
        try:
            replace_file(self.file, "".join(f"{row}\n" for row in rows).encode())
        except OSError as error:
            raise PromotionError(cant("written", self.file, error)) from error

    def _no_lines(self) -> str:
        return f"{self.file} is no JSON lines. Write one whole row, a JSON object, on each line."

    def _twice(self, case: Case, task: Task) -> str:
        """What is said of a task whose id a case has already."""
        since = f", of rollout {case.origin.rollout_id} of {case.origin.run_id}" if case.origin else ""
        if replace(case.task, split=task.split) == task:
            return f"Task {task.id!r} is a case already{since}. Nothing is to be done."
        return (
            f"{self.file} has a case {task.id!r} with another content{since}: the task was changed since. Take the old "
            f"one out first if it is to be replaced: agenttrain cases remove {task.id} --why TEXT"
        )


def _row(task: Task, origin: Origin) -> str:
    fields = {key: value for key, value in asdict(task).items() if value is not None}
    return json.dumps({**fields, CASE_KEY: asdict(origin)})


def _origin(row: Mapping[str, Any], file: Path) -> Origin | None:
    said = row.get(CASE_KEY)
    if said is None:
        return None
    try:
        return TypeAdapter(Origin).validate_json(json.dumps(asdict(Origin(**said))), strict=True)
    except (TypeError, ValidationError):
        raise PromotionError(
            f"{file}: the row of case {row.get('id')!r} says under {CASE_KEY!r} what no case says. Leave the key out "
            "of rows that you write by hand."
        ) from None
