"""The regression set, rolled out by one policy: case by case whether it passes, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agenttrain.capture.render import open_renderer
from agenttrain.capture.store import read_store
from agenttrain.errors import TrainerError
from agenttrain.evaluation import Watcher, evaluate
from agenttrain.prepare import Job
from agenttrain.promotion.summary import last_attempts
from agenttrain.records import Rollout, Task
from agenttrain.run_folder import REPLAY, RunFolder, new_run
from agenttrain.tasks import check_against_schema

CaseOutcome = Literal["passed", "failed", "unmeasured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a policy did on the cases."""

    run_id: str | None
    """Of the run that `agenttrain inspect` opens. None: there was no case, and nothing ran."""
    outcomes: Mapping[str, CaseOutcome]
    """Case id to its outcome, in the order of the cases."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Of each case that is unmeasured: what its environment failed of."""


def replayed(job: Job, cases: Sequence[Task], *, policy: Path | None, runs: Path, watcher: Watcher) -> Replay:
    """Roll the cases out: as `agenttrain eval` would, at the job's eval.temperature and eval.repeats.

    Args:
        job: of the graph, checked; its own tasks are left alone.
        policy: folder of the weights, such as a run's policy/. None: the job's model.
        runs: where the run's folder is made.

    Raises:
        TaskError: a case that the graph takes no longer.
        AgenttrainError: the policy can't be loaded, or the engine fails.
    """
    if not cases:
        return Replay(run_id=None, outcomes={})
    of_cases = job_at(job, cases, policy)
    run = new_run(runs, f"{REPLAY}{job.name}")
    try:
        evaluate(of_cases, run, watcher=watcher)
    except TrainerError:
        if not _failed_all(run):
            raise
    return _replay(run, cases, of_cases.config.eval.repeats)


def outcome_of(successes: Iterable[bool | None], repeats: int) -> CaseOutcome:
    """Whether a case passes: where at least half of its repeats succeed, whatever those that failed to the end were.

    Args:
        successes: of each repeat that ran; None where its environment failed to the end.
        repeats: times it was to be run; one that never ran is as one whose environment failed.

    Example: of two repeats: one success and one None -> "passed"; one failure and one None -> "unmeasured", since the
    other might have succeeded; two failures -> "failed".
    """
    seen = [success for success in successes if success is not None]
    n_won, n_unmeasured = sum(seen), repeats - len(seen)
    if 2 * n_won >= repeats:
        return "passed"
    return "unmeasured" if 2 * (n_won + n_unmeasured) >= repeats else "failed"


def job_at(job: Job, cases: Sequence[Task], policy: Path | None) -> Job:
    """The job with the cases in place of its tasks, and the policy in place of its model."""
    with job.loaded.open() as graph:
        check_against_schema(cases, graph.input_schema() or {}, graph.context_schema())
    job = replace(job, train=(), held_out=tuple(cases), notes=())
    if policy is None:
        return job
    table = job.config.renderer.model_copy(update=_renderer_table(policy))
    config = job.config.model_copy(update={"model": str(policy), "renderer": table})
    renderer = open_renderer(str(policy), family=table.family, history=table.history)
    return replace(job, config=config, model=policy, renderer=renderer)


def _renderer_table(policy: Path) -> Mapping[str, Any]:
    """How the run that trained a policy wrote its messages; nothing where no run stands around it."""
    run = RunFolder(policy.parent)
    if not (run.path / "config.toml").is_file():
        return {}
    table: Mapping[str, Any] = run.read_config()[0].get("renderer", {})
    return table


def _failed_all(run: RunFolder) -> bool:
    """Whether the environment failed in every rollout: then every case is unmeasured, which is what is told."""
    rollouts = read_store(run.rollouts).rollouts()
    return bool(rollouts) and all(rollout.reward is None for rollout in rollouts)


def _replay(run: RunFolder, cases: Sequence[Task], repeats: int) -> Replay:
    by_task: dict[str, list[Rollout]] = {case.id: [] for case in cases}
    for rollout in last_attempts(read_store(run.rollouts).rollouts()):
        by_task[rollout.task_id].append(rollout)
    outcomes = {
        id: outcome_of([each.success if each.reward is not None else None for each in rollouts], repeats)
        for id, rollouts in by_task.items()
    }
    causes = {
        id: next((each.cause for each in by_task[id] if each.reward is None), "it never ran")
        for id, outcome in outcomes.items()
        if outcome == "unmeasured"
    }
    return Replay(run_id=run.id, outcomes=outcomes, causes=causes)
