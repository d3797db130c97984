"""`agenttrain fit`: baseline, training, held-out evaluation, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from agenttrain.commands.arguments import (
    FAILED,
    RUNS,
    STOPPED,
    CommandEnded,
    Engine,
    Json,
    Model,
    Seed,
    Set,
    flag_tables,
    print_json,
    work,
)
from agenttrain.errors import ConfigError


def fit_command(
    graph: Annotated[
        str | None,
        typer.Argument(
            help="graph.py, graph.py:attribute, or a name in langgraph.json; left out with --resume.", metavar="[GRAPH]"
        ),
    ] = None,
    trainer: Annotated[str | None, typer.Option("--trainer", help="local, or a plugin's.")] = None,
    engine: Engine = None,
    model: Model = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Task file instead of the configured one.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on with a run: its id or path.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
    stop_on_alarm: Annotated[
        bool, typer.Option("--stop-on-alarm", help="Save and end at the first loud alarm.")
    ] = False,
    seed: Seed = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Measure a baseline, train, measure the same held-out tasks again, and report."""
    from agenttrain.commands.progress import Progress, print_plan, print_report
    from agenttrain.exporters import exporting, wanted_exporter
    from agenttrain.fit import RunStopped, fit
    from agenttrain.forecast import forecast
    from agenttrain.gate.way_back import refuse_to_replace
    from agenttrain.prepare import prepare, trainable_job
    from agenttrain.run_folder import check_place, find_run, new_run

    flags = flag_tables(set_, model=model, tasks=tasks, seed=seed, trainer__name=trainer, engine__name=engine)
    run, saved = None, None
    if resume is not None:
        run = find_run(resume, RUNS)
        saved, made_by = run.read_config()
        graph = _same_graph(graph, made_by)
    if graph is None:
        raise ConfigError("fit needs a graph: agenttrain fit graph.py, or agenttrain fit --resume RUN.")
    job = trainable_job(prepare(graph, cwd=Path.cwd(), flags=flags, saved=saved))
    needed = forecast(job)
    if needed is not None:
        job = replace(job, notes=(*job.notes, *needed.notes))
    if run is None:
        check_place(RUNS, n_bytes=needed.disk_bytes if needed is not None else 0)
    if dry_run:
        print_plan(job, needed, as_json=json)
        return
    if run is not None and (ended := run.read_report()) and ended["steps"] >= job.config.trainer.steps:
        typer.echo(f"{run.id} has ended; this is its report. More steps: --set trainer.steps=N.", err=True)
        print_json(ended) if json else print_report(ended, run)
        return
    if run is not None:
        refuse_to_replace(run)
    exporter, progress = wanted_exporter(), Progress(job)
    run = run or new_run(RUNS, job.name, n_bytes=needed.disk_bytes if needed is not None else 0)
    progress.starts(run, resumed=resume is not None)
    with exporting(exporter, run.id), work():
        try:
            report = fit(job, run, watcher=progress, resume=resume is not None, stop_on_alarm=stop_on_alarm)
        except RunStopped as stopped:
            said = progress.stopped(stopped.run_id, stopped.why)
            code = STOPPED if type(stopped) is RunStopped else FAILED
            raise CommandEnded(code, type(stopped).__name__, said) from None
    progress.close()
    if json:
        print_json(report)
    else:
        print_report(report, run)


def _same_graph(graph: str | None, made_by: dict[str, object]) -> str:
    """The run's own graph; another one is refused, and so is a run that is no fit."""
    if "life" not in made_by:
        raise ConfigError("--resume goes on with a fit, and that run is an evaluation or a check. Make it again.")
    own, attribute = Path(str(made_by["graph"])), made_by.get("attribute")
    if graph is not None:
        from agenttrain.graph.load import place_of

        place = place_of(graph, Path.cwd())
        if place.file != own or place.attribute not in (None, attribute):
            raise ConfigError(
                f"--resume goes on with the run's own graph, {own}:{attribute}, and {graph} is another. Leave it out."
            )
    return str(own) if attribute is None else f"{own}:{attribute}"
