"""Findings and a trial become the word on whether to train: ready or not, what is missing, and what it will cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agenttrain.check.calls import calls_of, calls_text, own_calls, roles_by_node
from agenttrain.check.finding import Finding
from agenttrain.check.prepared import Prepared
from agenttrain.check.reward_findings import Spread, spread_of
from agenttrain.check.trial import Trial
from agenttrain.config import Config
from agenttrain.forecast import as_dict, size
from agenttrain.graph.shape import GraphShape
from agenttrain.records import Isolation, RolloutResult
from agenttrain.tasks import smallest_effect
from agenttrain.trainer.algorithms import chosen

UPDATE_SHARE = 0.6
"""Seconds of updates for a second of the rollouts they train on; measured 0.4 to 0.9 on the order desk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a whole fit would take, estimated from a trial."""

    rollouts: int
    tokens: int
    """That the policy will sample."""
    own_calls: Mapping[str, int]
    """Model of the user's own to the calls that it will answer."""
    minutes_low: float
    """Where as many rollouts as a fit has at once take no longer than the few of the trial."""
    minutes_high: float
    """Where they win nothing by being more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to train."""

    ready: bool
    """No finding is an error, and rollouts were made."""
    but: str
    """What a policy that is ready to be trained still can't do at all. Empty: nothing is known."""
    missing: tuple[str, ...]
    """Codes of the errors, each once."""
    verifiers: tuple[str, ...]
    n_train: int
    n_held_out: int
    smallest_effect: float | None
    """The smallest difference in success that the held-out tasks can show, about a rate of 0.5, where it takes most:
    as in `few_held_out`. None: no task."""
    sandbox: Isolation | None
    """What it is kept apart by. None: the graph has none."""
    spread: Spread | None
    """None: no rollout has a reward."""
    memory: dict[str, Any] | None
    """As `fit --dry-run` tells it. None: it is not known."""
    cost: Cost | None
    """None: nothing was sampled."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> tuple[str, ...]:
        """For people, one line each."""
        points = f", which can show {100 * (self.smallest_effect or 0):.0f} points or more"
        effect = f"{points} (unpaired, before anything was measured)" if self.smallest_effect else ""
        has_tasks = bool(self.n_train or self.n_held_out)
        return tuple(
            line
            for line in (
                f"verifiers: {', '.join(self.verifiers) or 'none'}",
                f"tasks: {self.n_train} to train on, {self.n_held_out} held out{effect}"
                if has_tasks
                else "tasks: none",
                f"sandbox: {self.sandbox.in_words}" if self.sandbox is not None else "",
                _spread_line(self.spread),
                _memory_line(self.memory),
                _cost_line(self.cost),
            )
            if line
        )


def verdict_of(prepared: Prepared, trial: Trial | None, findings: Sequence[Finding]) -> Verdict:
    """The word on what was found."""
    job = prepared.job
    learns_from = chosen(job.config.trainer).learns_from
    spread = spread_of(trial.results, learns_from=learns_from) if trial is not None and prepared.verifiers else None
    errors = tuple(dict.fromkeys(finding.code for finding in findings if finding.severity == "error"))
    return Verdict(
        ready=not errors and trial is not None,
        but=but_of(prepared.shape, trial.results, findings, spread) if not errors and trial is not None else "",
        missing=errors,
        verifiers=prepared.verifiers,
        n_train=len(job.train),
        n_held_out=len(job.held_out),
        smallest_effect=smallest_effect(len(job.held_out)) if job.held_out else None,
        sandbox=prepared.isolation,
        spread=spread,
        memory=as_dict(prepared.forecast) if prepared.forecast is not None else None,
        cost=cost_of(trial, job.config, n_held_out=len(job.held_out)) if trial is not None else None,
    )


def but_of(
    shape: GraphShape, results: Sequence[RolloutResult], findings: Sequence[Finding], spread: Spread | None
) -> str:
    """Most tool calls invalid and no success: which nodes with a model no rollout came to."""
    if spread is None or spread.success or not any(found.code == "invalid_tool_calls" for found in findings):
        return ""
    called = roles_by_node(calls_of(results), shape.nodes)
    never = [node for node in shape.asking if node in shape.nodes and node not in called]
    reached = f", and no rollout called the model of {', '.join(never)}" if never else ""
    return f"most tool calls are invalid, none of {spread.n} rollouts succeeded{reached}"


def cost_of(trial: Trial, config: Config, *, n_held_out: int) -> Cost | None:
    """The trial's seconds, tokens and calls of own models a rollout, times the rollouts of a fit; and its updates.

    Example: 16 rollouts in 4 s, each of 3 s; 10 steps of 16 and 2 x 20 evaluated -> 200 rollouts and updates as of 96
    more, at best 16 at once in 3 s, at worst each in 0.25 s: 0.93 to 1.23 minutes

    Returns:
        None where the policy sampled nothing.
    """
    n_trained = config.trainer.steps * config.trainer.tasks_per_step * config.trainer.group_size
    n = n_trained + 2 * n_held_out * config.eval.repeats
    at_once = min(config.engine.concurrency, config.trainer.tasks_per_step * config.trainer.group_size)
    made = len(trial.results)
    sampled = sum(result.rollout.n_sampled_ids for result in trial.results)
    if not sampled:
        return None
    lasted = sum(result.rollout.ended_at - result.rollout.started_at for result in trial.results) / made
    minutes = sorted((n + UPDATE_SHARE * n_trained) * each / 60 for each in (lasted / at_once, trial.wall_s / made))
    return Cost(
        rollouts=n,
        tokens=round(n * sampled / made),
        own_calls={model: round(n * calls / made) for model, calls in own_calls(trial.results).items()},
        minutes_low=round(minutes[0], 2),
        minutes_high=round(minutes[1], 2),
    )


def _spread_line(spread: Spread | None) -> str:
    if spread is None:
        return "rewards: none"
    return (
        f"rewards: {spread.mean:.3f} ± {spread.std:.3f}, success {spread.success:.2f}, {spread.groups_that_teach} of "
        f"{spread.groups} groups teach"
    )


def _memory_line(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return ""
    sums = [
        f"up to {size(each['needed_bytes'])} of {size(each['free_bytes'])} free ({name})"
        for name, each in memory["memory"].items()
    ]
    return f"memory: {', '.join(sums) or 'not known'}; disk: up to {size(memory['disk_bytes'])}"


def _cost_line(cost: Cost | None) -> str:
    if cost is None:
        return ""
    minutes = " to ".join(dict.fromkeys(map(_minutes, (cost.minutes_low, cost.minutes_high))))
    own = f", {calls_text(cost.own_calls)}" if cost.own_calls else ""
    return (
        f"cost of a fit, estimated from this check: {minutes} min, {cost.rollouts:,} rollouts, {cost.tokens:,} tokens "
        f"sampled{own}"
    )


def _minutes(minutes: float) -> str:
    """Example: 0.01 -> "under 0.1", 0.31 -> "0.3", 17.2 -> "17"."""
    if minutes < 0.05:
        return "under 0.1"
    return f"{minutes:.1f}" if minutes < 0.95 else f"{minutes:.0f}"
