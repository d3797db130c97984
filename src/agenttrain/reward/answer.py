"""What a verifier answered becomes a score, a comment, its decision on success, and evidence that can be kept.

An answer is a bool, a number, {"score": …, "comment": …, "success": …, "evidence": {…}}, an object with a score (such
as LangSmith's EvaluationResult), or several of these in a list or under "results".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.errors import RewardError
from agenttrain.reward.evidence import evidence_in, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one verifier said."""

    score: float
    comment: str = ""
    success: bool | None = None
    """None: it left that to its score."""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def answer_in(name: str, result: Any) -> Answer:
    """What a result says.

    Raises:
        RewardError: it holds no finite number, a success that is none, or evidence that can't be kept.
    """
    several = _several(result)
    if several is not None:
        return answer_in(name, several[0]) if len(several) == 1 else _mean(name, several)
    value, comment, success = _read(result)
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise RewardError(
            f"Verifier {name!r} answered {shortened(result)}. Answer with a bool, a finite number, or "
            '{"score": number, "comment": text}; raise an exception when nothing can be said.'
        )
    if success is not None and _number(success) not in (0.0, 1.0):
        raise RewardError(f'Verifier {name!r} answered {shortened(result)}. Its "success" must be true or false.')
    given = result.get("evidence") if isinstance(result, Mapping) else None
    return Answer(
        score=number,
        comment=comment,
        success=None if success is None else bool(success),
        evidence=evidence_in(name, given),
    )


def _several(result: Any) -> Sequence[Any] | None:
    """The results of one evaluator that gives more than one. None: this is a single one."""
    if isinstance(result, Mapping) and "score" not in result:
        result = result.get("results")
    if isinstance(result, list | tuple) and result and all(map(_is_result, result)):
        return result
    return None


def _is_result(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "score")


def _mean(name: str, results: Sequence[Any]) -> Answer:
    """One answer of several: the mean of their scores, each of them a check of the evidence.

    Raises:
        RewardError: a score outside of 0 to 1, which a mean would mix with others of another scale.
    """
    answers = [answer_in(name, result) for result in results]
    keys = [_key(result) or f"result {n}" for n, result in enumerate(results)]
    for key, answer in zip(keys, answers, strict=True):
        if not 0.0 <= answer.score <= 1.0:
            raise RewardError(
                f"Verifier {name!r} answered {len(answers)} results, and {key!r} is {answer.score:g}. Their mean is "
                "the score, so each must lie in 0 to 1. Wrap it in a function that gives the one you mean."
            )
    checks = [
        {"name": key, "passed": answer.score == 1.0, "reason": answer.comment}
        for key, answer in zip(keys, answers, strict=True)
    ]
    return Answer(
        score=math.fsum(answer.score for answer in answers) / len(answers),
        comment="; ".join(f"{key} {answer.score:g}" for key, answer in zip(keys, answers, strict=True)),
        evidence=evidence_in(name, {"checks": checks}),
    )


def _key(result: Any) -> str:
    key = result.get("key") if isinstance(result, Mapping) else getattr(result, "key", None)
    return str(key) if key else ""


def _read(result: Any) -> tuple[Any, str, Any]:
    """(score, comment, success) of a plain value, a mapping, or an object like LangSmith's EvaluationResult."""
    if isinstance(result, Mapping):
        return result.get("score"), str(result.get("comment") or ""), result.get("success")
    if hasattr(result, "score"):
        return result.score, str(getattr(result, "comment", None) or ""), getattr(result, "success", None)
    return result, "", None


def _number(value: Any) -> float | None:
    """A bool, a real number, or an array's single number as a float; None for anything else."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf
