"""An evaluation, and what it measured of each task: the values that two evaluations are compared by.

A place (a task and a repeat) that failed to the end is no success. Of everything else it says nothing: it has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from agenttrain.config import CostTable
from agenttrain.part import Part
from agenttrain.promotion.compare import Outcome, strict_values
from agenttrain.records import Phase, Rollout, Task

Measure = Literal[
    "success",
    "reward",
    "cost",
    "tokens",
    "turns",
    "tool_calls",
    "invalid_tool_calls",
    "safety_violations",
    "seconds",
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
HIGHER_IS_BETTER: tuple[Measure, ...] = ("success", "reward")
"""Of all others less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The rollouts that count of one evaluation, and what it was made by."""

    name: str
    """As people write it: a run's id, or "RUN:baseline"."""
    run_id: str
    phase: Phase
    tasks: tuple[Task, ...]
    repeats: int
    temperature: float
    """0 is greedy."""
    seed: int
    rollouts: tuple[Rollout, ...]
    """The last attempt of each place."""
    answered_by: Literal["policy", "own models", "chat model"] = "policy"
    """Who answered the trained calls."""
    policy: str = ""
    """Folder of the weights, or the name of the model that answered."""
    hashes: Mapping[str, str | None] = field(default_factory=dict)
    """Of graph, tasks, verifier, renderer and model."""
    verifiers: Mapping[str, Part] = field(default_factory=dict)
    """Kinds of the parts, where they are known. Empty: read what the rollouts' parts say."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration of its run."""


def measured(evaluation: Evaluation, measure: Measure) -> dict[str, list[float]]:
    """What an evaluation measured of each task: task id to the values of its repeats.

    A place that failed to the end is 0 for success; of everything else it has no value. A task without any value is not
    in the mapping, so an empty one says that this was not measured.
    """
    if measure == "success":
        return _strict_successes(evaluation)
    value = _reader(evaluation, measure)
    values: dict[str, list[float]] = {}
    for rollout in evaluation.rollouts:
        seen = value(rollout) if rollout.reward is not None else None
        if seen is not None:
            values.setdefault(rollout.task_id, []).append(seen)
    return values


def _strict_successes(evaluation: Evaluation) -> dict[str, list[float]]:
    outcomes = [
        Outcome(task_id=each.task_id, repeat=each.sibling, value=float(each.success)) for each in evaluation.rollouts
    ]
    return strict_values(outcomes, [task.id for task in evaluation.tasks], evaluation.repeats)


def _reader(evaluation: Evaluation, measure: Measure) -> Callable[[Rollout], float | None]:
    """What gives a rollout's value, or None where it has none."""
    if measure == "cost":
        prices, own = CostTable(**evaluation.tables.get("cost", {})), evaluation.answered_by != "policy"
        return lambda rollout: _cost(rollout, prices, own=own)
    if measure == "safety_violations":
        return _unsafe if _has_safety(evaluation) else lambda _: None
    return _READERS[measure]


def _has_safety(evaluation: Evaluation) -> bool:
    """Whether a safety gate is declared, or one was seen."""
    if evaluation.verifiers:
        return any(part.kind == "safety" for part in evaluation.verifiers.values())
    rewards = [rollout.reward for rollout in evaluation.rollouts if rollout.reward is not None]
    return any(part.kind == "safety" for reward in rewards for part in reward.parts)


def _cost(rollout: Rollout, prices: CostTable, *, own: bool) -> float | None:
    """In the unit of the prices. None: how many tokens it took was not told."""
    if not rollout.tokens_told:
        return None
    sampled, prompt = (
        (prices.own_sampled_token, prices.own_prompt_token) if own else (prices.sampled_token, prices.prompt_token)
    )
    return (
        sampled * rollout.n_sampled_ids
        + prompt * rollout.n_prompt_ids
        + prices.tool_call * rollout.n_tool_calls
        + prices.second * rollout.seconds
    )


def _unsafe(rollout: Rollout) -> float | None:
    """1 where a safety gate was closed, else 0."""
    if rollout.reward is None:
        return None
    return float(any(part.is_closed and part.kind == "safety" for part in rollout.reward.parts))


_READERS: Mapping[str, Callable[[Rollout], float | None]] = {
    "reward": lambda rollout: rollout.reward.score if rollout.reward is not None else None,
    "tokens": lambda rollout: float(rollout.n_sampled_ids) if rollout.tokens_told else None,
    "turns": lambda rollout: float(rollout.n_turns),
    "tool_calls": lambda rollout: float(rollout.n_tool_calls),
    "invalid_tool_calls": lambda rollout: float(rollout.n_invalid_tool_calls),
    "seconds": lambda rollout: rollout.seconds,
}
