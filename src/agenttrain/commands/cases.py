"""`agenttrain cases`: the regression set of a graph, which every candidate is held against before it may serve."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import RUNS, Json, print_json
from agenttrain.errors import ConfigError, RunError

if TYPE_CHECKING:
    from agenttrain.promotion.cases import Case, RegressionSet
    from agenttrain.records import Rollout, Task
    from agenttrain.run_folder import RunFolder

Name = Annotated[
    str | None,
    typer.Option("--name", help="Folder under promotions/. Left out: the only one that has cases.", metavar="NAME"),
]

cases_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@cases_app.callback()
def _cases() -> None:
    """The regression set: tasks that must not fail again. Every promotion is held against it."""


@cases_app.command("add", short_help="Make the task of a rollout a case.")
def add_command(
    run: Annotated[str, typer.Argument(help="Id of a run, or the start of one, or its path.", metavar="RUN")],
    rollout: Annotated[
        str,
        typer.Argument(
            help="Id of a rollout, or the start of one; inspect RUN --failed lists those without success.",
            metavar="ROLLOUT",
        ),
    ],
    why: Annotated[str, typer.Option("--why", help="Why it must not fail again, in your words.")] = "",
    json: Json = False,
) -> None:
    """Add the task of a rollout, most often one that failed, to promotions/NAME/cases.jsonl."""
    from agenttrain.capture.store import read_store
    from agenttrain.commands.inspect import find_rollout
    from agenttrain.run_folder import find_run

    folder = find_run(run, RUNS)
    found = find_rollout(read_store(folder.rollouts), rollout)
    task = _task_of(found, folder)
    regression_set = _set_of(_name_of(folder))
    regression_set.add(task, _origin(found, folder, why))
    n = len(regression_set.cases())
    if json:
        print_json({"case": task.id, "file": str(regression_set.file), "cases": n})
    else:
        typer.echo(f"{regression_set.file}: {task.id} is case {n}.")


@cases_app.command("list", short_help="Show the cases.")
def list_command(name: Name = None, json: Json = False) -> None:
    """Show the cases of a graph, each with where it came from."""
    if name is None and not _known():
        said = (
            f"There are no cases under {Path('promotions').absolute()}. agenttrain cases add RUN ROLLOUT begins a set."
        )
        print_json({"file": None, "cases": []}) if json else typer.echo(said)
        return
    regression_set = _chosen(name)
    cases = regression_set.cases()
    if json:
        print_json({"file": str(regression_set.file), "cases": [_row(case) for case in cases]})
        return
    typer.echo(f"{regression_set.file}: {len(cases)} case{'' if len(cases) == 1 else 's'}")
    for case in cases:
        typer.echo(_line(case))


@cases_app.command("remove", short_help="Take a case out; it is noted.")
def remove_command(
    case: Annotated[str, typer.Argument(help="Id of a case, which is its task's.", metavar="ID")],
    why: Annotated[str, typer.Option("--why", help="Why it may fail from now on, in your words.")],
    name: Name = None,
    json: Json = False,
) -> None:
    """Take a case out; promotions/NAME/cases_removed.jsonl keeps the row, when, by whom and why."""
    from agenttrain.promotion.alone import user_and_machine

    if not why.strip():
        raise ConfigError("--why is empty. Say why the case may fail from now on: whoever reads it later will ask.")
    regression_set = _chosen(name)
    regression_set.remove(case, why=why, at=time.time(), by=user_and_machine())
    n = len(regression_set.cases())
    if json:
        print_json({"case": case, "file": str(regression_set.file), "cases": n, "noted": str(regression_set.removed)})
    else:
        typer.echo(f"{regression_set.file}: {case} is taken out, {n} left; {regression_set.removed} keeps it.")


def _task_of(rollout: Rollout, folder: RunFolder) -> Task:
    """The task that a rollout was of.

    Raises:
        RunError: the run doesn't hold it.
    """
    from agenttrain.tasks import read_tasks

    for file in (folder.evaluated_tasks, folder.train_tasks):
        for task in read_tasks(file) if file.is_file() else ():
            if task.id == rollout.task_id:
                return task
    raise RunError(
        f"{folder.id} doesn't hold the task {rollout.task_id!r} of that rollout under tasks/: only a fit and an eval "
        "write down their tasks. Run agenttrain eval on it, and add the rollout of that run."
    )


def _name_of(folder: RunFolder) -> str:
    """Of the run's graph under promotions/, as `prepare.Job.name`."""
    graph = Path(folder.read_config()[1].get("graph", ""))
    if not graph.parent.name:
        raise RunError(f"{folder.id} doesn't tell its graph, so its regression set has no name. Name a newer run.")
    return graph.parent.name


def _set_of(name: str) -> RegressionSet:
    from agenttrain.promotion.cases import RegressionSet
    from agenttrain.promotion.ledger import ledger_folder
    from agenttrain.tasks import read_tasks

    return RegressionSet(ledger_folder(Path(), name), read_tasks)


def _chosen(name: str | None) -> RegressionSet:
    """That of the name, or the only one.

    Raises:
        ConfigError: there is none, or several and none is named.
    """
    from agenttrain.promotion.ledger import PROMOTIONS

    known = _known()
    if name is None and len(known) == 1:
        return _set_of(known[0])
    if name in known:
        return _set_of(str(name))
    if not known:
        raise ConfigError(
            f"There is no regression set under {PROMOTIONS.absolute()}. agenttrain cases add RUN ROLLOUT begins one."
        )
    wanted = "Several graphs have a regression set" if name is None else f"{name!r} has no regression set"
    raise ConfigError(f"{wanted}. Name one of these with --name: {', '.join(known)}.")


def _known() -> list[str]:
    """Names of the regression sets in the current directory."""
    from agenttrain.promotion.ledger import PROMOTIONS

    return sorted(path.parent.name for path in PROMOTIONS.glob("*/cases.jsonl"))


def _origin(rollout: Rollout, folder: RunFolder, why: str) -> Any:
    from agenttrain.promotion.alone import user_and_machine
    from agenttrain.promotion.cases import Origin

    return Origin(
        run_id=folder.id,
        rollout_id=rollout.id,
        status=rollout.status,
        score=None if rollout.reward is None else rollout.reward.score,
        success=rollout.success,
        why=why,
        at=time.time(),
        by=user_and_machine(),
    )


def _row(case: Case) -> dict[str, Any]:
    from dataclasses import asdict

    return {"id": case.task.id, "origin": None if case.origin is None else asdict(case.origin)}


def _line(case: Case) -> str:
    """Example: "4  2026-11-30  desk-… held_out-0-4-0-0  completed, 0.250, no success  ada@atlas: refund lost"."""
    origin = case.origin
    if origin is None:
        return f"{case.task.id}  written by hand"
    score = "no reward" if origin.score is None else f"{origin.score:.3f}"
    ended = f"{origin.status}, {score}, {'success' if origin.success else 'no success'}"
    day = time.strftime("%Y-%m-%d", time.localtime(origin.at))
    return f"{case.task.id}  {day}  {origin.run_id} {origin.rollout_id}  {ended}  {origin.by}: {origin.why}".rstrip(
        ": "
    )
