"""What a run's records add up to: figures of a step from its rollouts, of a run from its store and metrics.jsonl.

Everything here is computed from what stands on the disk or from what a step returned; nothing is kept or written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agenttrain.capture.store import StoreView
from agenttrain.part import GATES
from agenttrain.records import NOT_ADMITTED, Reward, Rollout, RolloutResult, Turn
from agenttrain.reward.balance import means, safety_violations
from agenttrain.reward.status import may_train
from agenttrain.sample.account import drifted, token_account
from agenttrain.sandbox.starting import starter
from agenttrain.tool_spec import Declared, External
from agenttrain.trajectory.prefix_breaks import prefix_breaks, respelled_turns

LOOKED_AT = 50
"""Rollouts in which a trained call is sought."""
UNDONE = "sampled from weights that were lost when the run stopped"


def rollout_metrics(results: Sequence[RolloutResult]) -> dict[str, float]:
    """A step's figures as the rollouts tell them, every attempt counted."""
    n = len(results)
    if not n:
        return {}
    rollouts = [result.rollout for result in results]
    called = [any(turn.role == "trained" for turn in result.turns) for result in results]
    usable = [result.rollout.reward is not None for result in results]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return {
        "attempts": n,
        "success": sum(rollout.success for rollout in rollouts) / n,
        "turns": sum(rollout.n_turns for rollout in rollouts) / n,
        "tool_calls": sum(rollout.n_tool_calls for rollout in rollouts) / n,
        "invalid_tool_calls": sum(rollout.n_invalid_tool_calls for rollout in rollouts) / n,
        "missed_tool_choices": _n_missed(results, "tool_choice") / n,
        "misfit_answers": _n_missed(results, "response_format") / n,
        "environment_failures": sum(rollout.status == "environment_failure" for rollout in rollouts),
        "policy_failures": sum(rollout.status == "policy_failure" for rollout in rollouts),
        "unfinished": sum(rollout.status in ("truncated", "budget_exhausted") for rollout in rollouts),
        "rollouts_without_trained_call": sum(ok and not has for ok, has in zip(usable, called, strict=True)),
        **_part_metrics(rewards),
    }


def external_calls(view: StoreView, tools: Mapping[str, Declared]) -> dict[str, int] | None:
    """External tool to how often it really ran, over every rollout of a run. None: none is permitted to."""
    permitted = sorted(name for name, what in tools.items() if isinstance(what, External) and what.permitted)
    made = view.rollouts() if permitted else ()
    return {name: sum(each.tools_run.get(name, 0) for each in made) for name in permitted} or None


def _part_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each part, and where gates are declared the rollouts that one closed."""
    found: dict[str, float] = {f"part.{name}": mean for name, mean in means(rewards).items()}
    if any(part.kind in GATES for reward in rewards for part in reward.parts):
        found["gates_closed"] = sum(bool(reward.closed) for reward in rewards)
    violations = safety_violations(rewards)
    return found if violations is None else {**found, "safety_violations": violations}


def _n_missed(results: Sequence[RolloutResult], asked: str) -> int:
    """Replies without what their calls asked for, see `records.Turn.missed`."""
    return sum(turn.missed == asked for result in results for turn in result.turns)


def dropped_by_step(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Rollout id to why the trainer did not train it, over all steps."""
    return {rollout_id: reason for row in rows for rollout_id, reason in row["dropped"].items()}


def left_out(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Rollout id to why no trainer got it, in words that many rollouts share: its status, or a plugin's reason."""
    kept_out = {r.id: f"status {r.status}" for r in rollouts if not may_train(r.status)}
    return kept_out | {r.id: r.cause for r in rollouts if r.cause.startswith(NOT_ADMITTED)}


def why_untrained(
    rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, Any]], trained: Container[str]
) -> dict[str, str]:
    """Rollout id to the reason why a training rollout is not in the loss: of all that are not in `trained`."""
    lives = {row["step"]: row["life"] for row in rows}
    undone = {r.id: UNDONE for r in rollouts if r.step not in lives or r.life < lives[r.step]}
    reasons = undone | dropped_by_step(rows) | left_out(rollouts)
    untrained = [rollout.id for rollout in rollouts if rollout.phase == "train" and rollout.id not in trained]
    return {rollout_id: reasons[rollout_id] for rollout_id in untrained if rollout_id in reasons}


def wall_seconds(rows: Sequence[Mapping[str, Any]], lives: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by what was done: `total` and `evaluate` of all lives, the others of the steps that count."""
    sums = {key: sum(row.get(f"{key}_s", 0.0) for row in rows) for key in ("rollout", "train", "sync")}
    return {
        "total": sum(life["wall_s"] for life in lives),
        "evaluate": sum(life["evaluate_s"] for life in lives),
        **sums,
    }


def cpu_seconds(engine_stats: Mapping[str, float]) -> float:
    """CPU time of this process, its ended children, its sandboxes, and an engine in a process of its own."""
    times = os.times()
    mine = times.user + times.system + times.children_user + times.children_system
    return mine + starter.cpu_s + engine_stats.get("cpu_s", 0.0)


def summed(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Each key's sum over the tables that have it."""
    sums: dict[str, float] = {}
    for table in tables:
        sums |= {name: sums.get(name, 0.0) + value for name, value in table.items()}
    return sums


def replaced_model(view: StoreView) -> str:
    """Class and name of the user's model that the policy stood in for: of a trained call, else of the first one."""
    first = ""
    for rollout in view.rollouts()[:LOOKED_AT]:
        for turn in view.turns(rollout.id):
            named = f"{turn.site.model_class} {turn.site.model_name}".strip()
            if "trained" in (turn.role, turn.stands_for):
                return named
            first = first or named
    return first or "no model: the graph made no call"


def token_table(view: StoreView, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`tokens` of the report: where every token that the policy sampled in training went, from the store.

    Args:
        rows: metrics.jsonl, which says in which life each step that counts was made.
    """
    samples = view.trained_samples({row["step"]: row["life"] for row in rows})
    breaks, respelled = Counter[str](), Counter[str]()
    handed = {sample.extra_fields["rollout_id"] for sample in samples}
    reasons = why_untrained(view.rollouts(), rows, handed)
    turns: dict[str, Turn] = {}

    def training_results() -> Iterator[RolloutResult]:
        for result in view.results():
            if result.rollout.phase == "train":
                breaks.update(prefix_breaks(result.turns))
                respelled.update(respelled_turns(result.turns))
                if result.rollout.id in handed:  # a whole run's at once: without experts, by far the largest
                    turns.update({turn.id: replace(turn, routed_experts=None) for turn in result.turns})
                yield result

    account = token_account(training_results(), samples, reasons)
    return {
        "sampled": account.sampled,
        "trained": account.trained,
        "frozen": account.frozen,
        "dropped": sum(account.dropped.values()),
        "dropped_by_cause": dict(account.dropped),
        "masked": account.masked,
        "drifted": drifted(samples, turns),
        "prefix_breaks": dict(breaks),
        "respelled": dict(respelled),
    }
