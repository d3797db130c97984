"""A whole check: what can be told before anything runs, a trial where one can be made, findings, a verdict, a RUN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.check.calls import Calls, calls_of, own_calls_note, roles_by_node
from agenttrain.check.drawing import RolesByNode, mermaid
from agenttrain.check.finding import Finding
from agenttrain.check.prepared import Prepared
from agenttrain.check.reward_findings import reward_findings
from agenttrain.check.sandbox_findings import tampering_findings
from agenttrain.check.shape_findings import second_model_findings, waiting_places
from agenttrain.check.tool_findings import tool_notes, undeclared_findings
from agenttrain.check.trial import Trial, trial_tasks, tried
from agenttrain.check.trial_findings import never_began, respelling_notes, trial_findings
from agenttrain.check.verdict import Verdict, verdict_of
from agenttrain.evaluation import Watcher
from agenttrain.graph.shape import GraphShape
from agenttrain.prepare import provenance
from agenttrain.records import RolloutResult
from agenttrain.reward.status import may_train
from agenttrain.run_folder import RunFolder
from agenttrain.trainer.algorithms import chosen

N_TASKS, N_SIBLINGS = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All that a check says."""

    run_id: str
    graph: str
    findings: tuple[Finding, ...]
    """Errors first."""
    notes: tuple[str, ...]
    verdict: Verdict
    shape: GraphShape
    calls: tuple[Calls, ...]
    """Empty where no rollout was made."""
    trial: Trial | None
    """None: no rollout could be made; the findings say why."""

    @property
    def roles(self) -> RolesByNode:
        return roles_by_node(self.calls, self.shape.nodes)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` and report.json hold it."""
        trial = self.trial
        return {
            "run_id": self.run_id,
            "graph": self.graph,
            "ready": self.verdict.ready,
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": list(self.notes),
            "verdict": self.verdict.as_dict(),
            "calls": [calls.as_dict() for calls in self.calls],
            "trial": None
            if trial is None
            else {"rollouts": len(trial.results), "siblings": trial.siblings, "wall_s": round(trial.wall_s, 3)},
            "mermaid": mermaid(self.shape, self.roles),
        }

    def as_markdown(self) -> str:
        """report.md of the run."""
        but = f", but {self.verdict.but}" if self.verdict.but else ""
        lines = [f"# {self.run_id}", "", f"{self.graph}: {'ready' if self.verdict.ready else 'not ready'}{but}.", ""]
        lines += [f"- {line}" for line in self.verdict.lines()]
        for finding in self.findings:
            lines += ["", f"## {finding.severity} `{finding.code}`: {finding.where}", "", finding.cause, ""]
            lines.append(f"Fix: {finding.fix}")
        lines += ["", *(f"Note: {note}" for note in self.notes), "", "```mermaid", mermaid(self.shape, self.roles)]
        return "\n".join([*lines, "```", ""])


def checked(
    prepared: Prepared, run: RunFolder, *, n_tasks: int = N_TASKS, siblings: int = N_SIBLINGS, watcher: Watcher
) -> Checked:
    """Try what was prepared and say what was found; the run folder holds it when this returns.

    Raises:
        EngineError: the engine has failed.
        KeyboardInterrupt: Ctrl-C; the rollouts that were made stand in the folder.
    """
    job = prepared.job
    run.write_config(job.config.model_dump(), provenance(job))
    trial = None
    if prepared.can_try:
        tasks = trial_tasks(prepared.to_try, n_tasks)
        trial = tried(job, run, tasks=tasks, siblings=siblings, watcher=watcher)
    results = trial.results if trial is not None else ()
    findings = tuple(
        replace(found, fix=found.fix.replace("inspect RUN", f"inspect {run.id}"))
        for found in _findings(prepared, trial)
    )
    said = Checked(
        run_id=run.id,
        graph=job.loaded.name,
        findings=findings,
        notes=(
            *prepared.notes,
            *_missing_keys(prepared, results),
            *own_calls_note(results),
            *tool_notes(results),
            *_undeclared(prepared, results)[1],
            *respelling_notes(results),
        ),
        verdict=verdict_of(prepared, trial, findings),
        shape=prepared.shape,
        calls=calls_of(results),
        trial=trial,
    )
    run.write_report(said.as_dict(), said.as_markdown())
    return said


def _missing_keys(prepared: Prepared, results: Sequence[RolloutResult]) -> tuple[str, ...]:
    """Notes on keys that no task gives; none where the graph ran to its end without them, and nowhere failed."""
    statuses = {result.rollout.status for result in results}
    came_through = bool(statuses & {"completed", "truncated"}) and all(map(may_train, statuses))
    return () if came_through else prepared.missing_keys


def _undeclared(prepared: Prepared, results: Sequence[RolloutResult]) -> tuple[list[Finding], tuple[str, ...]]:
    noted = prepared.job.loaded.trainable
    return undeclared_findings(noted.tools if noted is not None else {}, prepared.tools, results)


def _findings(prepared: Prepared, trial: Trial | None) -> tuple[Finding, ...]:
    """All of them: errors first, each code's own order kept; what happened goes before what was only expected.

    A warning of what an error tells of the same place is left out.
    """
    found = [*prepared.findings]
    called = trial.second_models if trial is not None else ()
    found += second_model_findings(prepared.models, called, one=trial.one_model if trial is not None else None)
    found += _undeclared(prepared, trial.results if trial is not None else ())[0]
    if trial is not None:
        happened = trial_findings(trial, prepared.job.loaded.name, waits=waiting_places(prepared.shape))
        happened += tampering_findings(trial.results)
        if prepared.verifiers:
            begun = [result for result in trial.results if not never_began(result)]
            learns_from = chosen(prepared.job.config.trainer).learns_from
            happened += reward_findings(
                begun, ", ".join(prepared.verifiers), renderer=prepared.job.renderer, learns_from=learns_from
            )
        codes = {finding.code for finding in happened if finding.severity == "error"}
        found = [each for each in found if each.severity == "error" or each.code not in codes] + happened
    told = {(finding.code, finding.where) for finding in found if finding.severity == "error"}
    found = [each for each in found if each.severity == "error" or (each.code, each.where) not in told]
    return tuple(sorted(found, key=lambda finding: finding.severity))
