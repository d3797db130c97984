"""Verifiers that come with agenttrain: functions of task, state and sandbox, to be named in `@trainable`.

What each needs is imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agenttrain.verifiers.answers import exact_answer, json_answer, numeric_answer
    from agenttrain.verifiers.cases import hidden_cases
    from agenttrain.verifiers.command import command_exits
    from agenttrain.verifiers.suites import hidden_tests
    from agenttrain.verifiers.tampering import untampered
    from agenttrain.verifiers.terms import invalid_tool_calls, seconds_used, tokens_used, turns_used
    from agenttrain.verifiers.trajectories import tool_trajectory

__all__ = [
    "command_exits",
    "exact_answer",
    "hidden_cases",
    "hidden_tests",
    "invalid_tool_calls",
    "json_answer",
    "numeric_answer",
    "seconds_used",
    "tokens_used",
    "tool_trajectory",
    "turns_used",
    "untampered",
]

_homes = {
    "command_exits": "command",
    "exact_answer": "answers",
    "hidden_cases": "cases",
    "hidden_tests": "suites",
    "invalid_tool_calls": "terms",
    "json_answer": "answers",
    "numeric_answer": "answers",
    "seconds_used": "terms",
    "tokens_used": "terms",
    "tool_trajectory": "trajectories",
    "turns_used": "terms",
    "untampered": "tampering",
}


def __getattr__(name: str) -> Any:
    """Load a verifier's module at its first use (PEP 562)."""
    if name not in _homes:
        raise AttributeError(f"agenttrain.verifiers has no {name!r}. It has: {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_homes[name]}"), name)
