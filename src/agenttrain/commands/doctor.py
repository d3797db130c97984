"""`agenttrain doctor`: whether what is installed fits together, on this machine, with this graph or model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agenttrain.commands.arguments import FAILED, RUNS, Json, Model, Set, flag_tables, print_json

if TYPE_CHECKING:
    from agenttrain.doctor import Examination

SHOWN = ("agenttrain", "langgraph", "langgraph-prebuilt", "langchain-core", "transformers", "renderers")


def doctor_command(
    graph: Annotated[
        str | None,
        typer.Argument(help="graph.py or graph.py:attribute, to try with all that it names.", metavar="[GRAPH]"),
    ] = None,
    model: Model = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Look at versions, machine, plugins and leftovers; with GRAPH or --model at template and tasks too.

    Exits with 0 when there is no error.
    """
    from agenttrain.doctor import examine

    examined = examine(cwd=Path.cwd(), runs=RUNS, target=graph, flags=flag_tables(set_, model=model))
    if json:
        print_json(examined.as_dict())
    else:
        _print(examined)
    if not examined.ok:
        raise typer.Exit(FAILED)


def _print(examined: Examination) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("what", "seen", "tested with", box=None, pad_edge=False)
    for row in _rows(examined):
        table.add_row(*row)
    console.print(table)
    for finding in examined.findings:
        style = "red" if finding.severity == "error" else "yellow"
        console.print(f"\n{finding.severity} {finding.code}, {finding.where}", style=style, markup=False)
        console.print(f"  seen: {finding.seen}\n  accepted: {finding.accepted}\n  fix: {finding.fix}", markup=False)
    console.print(f"\n{_verdict(examined)}", style="bold", markup=False)


def _rows(examined: Examination) -> list[tuple[str, str, str]]:
    versions, machine, policy = examined.versions, examined.machine, examined.policy
    memory = machine["memory_bytes"]
    rows = [("python", str(versions["python"]), "")]
    rows += [(name, versions.get(name, "not installed"), examined.tested.get(name, "")) for name in SHOWN]
    rows += [
        ("torch", machine["torch"] or "not importable", examined.tested.get("torch", "")),
        ("GPUs", str(machine["gpus"]), ""),
        ("cores", f"{machine['cores']:g}, OMP_NUM_THREADS {machine['omp_num_threads'] or 'not set'}", ""),
        ("memory", "not known" if memory is None else f"{memory / 2**30:.1f} GiB may be used", ""),
        ("disk", f"{machine['disk_bytes'] / 2**30:.1f} GiB free", ""),
        ("plugins", ", ".join(examined.plugins["loaded"]) or "none", ""),
        *((f"sandboxes by {name}", words, "") for name, words in machine["sandboxes"].items()),
    ]
    return rows + [(key.replace("_", " "), _words(value), "") for key, value in policy.items()]


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {key.replace('_', ' ')}" for key, number in value.items())
    return {True: "yes", False: "no", None: "can't be told"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]


def _verdict(examined: Examination) -> str:
    n_errors = sum(finding.severity == "error" for finding in examined.findings)
    n_warnings = len(examined.findings) - n_errors
    if not examined.findings:
        return "Everything fits."
    return f"{n_errors} errors, {n_warnings} warnings."
