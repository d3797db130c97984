"""A user's arguments become a Job and findings: what `prepare` would refuse first is collected whole.

What leaves nothing to look at (no such file, a graph that can't be built, a key that isn't known) is raised as by any
other command; all else is found, and the job goes as far as it can.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agenttrain.check.finding import Finding, error, warning
from agenttrain.check.policy_findings import PolicyFound, policy_of
from agenttrain.check.sandbox_findings import isolation_findings
from agenttrain.check.shape_findings import selector_findings, shape_findings, undeclared_models
from agenttrain.check.task_findings import Rows, rows_of
from agenttrain.check.tool_findings import declaration_findings
from agenttrain.config import Config
from agenttrain.errors import AgenttrainError, ModelError, RunError
from agenttrain.forecast import TIGHT_NOTE, forecast
from agenttrain.graph.human import check_on_interrupt
from agenttrain.graph.load import LoadedGraph
from agenttrain.graph.models import models_of, nodes_of
from agenttrain.graph.roles import Identity
from agenttrain.graph.shape import GraphShape, shape_of
from agenttrain.graph.tools import tools_of
from agenttrain.graph.world import check_setup
from agenttrain.plugins import Plugins
from agenttrain.prepare import Job, configured
from agenttrain.protocols import EngineContext, Forecast, TrainerCheckContext
from agenttrain.records import Isolation, Task
from agenttrain.reward.score import check_seconds, check_verifiers
from agenttrain.rollout import sandbox_maker
from agenttrain.run_folder import check_place
from agenttrain.trainable import Part, Trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that can be told before anything runs."""

    job: Job
    """Its graph has a verifier that gives 0 where the user's has none."""
    can_try: bool
    """A policy, a template, an engine and a task are there, so that rollouts can be made."""
    to_try: tuple[Task, ...]
    shape: GraphShape
    models: tuple[Identity, ...]
    """Chat models of the code, where nothing is declared of them."""
    tools: tuple[str, ...]
    """Names of those that can be seen."""
    verifiers: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    missing_keys: tuple[str, ...]
    """Notes on required keys that no task gives, which a trial may answer."""
    isolation: Isolation | None
    """Of the sandbox. None: there is none, or none can be made."""
    forecast: Forecast | None
    """None: the trainer doesn't say, or it can't be asked."""


def prepared(target: str, *, cwd: Path, flags: Mapping[str, Any], runs: Path) -> Prepared:
    """Look at everything but a rollout; nothing is written.

    Args:
        target: graph.py, graph.py:attribute, a name in langgraph.json, or a folder with one.
        flags: tables that the command line set.
        runs: where runs are written.

    Raises:
        AgenttrainError: what leaves nothing to look at.
    """
    loaded, plugins, config = configured(target, cwd=cwd, flags=flags)
    noted = loaded.trainable
    with loaded.open() as graph:
        shape, nodes, models, tools = shape_of(graph), nodes_of(graph), models_of(graph), tools_of(graph)
        schemas = graph.input_schema() or {}, graph.context_schema()
    rows = rows_of(config.tasks, n_evaluated=config.eval.tasks, input_schema=schemas[0], context_schema=schemas[1])
    policy = policy_of(config)
    job = _job(config, loaded, plugins, rows, policy)
    selectors, selector_notes = selector_findings(noted, nodes)
    declared, tool_notes = declaration_findings(noted.tools if noted is not None else {}, tools)
    functions = list(_function_findings(noted, config))
    engine, engine_notes = _engine(job)
    trainer, trainer_notes = _trainer(job)
    needed, room = _room(job, runs)
    to_try = rows.to_try()
    sandbox, isolation = isolation_findings(sandbox_maker(config, loaded, plugins), next(iter(to_try), None))
    broken = (
        any(finding.code == "function_refused" for finding in functions)
        or bool(engine)
        or any(map(_is_error, (*sandbox, *declared)))
    )
    return Prepared(
        job=job,
        can_try=policy.renderer is not None and bool(to_try) and not broken,
        to_try=to_try,
        shape=shape,
        models=undeclared_models(models, noted),
        tools=tuple(tools),
        verifiers=tuple(noted.verifiers) if noted is not None else (),
        findings=(
            *shape_findings(shape, noted),
            *selectors,
            *functions,
            *declared,
            *sandbox,
            *rows.findings,
            *policy.findings,
            *engine,
            *trainer,
            *room,
        ),
        notes=(*loaded.notes, *selector_notes, *tool_notes, *engine_notes, *trainer_notes, *_other_notes(needed)),
        missing_keys=rows.notes,
        isolation=isolation,
        forecast=needed,
    )


def _job(config: Config, loaded: LoadedGraph, plugins: Plugins, rows: Rows, policy: PolicyFound) -> Job:
    noted = loaded.trainable or Trainable(target=loaded.target, file=str(loaded.file))
    if not noted.verifiers:
        noted = replace(noted, verifiers={"none": Part(_no_verifier)})
    return Job(
        config=config,
        loaded=replace(loaded, trainable=noted),
        plugins=plugins,
        train=rows.train,
        held_out=rows.held_out,
        model=policy.model,
        renderer=policy.renderer,
    )


def _is_error(finding: Finding) -> bool:
    return finding.severity == "error"


def _no_verifier(task: Task, state: Any) -> float:
    """Stands where the user has no verifier, so that rollouts can be looked at."""
    return 0.0


def _check_verifier(name: str, part: Part, noted: Trainable, config: Config) -> None:
    check_verifiers({name: part})
    if noted.sandbox is not None:
        check_seconds({name: part}, timeout_s=config.limits.verifier_seconds, limits=noted.sandbox.limits)


def _function_findings(noted: Trainable | None, config: Config) -> Iterator[Finding]:
    """What would only fail when the first rollout asks for it."""
    if noted is None or not noted.verifiers:
        yield error("no_verifier", "@trainable", "No verifier is named, and without one no rollout has a reward.")
    if noted is None:
        return
    checks: list[tuple[str, Any]] = [
        (f"verifier {name}", functools.partial(_check_verifier, name, part, noted, config))
        for name, part in noted.verifiers.items()
    ]
    if noted.setup is not None:
        checks.append(("setup=", lambda: check_setup(noted.setup)))
    if noted.on_interrupt is not None:
        checks.append(("on_interrupt=", lambda: check_on_interrupt(noted.on_interrupt)))
    for where, check in checks:
        try:
            check()
        except AgenttrainError as refused:
            yield error("function_refused", where, str(refused))


def _engine(job: Job) -> tuple[list[Finding], tuple[str, ...]]:
    if job.model is None:
        return [], ()
    try:
        return [], tuple(job.plugins.check_engine(EngineContext(config=job.config, model=str(job.model))))
    except AgenttrainError as refused:
        return [error("engine_refused", job.config.engine.name, str(refused))], ()


def _trainer(job: Job) -> tuple[list[Finding], tuple[str, ...]]:
    if job.model is None:
        return [], ()
    context = TrainerCheckContext(
        config=job.config, model=str(job.model), graph_file=str(job.loaded.file), n_tasks=len(job.train)
    )
    try:
        return [], tuple(job.plugins.check_trainer(context))
    except AgenttrainError as refused:
        return [error("trainer_refused", job.config.trainer.name, str(refused))], ()


def _other_notes(needed: Forecast | None) -> list[str]:
    return [note for note in needed.notes if not note.startswith(TIGHT_NOTE)] if needed is not None else []


def _room(job: Job, runs: Path) -> tuple[Forecast | None, list[Finding]]:
    """What a fit needs, and whether memory and disk have it."""
    needed, found = None, []
    try:
        needed = forecast(job)
    except ModelError as refused:
        found.append(error("memory", "this machine", str(refused)))
    except AgenttrainError as refused:
        found.append(error("trainer_refused", job.config.trainer.name, str(refused)))
    if needed is not None:
        found += [warning("memory", "this machine", note) for note in needed.notes if note.startswith(TIGHT_NOTE)]
    try:
        check_place(runs, n_bytes=needed.disk_bytes if needed is not None else 0)
    except RunError as refused:
        found.append(error("disk", str(runs), str(refused)))
    return needed, found
