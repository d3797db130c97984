"""What a verifier says of nodes and turns becomes Credit, added up over the verifiers by their weights.

A node that a rollout did not come to is no error: its credit has no effect there. A turn that the rollout has not, or
that is not trained, can't have been meant, and is one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.errors import RewardError
from agenttrain.records import Credit, Turn

ANSWER = '{"score": number, "nodes": {name: number}, "turns": {index: number}}'


def credit_in(name: str, weight: float, result: Any, turns: Sequence[Turn] | None) -> Credit | None:
    """The credit in one verifier's answer, times its weight. None: it gives none.

    Args:
        result: what the verifier answered; only a mapping can hold "nodes" and "turns".
        turns: of the rollout. None: not known, and any index is taken.

    Raises:
        RewardError: names and numbers that aren't, a number that is not finite, or no trained turn of that index.
    """
    if not isinstance(result, Mapping):
        return None
    by_node = _numbers(name, "nodes", result.get("nodes"))
    by_turn = _numbers(name, "turns", result.get("turns"))
    if not by_node and not by_turn:
        return None
    for node in by_node:
        if not isinstance(node, str):
            raise RewardError(f'Verifier {name!r} credits the node {node!r}. A node in "nodes" is its name, a text.')
    for index in by_turn:
        _check_turn(name, index, turns)
    return Credit(
        by_node={str(node): weight * number for node, number in by_node.items()},
        by_turn={int(index): weight * number for index, number in by_turn.items()},
    )


def summed(credits: Sequence[Credit | None]) -> Credit | None:
    """All credit as one. None: there is none."""
    by_node: dict[str, float] = {}
    by_turn: dict[int, float] = {}
    for credit in credits:
        for node, number in credit.by_node.items() if credit else ():
            by_node[node] = by_node.get(node, 0.0) + number
        for index, number in credit.by_turn.items() if credit else ():
            by_turn[index] = by_turn.get(index, 0.0) + number
    return Credit(by_node=by_node, by_turn=by_turn) if by_node or by_turn else None


def _numbers(name: str, key: str, value: Any) -> dict[Any, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RewardError(f'Verifier {name!r} answered with "{key}" {value!r}, and a mapping is expected: {ANSWER}.')
    for part, number in value.items():
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise RewardError(
                f'Verifier {name!r} answered with "{key}" {part!r}: {number!r}, and a finite number is expected: '
                f"{ANSWER}."
            )
    return {part: float(number) for part, number in value.items()}


def _check_turn(name: str, index: Any, turns: Sequence[Turn] | None) -> None:
    """Refuse what is the index of no trained turn.

    Raises:
        RewardError: with the turns that can be credited.
    """
    if not isinstance(index, numbers.Integral) or isinstance(index, bool):
        raise RewardError(
            f'Verifier {name!r} credits the turn {index!r}. A turn in "turns" is its index, a whole number.'
        )
    if turns is None:
        return
    role_by_index = {turn.index: turn.role for turn in turns}
    role = role_by_index.get(int(index))
    if role == "trained":
        return
    trained = ", ".join(str(i) for i, known in sorted(role_by_index.items()) if known == "trained") or "none"
    why = f"which is {role}" if role else f"and the rollout has {len(role_by_index)} turns, counted from 0"
    raise RewardError(
        f"Verifier {name!r} credits turn {index}, {why}. Trained turns of this rollout: {trained}. Ask for `turns` by "
        "name to see them."
    )
