"""An evaluation, and what it measured of each task: the values that two evaluations are compared by.

A place (a task and a repeat) that failed to the end is no success. Of everything else it says nothing: it has no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from agenttrain.part import Part
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
