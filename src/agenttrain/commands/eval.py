"""`agenttrain eval`: the graph on tasks once more, with a policy, the user's own models, or another chat model."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import RUNS, Engine, Graph, Json, Model, Seed, Set, flag_tables, print_json, work
from agenttrain.errors import ConfigError, RunError

if TYPE_CHECKING:
    from agenttrain.config import Config
    from agenttrain.protocols import InPlace
    from agenttrain.run_folder import RunFolder

PROVIDER_MODEL = re.compile(r"[a-z][a-z0-9_]+:[^/\s].*")
"""As LangChain's init_chat_model takes it."""
NO_SCHEME = re.compile(r"[\w.-]+:\d+(/\S*)?|[\w.-]+\.[\w.-]+/v\d+/?")
"""An address that begins with its host."""
ACCEPTED = (
    "base, as-is, a run's id or path, a policy's folder, an address (http://…/v1) or provider:model "
    "(openai:gpt-4o-mini)"
)


def eval_command(
    graph: Graph,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            help="Who answers: base, a run's id or path, a policy's folder, as-is (the user's own models), an "
            "OpenAI-compatible address (http://…/v1), or provider:model.",
        ),
    ] = "base",
    chat_model: Annotated[
        str | None, typer.Option("--chat-model", help="The model's name at an address that lists several.")
    ] = None,
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
    from agenttrain.commands.progress import Progress
    from agenttrain.evaluation import evaluate
    from agenttrain.exporters import exporting, wanted_exporter
    from agenttrain.prepare import prepare
    from agenttrain.run_folder import new_run

    if split not in (None, "train", "held_out"):
        raise ConfigError(f"--split is {split!r}; it takes train or held_out.")
    chosen = _chosen(run, chat_model=chat_model, model=model, engine=engine)
    flags = flag_tables(
        set_, model=chosen.policy, seed=seed, engine__name=engine, eval__repeats=repeats, eval__temperature=temperature
    )
    job = prepare(
        graph,
        cwd=Path.cwd(),
        flags=_with_tasks(flags, tasks),
        evaluated_run=chosen.of_run,
        in_place=chosen.in_place,
        task_file=tasks,
        split=split,
    )
    exporter, progress = wanted_exporter(), Progress(job)
    folder = new_run(RUNS, f"eval-{job.name}")
    progress.starts_evaluation(folder)
    with exporting(exporter, folder.id), work(), closing(progress):
        report = evaluate(job, folder, watcher=progress)
    _tell(report, folder, as_json=json)


def _with_tasks(flags: dict[str, Any], tasks: Path | None) -> dict[str, Any]:
    """The same; of a task file all rows are evaluated, unless it is said how many."""
    from agenttrain.tasks import read_tasks

    if tasks is not None and "tasks" not in flags.get("eval", {}):
        flags.setdefault("eval", {})["tasks"] = len(read_tasks(tasks))
    return flags


def _tell(report: dict[str, Any], folder: RunFolder, *, as_json: bool) -> None:
    from agenttrain.commands.progress import print_evaluation

    if as_json:
        print_json({**{k: v for k, v in report.items() if k != "result"}, **report["result"]})
    else:
        print_evaluation(report, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Who answers."""

    policy: str | None = None
    """Folder whose weights are evaluated. None: of the configured model, or none are."""
    of_run: dict[str, Any] | None = None
    """The tables that they were trained with. None: today's files."""
    in_place: Callable[[Config], InPlace] | None = None
    """What answers in the policy's place. None: the policy does."""


def _chosen(run: str, *, chat_model: str | None, model: str | None, engine: str | None) -> _Chosen:
    """Who --run names.

    Raises:
        ConfigError: options that don't go together.
        RunError: it names nobody.
    """
    is_address = run.startswith(("http://", "https://"))
    if chat_model is not None and not is_address:
        raise ConfigError(f"--chat-model names a model at an address, and --run is {run!r}. Give --run http://…/v1.")
    if run == "base":
        return _Chosen(policy=model)
    if run == "as-is":
        from agenttrain.prepare import as_is

        return _Chosen(policy=model, in_place=as_is)
    if model is not None:
        raise ConfigError(f"--model and --run {'RUN' if not is_address else run} both name weights. Keep one.")
    if is_address:
        return _Chosen(in_place=_at(run, chat_model, engine))
    return _of_name(run, engine)


def _of_name(run: str, engine: str | None) -> _Chosen:
    from agenttrain.run_folder import find_run

    try:
        folder = find_run(run, RUNS)
    except RunError as error:
        if (Path(run) / "config.json").is_file():
            return _Chosen(policy=str(Path(run).resolve()))
        if NO_SCHEME.fullmatch(run):
            raise ConfigError(f"--run {run} is an address without its scheme. Did you mean http://{run}?") from None
        if PROVIDER_MODEL.fullmatch(run):
            return _Chosen(in_place=_named(run, engine))
        raise RunError(f"{error} --run takes {ACCEPTED}.") from None
    tables, made_by = folder.read_config()
    if "life" not in made_by:
        raise ConfigError(f"{folder.id} is no fit and has no policy. Name the run of a fit with --run.")
    if not folder.policy.is_dir():
        raise ConfigError(f"{folder.id} has no policy/ yet: the run has not ended. agenttrain fit --resume {folder.id}")
    return _Chosen(policy=str(folder.policy), of_run=tables)


def _at(address: str, name: str | None, engine: str | None) -> Callable[[Config], InPlace]:
    from agenttrain.graph.chosen_model import model_at

    _refuse_engine(address, engine)
    return lambda config: model_at(
        address, name=name, temperature=config.eval.temperature, seconds=config.limits.seconds
    )


def _named(text: str, engine: str | None) -> Callable[[Config], InPlace]:
    from agenttrain.graph.chosen_model import model_named

    _refuse_engine(text, engine)
    return lambda config: model_named(text, temperature=config.eval.temperature)


def _refuse_engine(run: str, engine: str | None) -> None:
    if engine is not None:
        raise ConfigError(f"--engine {engine} answers for a policy, and --run {run} is none. Leave --engine out.")
