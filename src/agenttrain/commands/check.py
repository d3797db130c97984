"""`agenttrain check`: who answers which call, what is wrong and how to mend it, and whether to train."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import (
    FAILED,
    RUNS,
    Engine,
    Graph,
    Json,
    Model,
    Seed,
    Set,
    flag_tables,
    print_json,
    work,
)

if TYPE_CHECKING:
    from agenttrain.check import Checked
    from agenttrain.run_folder import RunFolder

STYLES = {"trained": "bold green", "frozen": "yellow", "auxiliary": "cyan", "error": "red", "warning": "yellow"}


def check_command(
    graph: Graph,
    n_tasks: Annotated[int, typer.Option("--n-tasks", help="Tasks that are tried.", min=1)] = 4,
    siblings: Annotated[int, typer.Option("--siblings", help="Rollouts of each task.", min=1)] = 4,
    trainer: Annotated[str | None, typer.Option("--trainer", help="local, or a plugin's.")] = None,
    engine: Engine = None,
    model: Model = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Task file instead of the configured one.")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the graph as mermaid text, and only that.")] = False,
    seed: Seed = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Try a graph before it is trained: who answers which call, what is wrong, what a fit would cost.

    Exits with 0 when nothing that was found is an error.
    """
    from agenttrain.check import checked, prepared
    from agenttrain.commands.progress import Progress
    from agenttrain.run_folder import new_run

    flags = flag_tables(set_, model=model, tasks=tasks, seed=seed, trainer__name=trainer, engine__name=engine)
    ready = prepared(graph, cwd=Path.cwd(), flags=flags, runs=RUNS)
    folder, progress = new_run(RUNS, f"check-{ready.job.name}"), Progress(ready.job)
    progress.starts_check(folder)
    with work():
        found = checked(ready, folder, n_tasks=n_tasks, siblings=siblings, watcher=progress)
    progress.close()
    if json:
        print_json(found.as_dict())
    elif mermaid:
        typer.echo(found.as_dict()["mermaid"])
        typer.echo(f"{_word(found)} {folder.path / 'report.md'}", err=True)
    else:
        given = {"--trainer": trainer, "--engine": engine, "--model": model, "--tasks": tasks, "--seed": seed}
        _print(found, folder, _fit(graph, given, set_ or ()))
    if not found.verdict.ready:
        raise typer.Exit(FAILED)


def _fit(graph: str, given: Mapping[str, object], assignments: Sequence[str]) -> str:
    """The fit that was checked, as it is typed.

    Example: "graph.py", {"--seed": 1, "--model": None}, ["trainer.steps=2"] -> "agenttrain fit graph.py --seed 1 --set
    trainer.steps=2"
    """
    flags = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    return shlex.join(["agenttrain", "fit", graph, *flags, *(text for each in assignments for text in ("--set", each))])


def _print(found: Checked, folder: RunFolder, fit: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    _print_graph(console, found)
    if found.calls:
        _print_calls(console, found)
    for finding in found.findings:
        style = STYLES[finding.severity]
        console.print(f"\n{finding.severity} {finding.code}: {finding.where}", style=style, markup=False)
        console.print(f"  {finding.cause}\n  fix: {finding.fix}", markup=False)
    for note in found.notes:
        console.print(f"\nnote: {note}", style="dim", markup=False)
    console.print(f"\n{_word(found)}", style="bold green" if found.verdict.ready else "bold red", markup=False)
    for line in found.verdict.lines():
        console.print(f"  {line}", markup=False)
    console.print(f"\n{_next(found, folder, fit)}", markup=False)


def _print_graph(console: Any, found: Checked) -> None:
    """One line a node: what it asks of whom, and where it leads."""
    from agenttrain.check.drawing import drawn

    nodes = drawn(found.shape, found.roles)
    name_width = max(len(node.name) + 2 * node.depth for node in nodes)
    calls_width = max(len(node.calls) for node in nodes)
    for node in nodes:
        mark, style = ("●", STYLES[node.role]) if node.role else ("○", "")
        name = f"{'  ' * node.depth}{mark} {node.name}"
        line = f"{name:<{name_width + 2}}  {node.calls:<{calls_width}}  {node.ways}"
        console.print(line.rstrip(), style=style, markup=False)


def _print_calls(console: Any, found: Checked) -> None:
    """A table as wide as it must be: lines that a terminal breaks can still be read and copied whole."""
    heading = ("calls", "tokens", "node", "model", "role", "why")
    rows = [(str(row.n), str(row.n_tokens), row.place, row.model, row.role, row.reason) for row in found.calls]
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    console.print()
    for cells, style in [(heading, "bold"), *((row, STYLES[row[4]]) for row in rows)]:
        numbers = [cell.rjust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        texts = [cell.ljust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        console.print("  ".join([*numbers, *texts]).rstrip(), style=style, markup=False)


def _word(found: Checked) -> str:
    from agenttrain.check.finding import counted

    n_errors = sum(finding.severity == "error" for finding in found.findings)
    n_warnings = len(found.findings) - n_errors
    if found.verdict.ready:
        if found.verdict.but:
            return f"Ready to train, but {found.verdict.but} ({counted(n_warnings, 'warning')})."
        return "Ready to train." if not n_warnings else f"Ready to train, with {counted(n_warnings, 'warning')}."
    codes = ", ".join(found.verdict.missing)
    return f"Not ready: {counted(n_errors, 'error')} ({codes}), {counted(n_warnings, 'warning')}."


def _next(found: Checked, folder: RunFolder, fit: str) -> str:
    """The commands that come next."""
    looked = f"agenttrain inspect {folder.id}    the rollouts of this check, token by token"
    if found.verdict.ready:
        return f"{looked}\n{fit}"
    return looked if found.trial is not None else f"report: {folder.path / 'report.md'}"
