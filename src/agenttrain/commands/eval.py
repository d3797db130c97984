"""`agenttrain eval`: the graph on tasks once more, with the base, a trained policy, or the user's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agenttrain.commands.arguments import RUNS, Engine, Graph, Json, Model, Seed, Set, flag_tables, print_json, work
from agenttrain.errors import ConfigError


def eval_command(
    graph: Graph,
    run: Annotated[
        str, typer.Option("--run", help="Whose weights: a run's id or path, base, or as-is (the user's own models).")
    ] = "base",
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="Task file; all its rows unless --split is given.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="train or held_out.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Rollouts of each task.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    engine: Engine = None,
    model: Model = None,
    seed: Seed = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Roll out tasks and report; writes a RUN of its own."""
    from agenttrain.commands.progress import Progress, print_evaluation
    from agenttrain.evaluation import evaluate
    from agenttrain.exporters import exporting, wanted_exporter
    from agenttrain.prepare import prepare
    from agenttrain.run_folder import new_run
    from agenttrain.tasks import read_tasks

    if split not in (None, "train", "held_out"):
        raise ConfigError(f"--split is {split!r}; it takes train or held_out.")
    policy, of_run = _policy_of(run, model)
    flags = flag_tables(
        set_,
        model=policy,
        seed=seed,
        engine__name=engine,
        eval__repeats=repeats,
        eval__temperature=temperature,
    )
    if tasks is not None and "tasks" not in flags.get("eval", {}):
        flags.setdefault("eval", {})["tasks"] = len(read_tasks(tasks))
    job = prepare(
        graph,
        cwd=Path.cwd(),
        flags=flags,
        evaluated_run=of_run,
        needs_policy=run != "as-is",
        task_file=tasks,
        split=split,
    )
    exporter, progress = wanted_exporter(), Progress(job)
    folder = new_run(RUNS, f"eval-{job.name}")
    progress.starts_evaluation(folder)
    with exporting(exporter, folder.id), work():
        report = evaluate(job, folder, watcher=progress)
    progress.close()
    if json:
        print_json({**{k: v for k, v in report.items() if k != "result"}, **report["result"]})
    else:
        print_evaluation(report, folder)


def _policy_of(run: str, model: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """(folder whose weights are evaluated, the tables that they were trained with).

    None for the configured model, and for the configuration of today's files.
    """
    from agenttrain.run_folder import find_run

    if run in ("base", "as-is"):
        return model, None
    if model is not None:
        raise ConfigError("--model and --run RUN both name weights. Keep one.")
    folder = find_run(run, RUNS)
    tables, made_by = folder.read_config()
    if "life" not in made_by:
        raise ConfigError(f"{folder.id} is no fit and has no policy. Name the run of a fit with --run.")
    if not folder.policy.is_dir():
        raise ConfigError(f"{folder.id} has no policy/ yet: the run has not ended. agenttrain fit --resume {folder.id}")
    return str(folder.policy), tables
