"""A candidate becomes a verdict: every rule held against it and against what serves now.

Measures what the rules ask for, and writes nothing but the runs of its own evaluations. The evidence comes first, and
without it nothing else is checked. What can't be measured is an error, never a pass; once the exported weights fail, it
is told as not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agenttrain.errors import AgenttrainError, ModelError, PromotionError, RunError
from agenttrain.evaluated import read_evaluation
from agenttrain.evaluation import Watcher, declared_verifiers, evaluate
from agenttrain.export.exporting import export_check
from agenttrain.folder_hash import policy_hash
from agenttrain.gate.candidate import Candidate
from agenttrain.gate.replay import Replay, job_at, replayed
from agenttrain.promotion import rules
from agenttrain.promotion.accepted_policy import refuse_changed
from agenttrain.promotion.cases import RegressionSet
from agenttrain.promotion.comparison import Compared, compared, lost_places, mean_bound, ratio_bound
from agenttrain.promotion.ledger import Ledger, serving_now
from agenttrain.promotion.measures import Evaluation
from agenttrain.promotion_record import BASE, LedgerEntry, Promotion, RuleResult
from agenttrain.records import Task
from agenttrain.run_folder import RunFolder, new_run
from agenttrain.tasks import read_tasks

COMPARED = ("difference", "slices", "safety", "cost", "latency")
"""Rules that hold the candidate's evaluation against the incumbent's."""


class GateWatcher(Watcher, Protocol):
    """Who shows what the gate is at."""

    def doing(self, what: str) -> None:
        """The next rollouts, or the next work, are of this."""

    def stops(self, why: str) -> None:
        """Nothing more is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """What serves now, and its evaluation on the candidate's tasks."""

    name: str
    """Run id, or `BASE`."""
    evaluation: Evaluation
    source: str
    """Where the evaluation comes from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Every rule held against a candidate, and what they were held by."""

    promotion: Promotion
    entries: tuple[LedgerEntry, ...]
    """Of the ledger, on which this was decided."""
    incumbent: Incumbent | None = None
    """None: the evidence does not hold, and nothing was compared."""
    compared: Compared | None = None
    regression: Replay | None = None
    """Of the candidate. None: its policy can't be asked."""
    replay: Replay | None = None
    """Of what serves since. None: it was not accepted."""

    @property
    def results(self) -> tuple[RuleResult, ...]:
        return self.promotion.results

    @property
    def passed(self) -> bool:
        return self.promotion.passed


@dataclass(slots=True, kw_only=True)
class Gate:
    """What the rules of one promotion are measured with."""

    candidate: Candidate
    ledger: Ledger
    runs: Path
    watcher: GateWatcher
    incumbent: Incumbent | None = None
    compared: Compared | None = None
    regression: Replay | None = None

    def verdict(self) -> Verdict:
        """Hold the candidate against every rule.

        Raises:
            PromotionError: the ledger is damaged or of another graph, what serves is not as it was promoted, or a case
                can't be measured.
            AgenttrainError: an evaluation failed.
        """
        candidate, entries = self.candidate, self.ledger.entries()
        refuse_foreign(self.ledger, entries, candidate)
        now = self._serving(entries)
        evidence = rules.evidence(
            candidate.report,
            then=candidate.hashes_then,
            now=candidate.hashes_now,
            written_since=candidate.written_since,
        )
        if candidate.report is None or not evidence.passed:
            why = "the run has not ended" if candidate.report is None else "the evidence does not hold"
            self.watcher.stops(f"evidence: {evidence.figure}. Nothing else is checked.")
            missing = [rule for rule in rules.EXIT_CODES if rule not in ("evidence", "replay")]
            results = [evidence, *(rules.unchecked(rule, why) for rule in missing)]
            return Verdict(promotion=self._promotion(results, now), entries=entries)
        results = [evidence, *self._measured(candidate.report, now)]
        promotion = self._promotion(results, now)
        vetoes = rules.veto(candidate.job.plugins.vetoes(promotion))
        return Verdict(
            promotion=replace(promotion, results=(*promotion.results, vetoes)),
            entries=entries,
            incumbent=self.incumbent,
            compared=self.compared,
            regression=self.regression,
        )

    def _serving(self, entries: Sequence[LedgerEntry]) -> LedgerEntry | None:
        """The line of what serves. None: the base that the candidate was trained from.

        Raises:
            PromotionError: it is not as it was accepted.
        """
        now = serving_now(entries)
        if now is None:
            return None
        refuse_changed(now)
        own_base = self.candidate.job.model
        is_own = now.run_id == BASE and own_base is not None and policy_hash(own_base) == now.weights
        return None if is_own else now

    def _measured(self, report: Mapping[str, Any], now: LedgerEntry | None) -> Iterator[RuleResult]:
        """Every rule that measures something, in any order."""
        table, steps = self.candidate.job.config.promotion, self.candidate.run.metrics()
        export = self._export()
        yield export
        yield from _tried(COMPARED, lambda: self._compared(now), must=export.passed)
        yield from _tried(("regression",), lambda: [self._regression(now)], must=export.passed)
        yield rules.alarms(report)
        yield rules.logprob_gap(report, steps, max_gap=table.max_logprob_gap)

    def _promotion(self, results: Sequence[RuleResult], now: LedgerEntry | None) -> Promotion:
        return Promotion(
            graph=self.candidate.job.loaded.name,
            run_id=self.candidate.run.id,
            policy=self.candidate.run.policy,
            incumbent=now.run_id if now is not None else BASE,
            report=self.candidate.report or {},
            results=tuple(sorted(results, key=lambda each: rules.EXIT_CODES[each.rule])),
        )

    def _export(self) -> RuleResult:
        self.watcher.doing("the exported weights, loaded anew")
        try:
            return rules.export(
                export_check(self.candidate.run, n_turns=self.candidate.job.config.promotion.check_turns)
            )
        except ModelError as error:
            return rules.unchecked("export", str(error))

    def _compared(self, now: LedgerEntry | None) -> list[RuleResult]:
        job, table = self.candidate.job, self.candidate.job.config.promotion
        other = self._priced(read_evaluation(self.candidate.run))
        if lost := _n_gone(other):
            raise RunError(
                f"The store of {other.run_id} lacks {lost} rollouts of its evaluation, of which nothing can be said: "
                f"files of {self.candidate.run.rollouts} are gone. Put them back from a copy, or fit again."
            )
        self.incumbent = self._incumbent(now, other)
        base = self._priced(self.incumbent.evaluation)
        self.compared = compared(base, other)
        declared = [name for name, part in declared_verifiers(job).items() if part.kind == "safety"]
        return [
            rules.difference(self.compared, min_difference=table.min_difference, lost=lost_places(base, other)),
            rules.slices(self.compared, slice_loss=table.slice_loss),
            rules.safety(base, other, declared=declared),
            rules.cost(
                mean_bound(other, "cost"),
                ratio_bound(base, other, "cost"),
                max_cost=table.max_cost,
                max_cost_ratio=table.max_cost_ratio,
            ),
            rules.latency(
                mean_bound(other, "seconds"),
                ratio_bound(base, other, "seconds"),
                max_seconds=table.max_seconds,
                max_seconds_ratio=table.max_seconds_ratio,
            ),
        ]

    def _priced(self, evaluation: Evaluation) -> Evaluation:
        """By the prices of today, whenever it was made."""
        return replace(evaluation, tables={**evaluation.tables, "cost": self.candidate.job.config.cost.model_dump()})

    def _incumbent(self, now: LedgerEntry | None, other: Evaluation) -> Incumbent:
        if now is None:
            baseline = read_evaluation(self.candidate.run, baseline=True)
            return Incumbent(name=BASE, evaluation=baseline, source="the run's own baseline")
        policy = Path(now.policy)
        kept, why = _kept_evaluation(RunFolder(policy.parent), other)
        if now.run_id == BASE:
            kept, why = None, "it is another base than the candidate was trained from"
        if kept is None:
            kept = self._evaluated_anew(now.run_id, policy, other, why)
        return Incumbent(name=now.run_id, evaluation=kept, source=f"evaluated anew: {why}" if why else "its own run")

    def _evaluated_anew(self, run_id: str, policy: Path, other: Evaluation, why: str) -> Evaluation:
        """What serves now on the candidate's tasks, by the candidate's settings and seeds."""
        self.watcher.doing(f"{run_id}, which serves now, evaluated anew: {why}")
        job = job_at(self.candidate.job, other.tasks, policy)
        run = new_run(self.runs, f"eval-{job.name}")
        report = evaluate(job, run, watcher=self.watcher)
        loud = [alarm["message"] for alarm in report["alarms"] if alarm["severity"] == "loud"]
        if loud:
            raise RunError(
                f"{run.id}, the evaluation of what serves now, is no measure of it: {loud[0]} Mend that, then promote "
                "again."
            )
        return read_evaluation(run)

    def _regression(self, now: LedgerEntry | None) -> RuleResult:
        """Both policies on the regression set."""
        cases = RegressionSet(self.ledger.folder, read_tasks).tasks()
        policy = Path(now.policy) if now is not None else None
        before = self._replayed(cases, policy, "the regression set, by what serves now")
        self.regression = after = self._replayed(
            cases, self.candidate.run.policy, "the regression set, by the candidate"
        )
        _refuse_unmeasured(before, after)
        return rules.regression(passes_of(before), passes_of(after))

    def _replayed(self, cases: Sequence[Task], policy: Path | None, what: str) -> Replay:
        if cases:
            self.watcher.doing(what)
        return replayed(self.candidate.job, cases, policy=policy, runs=self.runs, watcher=self.watcher)


def _tried(of_rules: Sequence[str], measure: Callable[[], list[RuleResult]], *, must: bool) -> list[RuleResult]:
    """What the rules came to; what can't be measured is an error, or where it needn't be measured, no pass."""
    try:
        return measure()
    except AgenttrainError as error:
        if must:
            raise
        return [rules.unchecked(rule, str(error)) for rule in of_rules]


def _kept_evaluation(run: RunFolder, other: Evaluation) -> tuple[Evaluation | None, str]:
    """(what serves now on the candidate's tasks, as its own run measured it, or None, and why not)."""
    try:
        kept = read_evaluation(run)
    except RunError:
        return None, "its own evaluation isn't there any more"
    if lost := _n_gone(kept):
        return None, f"its own evaluation lacks {lost} rollouts"
    unlike = [what for what, of in _MUST_FIT.items() if of(kept) != of(other)]
    return (None, f"its own evaluation had other {', '.join(unlike)}") if unlike else (kept, "")


def _n_gone(evaluation: Evaluation) -> int:
    """Places of an evaluation of which the store has no rollout; one whose environment failed has one."""
    return len(evaluation.tasks) * evaluation.repeats - len(evaluation.rollouts)


_MUST_FIT: Mapping[str, Callable[[Evaluation], Any]] = {
    "tasks": lambda each: {task.id: (task.input, task.reference, task.metadata, task.context) for task in each.tasks},
    "verifiers": lambda each: each.hashes.get("verifier"),
    "graph": lambda each: each.hashes.get("graph"),
    "template": lambda each: each.hashes.get("renderer"),
    "temperature": lambda each: each.temperature,
    "repeats": lambda each: each.repeats,
    "seed": lambda each: each.seed if each.temperature > 0 else None,
    "limits": lambda each: each.tables.get("limits"),
}
"""What two evaluations must have in common for their difference to be that of their policies."""


def passes_of(replay: Replay) -> dict[str, bool]:
    """Case to whether it is passed."""
    return {case: outcome == "passed" for case, outcome in replay.outcomes.items()}


def _refuse_unmeasured(before: Replay, after: Replay) -> None:
    """Refuse cases of which nobody can say whether they are newly failing.

    Raises:
        PromotionError: naming the first, and what its environment failed of.
    """
    for case, outcome in after.outcomes.items():
        both = outcome, before.outcomes[case]
        if outcome != "passed" and both[1] != "failed" and "unmeasured" in both:
            cause = after.causes.get(case) or before.causes.get(case, "")
            raise PromotionError(
                f"Case {case!r} can't be measured: {cause.rstrip('.')}. Mend its environment, then promote again."
            )


def refuse_foreign(ledger: Ledger, entries: Sequence[LedgerEntry], candidate: Candidate) -> None:
    """Refuse a ledger by which another graph is served.

    Raises:
        PromotionError: naming both, and how to go on.
    """
    if not entries or entries[0].graph == candidate.graph:
        return
    there = Path(entries[0].graph)
    seen = f"{ledger.folder} is the ledger of {there}, and this run is of {candidate.graph}."
    if there.parts[-2:] == Path(candidate.graph).parts[-2:]:
        raise PromotionError(
            f"{seen} If that is a copy of the same graph, promote it with the one of the ledger: agenttrain promote "
            f"{candidate.run.id} {there}. If it is another graph, promote it in another directory (promotions/ is made "
            "in the current one), or rename the folder that holds graph.py."
        )
    raise PromotionError(
        f"{seen} Promote it in another directory (promotions/ is made in the current one), or rename the folder that "
        "holds graph.py."
    )
