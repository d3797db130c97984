"""What a rollout used becomes a number: 0 for nothing, 1 at the limit, more beyond it.

For parts of kind "cost" or "process": `Part(turns_used(limit=8), -0.1, kind="cost", low=0.0, high=1.0)`. Calls of the
policy count, trained and frozen, and those of another model in its place (`eval --run as-is`, or at an address); what
other models of the user were asked counts only where none of these was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from agenttrain.errors import ConfigError
from agenttrain.records import TurnView

Term = Callable[[Sequence[TurnView]], dict[str, Any]]


def turns_used(*, limit: float) -> Term:
    """A term: policy calls, as a share of the limit. Example: 6 turns, limit 8 -> 0.75"""
    return _term("turns_used", "turns", limit, lambda turns: len(turns))


def tokens_used(*, limit: float) -> Term:
    """A term: sampled tokens, as a share of the limit; of another model in the policy's place those it told of."""
    return _term("tokens_used", "tokens", limit, lambda turns: sum(turn.n_tokens for turn in turns))


def invalid_tool_calls(*, limit: float = 1) -> Term:
    """A term: attempts at a tool call that could not be read or that the tool's schema refused, over the limit."""
    return _term(
        "invalid_tool_calls",
        "invalid tool calls",
        limit,
        lambda turns: sum(turn.n_invalid_tool_calls for turn in turns),
    )


def seconds_used(*, limit: float) -> Term:
    """A term: wall-clock seconds from the first policy call to the end of the last, as a share of the limit.

    They depend on the machine and its load, so that two equal rollouts differ: prefer turns and tokens in training.
    """
    return _term("seconds_used", "seconds", limit, _span)


def _span(turns: Sequence[TurnView]) -> float:
    return max(turn.ended_at for turn in turns) - min(turn.started_at for turn in turns) if turns else 0.0


def _term(name: str, what: str, limit: float, used_by: Callable[[Sequence[TurnView]], float]) -> Term:
    """
    Raises:
        ConfigError: a limit that is not above 0.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise ConfigError(f"{name} got limit={limit!r}, and a finite number above 0 is expected.")

    def term(turns: Sequence[TurnView]) -> dict[str, Any]:
        used = used_by([turn for turn in turns if turn.role != "auxiliary"] or turns)
        return {"score": used / limit, "comment": f"{used:g} {what} of {limit:g}"}

    term.__name__ = name
    return term
