"""The rewards of one or two evaluations become tables of their parts: how each was spread, in the same bins.

Only what was declared is told. A rollout without a reward is in no part; a part that was left out in a rollout is
counted apart there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from agenttrain.part import Part
from agenttrain.records import RewardPart, Rollout

N_BINS = 10
"""Of a part whose scores are not only 0 and 1."""


def reward_parts(declared: Mapping[str, Part], *evaluations: Sequence[Rollout]) -> list[dict[str, Any]]:
    """For each evaluation name to {kind, weight, low, high, n, mean, errors, histogram}.

    Args:
        declared: the verifiers of the graph.
        evaluations: the rollouts that count, of each one's.

    Returns:
        Tables with the same names and edges. `weight` is None for a gate, which has `closed` beside: how often. `n`
        counts the answers and `errors` the times it was left out; without an answer in any evaluation `histogram` is
        None, and without one in this `mean`.
    """
    tables: list[dict[str, Any]] = [{} for _ in evaluations]
    for name, part in declared.items():
        said = [_said(name, rollouts) for rollouts in evaluations]
        scores = [[each.score for each in of_one if not each.error] for of_one in said]
        edges = _edges(part, [score for of_one in scores for score in of_one])
        for table, of_one, answered in zip(tables, said, scores, strict=True):
            table[name] = _row(part, of_one, answered, edges)
    return tables


def gates_closed(rollouts: Sequence[Rollout], declared: Mapping[str, Part], kinds: Sequence[str]) -> int | None:
    """Rollouts in which a gate of these kinds was closed. None: none is declared."""
    if not any(part.kind in kinds for part in declared.values()):
        return None
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return sum(any(part.is_closed and part.kind in kinds for part in reward.parts) for reward in rewards)


def _said(name: str, rollouts: Sequence[Rollout]) -> list[RewardPart]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return [part for reward in rewards for part in reward.parts if part.name == name]


def _row(part: Part, said: Sequence[RewardPart], scores: Sequence[float], edges: Sequence[float]) -> dict[str, Any]:
    row = {
        "kind": part.kind,
        "weight": None if part.is_gate else part.weight,
        "low": part.low,
        "high": part.high,
        "n": len(scores),
        "mean": math.fsum(scores) / len(scores) if scores else None,
        "errors": len(said) - len(scores),
        "histogram": {"edges": list(edges), "counts": _counts(scores, edges)} if edges else None,
    }
    return row | ({"closed": sum(each.is_closed for each in said)} if part.is_gate else {})


def _edges(part: Part, scores: Sequence[float]) -> list[float]:
    """[bins + 1] from the lowest to the highest score that is possible, else that was seen. Empty: none was seen.

    Example: scores 0 and 1 -> [0, 0.5, 1]; all 3, without bounds -> [2.5, 3.5]
    """
    if not scores:
        return []
    if set(scores) <= {0.0, 1.0} and part.low in (None, 0) and part.high in (None, 1):
        return [0.0, 0.5, 1.0]
    low = float(part.low) if part.low is not None else min(scores)
    high = float(part.high) if part.high is not None else max(scores)
    inner = [float(f"{low + (high - low) * n / N_BINS:.12g}") for n in range(1, N_BINS)]
    edges = [low, *inner, high]
    if any(one >= other for one, other in pairwise(edges)):  # all the same, or all but
        return [low - 0.5, high + 0.5]
    return edges


def _counts(scores: Sequence[float], edges: Sequence[float]) -> list[int]:
    """[bins] how many lie in each; a score on an edge is in the bin above it, the last edge in the last bin."""
    counts = [0] * (len(edges) - 1)
    for score in scores:
        counts[min(bisect_right(edges, score), len(counts)) - 1] += 1
    return counts
