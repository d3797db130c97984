"""The rewards of a trial become findings: whether there is anything to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from agenttrain.alarms import EQUAL_REWARDS
from agenttrain.check.finding import Finding, counted, error, warning
from agenttrain.protocols import Renderer
from agenttrain.records import Reward, RolloutResult
from agenttrain.reward.status import may_train
from agenttrain.trainer.algorithms import LearnsFrom

MOST_SIGNS = 200
"""Of a reference or an answer that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What the rollouts of a trial were worth."""

    n: int
    """Rollouts with a reward."""
    mean: float
    std: float
    success: float
    """Share of these."""
    groups: int
    """Groups with two such rollouts or more; with one, where successes teach."""
    groups_that_teach: int
    """Those whose rewards differ, or that hold a success."""


def spread_of(results: Sequence[RolloutResult], *, learns_from: LearnsFrom = "differences") -> Spread | None:
    """None: no rollout has a reward.

    Args:
        learns_from: what makes a group teach.
    """
    rewarded = _rewarded(results)
    if not rewarded:
        return None
    scores = [reward.score for _, reward in rewarded]
    groups = _groups(rewarded)
    solved = {result.rollout.task_id for result, _ in rewarded if result.rollout.success}
    compares = learns_from == "differences"
    return Spread(
        n=len(rewarded),
        mean=fmean(scores),
        std=pstdev(scores),
        success=fmean(result.rollout.success for result, _ in rewarded),
        groups=len(groups) if compares else len({result.rollout.task_id for result, _ in rewarded}),
        groups_that_teach=sum(_differ(rewards) for rewards in groups) if compares else len(solved),
    )


def reward_findings(
    results: Sequence[RolloutResult],
    where: str,
    *,
    renderer: Renderer | None,
    learns_from: LearnsFrom = "differences",
) -> list[Finding]:
    """What is wrong with the rewards; nothing where most rollouts have none, which other findings tell.

    Args:
        where: the names of the verifiers.
        renderer: reads an answer that is shown. None: none is.
        learns_from: what makes a group teach.
    """
    rewarded, spread = _rewarded(results), spread_of(results)
    if spread is None or 2 * spread.n < len(results):
        return []
    if all(reward.score == reward.unfinished and reward.credit is None for _, reward in rewarded):
        text = f"{_all(spread.n)} of this check got 0 from the verifiers."
        return [error("all_zero_rewards", where, text + _closed(rewarded) + _example(rewarded, renderer))]
    if learns_from == "successes":
        text = f"None of {counted(spread.n, 'rollout')} of this check is a success." + _example(rewarded, renderer)
        return [] if spread.success else [warning("no_success", where, text)]
    return [*_outcome_findings(rewarded, renderer), *_spread_findings(spread, rewarded, where)]


def _outcome_findings(rewarded: Sequence[tuple[RolloutResult, Reward]], renderer: Renderer | None) -> list[Finding]:
    """Terms can hide that nothing was ever solved: rewards differ, and what is wanted has no part in that."""
    parts = [part for _, reward in rewarded for part in reward.parts]
    outcomes = [part for part in parts if part.kind == "outcome" and part.weight > 0]
    got = any(part.score or part.error for part in outcomes) or any(reward.credit is not None for _, reward in rewarded)
    if not outcomes or got or any(result.rollout.success for result, _ in rewarded):
        return []
    names = ", ".join(dict.fromkeys(part.name for part in outcomes))
    text = f"{_all(len(rewarded))} of this check got 0 from {names}."
    others = ", ".join(dict.fromkeys(part.name for part in parts if part.weight * part.score))
    text += f" What they got came from {others}, and a fit would learn that alone." if others else ""
    return [warning("no_outcome", names, text + _example(rewarded, renderer))]


def _spread_findings(spread: Spread, rewarded: Sequence[tuple[RolloutResult, Reward]], where: str) -> list[Finding]:
    if spread.groups and not spread.groups_that_teach:
        text = f"In each of {counted(spread.groups, 'group')} all rewards are equal ({spread.mean:.3g} on the mean)"
        text += ": every rollout succeeded." if spread.success == 1 else f".{_closed(rewarded)}"
        return [warning("no_spread", where, text)]
    return []


def _all(n: int) -> str:
    return "The one rollout" if n == 1 else f"All {n} rollouts"


def _closed(rewarded: Sequence[tuple[RolloutResult, Reward]]) -> str:
    """Which gates decided how many of the rewards."""
    counts = Counter(reward.closed for _, reward in rewarded if reward.closed)
    return "".join(f" The gate {name!r} was closed in {n} of {len(rewarded)}." for name, n in sorted(counts.items()))


def _example(rewarded: Sequence[tuple[RolloutResult, Reward]], renderer: Renderer | None) -> str:
    """An answer beside its reference, so that people see whether the verifier is wrong; one that was not cut first.

    The state that the verifier saw is not kept.
    """
    by_ending = sorted(rewarded, key=lambda pair: pair[0].rollout.status != "completed")
    for result, _ in by_ending:
        said = next((turn.response_ids for turn in reversed(result.turns) if turn.response_ids), ())
        if renderer is not None and said:
            task, answer = result.request.task, renderer.decode(said[:-1] if said[-1] in renderer.stop_ids else said)
            return f" Task {task.id!r}: the reference is {_cut(task.reference)}, the last reply {_cut(answer)}."
    return ""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SIGNS else f"{text[:MOST_SIGNS]}…"


def _rewarded(results: Sequence[RolloutResult]) -> list[tuple[RolloutResult, Reward]]:
    return [
        (result, result.rollout.reward)
        for result in results
        if result.rollout.reward is not None and may_train(result.rollout.status)
    ]


def _groups(rewarded: Sequence[tuple[RolloutResult, Reward]]) -> list[list[Reward]]:
    by_task: dict[str, list[Reward]] = {}
    for result, reward in rewarded:
        by_task.setdefault(result.rollout.task_id, []).append(reward)
    return [rewards for rewards in by_task.values() if len(rewards) > 1]


def _differ(rewards: Sequence[Reward]) -> bool:
    """Whether something of a group is told apart; credit of parts of a rollout does that by itself."""
    return pstdev(reward.score for reward in rewards) >= EQUAL_REWARDS or any(
        reward.credit is not None for reward in rewards
    )
