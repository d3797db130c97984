"""Tasks and the graph's schemas become findings, and the rows that can be rolled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.check.finding import Finding, error, warning
from agenttrain.errors import TaskError
from agenttrain.records import Task
from agenttrain.tasks import Misfit, few_tasks_warning, read_tasks, schema_misfits, split_tasks

MOST_ROWS = 5
"""Rows that one finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The tasks of a file, as far as it can be read."""

    train: tuple[Task, ...] = ()
    held_out: tuple[Task, ...] = ()
    """Those that are evaluated."""
    misfits: tuple[Misfit, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    def to_try(self) -> tuple[Task, ...]:
        """Those that the graph takes: to train on, else held out."""
        refused = {misfit.task_id for misfit in self.misfits}
        fitting = [[task for task in tasks if task.id not in refused] for tasks in (self.train, self.held_out)]
        return tuple(fitting[0] or fitting[1])


def rows_of(
    file: str | None,
    *,
    n_evaluated: int | None,
    input_schema: Mapping[str, Any],
    context_schema: Mapping[str, Any] | None,
) -> Rows:
    """Read and check the rows of the task file.

    Args:
        file: None: none is named.
        n_evaluated: eval.tasks. None or 0: all that are held out.
    """
    if file is None:
        cause = "No tasks are named: @trainable(tasks=…) or --tasks FILE."
        return Rows(findings=(error("tasks_unreadable", "tasks", cause, fix="Write a task file and name it."),))
    try:
        train, held_out = split_tasks(read_tasks(Path(file)))
    except TaskError as refused:
        return Rows(findings=(error("tasks_unreadable", file, str(refused)),))
    evaluated = held_out[:n_evaluated] if n_evaluated else held_out
    misfits, notes = schema_misfits((*train, *evaluated), input_schema, context_schema)
    findings = [*schema_findings(misfits, file), *split_findings(len(train), len(evaluated), file)]
    return Rows(train=train, held_out=evaluated, misfits=misfits, findings=tuple(findings), notes=notes)


def schema_findings(misfits: Sequence[Misfit], file: str) -> list[Finding]:
    """One finding for all rows with the same fault."""
    ids_by_fault: dict[tuple[str, str], list[str]] = {}
    for misfit in misfits:
        ids_by_fault.setdefault((misfit.what, misfit.text), []).append(misfit.task_id)
    return [
        error("schema_mismatch", f"{Path(file).name}, {_rows(ids)}", f"{what}{text}")
        for (what, text), ids in ids_by_fault.items()
    ]


def split_findings(n_train: int, n_held_out: int, file: str) -> list[Finding]:
    """What is missing on either side of the split."""
    name, found = Path(file).name, []
    if not n_train:
        found.append(error("no_train_tasks", name, "All rows are held out: there is nothing to train on."))
    if few := few_tasks_warning(n_held_out):
        found.append((warning if n_held_out else error)("few_held_out", name, few))
    return found


def _rows(ids: Sequence[str]) -> str:
    named = ", ".join(ids[:MOST_ROWS])
    more = f" and {len(ids) - MOST_ROWS} more" if len(ids) > MOST_ROWS else ""
    return f"{'task' if len(ids) == 1 else f'{len(ids)} tasks'} {named}{more}"
