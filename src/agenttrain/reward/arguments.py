"""A verifier's signature becomes how it is called: which of what agenttrain knows goes in, and under which name.

It takes any of `ARGUMENTS`, two arguments for (task, state), or what a LangSmith evaluator takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.errors import RewardError
from agenttrain.part import Part
from agenttrain.records import Task

ARGUMENTS = ("task", "state", "context", "turns", "sandbox", "inputs", "outputs", "reference_outputs", "reference")
"""The names a verifier may ask for; `context` is what the graph had as its runtime context, `turns` a TurnView of each
model call, `sandbox` the rollout's, in which nothing runs any more, and the later ones are LangSmith's, for input, last
state and reference."""
OF_RUNS = ("run", "example")
"""LangSmith's records of what was done and what was asked for."""
OF_LANGSMITH = (*OF_RUNS, "inputs", "outputs", "reference_outputs", "attachments")
"""What an evaluator of LangSmith may ask for, where it asks for a run or an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How one function is called: names passed by position, then names passed by keyword."""

    by_position: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()
    refused: str | None = None
    """Name of an argument that nothing fills. None: callable."""


TASK_AND_STATE = Binding(by_position=("task", "state"))


RUN_AND_EXAMPLE = Binding(by_position=OF_RUNS)


def binding_of(function: Callable[..., Any]) -> Binding:
    """How a verifier is called, read from its signature."""
    if hasattr(function, "evaluate_run"):  # langsmith 0.15: its signature is that of the function it wraps
        return RUN_AND_EXAMPLE
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return TASK_AND_STATE
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if _is_of_langsmith(named):
        return _by_name([p for p in named if p.name in OF_LANGSMITH])
    known = [p for p in named if p.name in ARGUMENTS]
    unknown = [p for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    if unknown:
        return TASK_AND_STATE if _is_task_and_state(named) else Binding(refused=unknown[0].name)
    if not known and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Binding(by_keyword=ARGUMENTS)
    if not known and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return TASK_AND_STATE
    return _by_name(known)


def _by_name(parameters: list[inspect.Parameter]) -> Binding:
    return Binding(
        by_position=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
        by_keyword=tuple(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY),
    )


def _is_of_langsmith(named: list[inspect.Parameter]) -> bool:
    """True when a run or an example is asked for, and nothing that LangSmith doesn't give."""
    required = {p.name for p in named if p.default is p.empty}
    return bool(required & set(OF_RUNS)) and required <= set(OF_LANGSMITH)


def _is_task_and_state(named: list[inspect.Parameter]) -> bool:
    """True when exactly two positional arguments are required and no name of ours stands in another's place."""
    required = [p for p in named if p.default is p.empty]
    if len(required) != 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        return False
    return all(p.name == own or p.name not in ARGUMENTS for p, own in zip(required, ("task", "state"), strict=True))


_cached_binding = functools.lru_cache(maxsize=256)(binding_of)


def bound(name: str, verifier: Callable[..., Any]) -> Binding:
    """The binding of a verifier, read once.

    Raises:
        RewardError: an argument that nothing fills.
    """
    try:
        binding = _cached_binding(verifier)
    except TypeError:  # an instance that can't be hashed
        binding = binding_of(verifier)
    if binding.refused is not None:
        raise RewardError(
            f"Verifier {name!r} asks for {binding.refused!r}, which nothing fills. A verifier takes any of "
            f"{', '.join(ARGUMENTS)}, or two arguments for (task, state)."
        )
    return binding


def ask_for(argument: str, verifiers: Mapping[str, Part]) -> bool:
    """True when any of them does."""
    bindings = [bound(name, part.function) for name, part in verifiers.items()]
    return any(argument in (*binding.by_position, *binding.by_keyword) for binding in bindings)


def values_of(task: Task, state: Any, context: Any) -> dict[str, Any]:
    """What a verifier may ask for, by name."""
    return {
        "task": task,
        "state": state,
        "context": context,
        "inputs": task.input,
        "outputs": state,
        "reference_outputs": task.reference,
        "reference": task.reference,
    }
