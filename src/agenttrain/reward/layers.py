"""Answers and the parts they were given to become a Reward: bounds, gates, what is left out, and who decides success.

A closed gate decides success, and the score is no more than it gives, whatever the other parts say. outcome, process
and cost are added up; success is asked of outcome alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agenttrain.part import SUCCESS_SUFFIX, Part
from agenttrain.records import Credit, Reward, RewardPart
from agenttrain.reward.answer import Answer


def parts_of(name: str, part: Part, answer: Answer) -> list[RewardPart]:
    """What a verifier's answer gives: its score within the bounds, and its decision on success if it made one.

    A gate that decides success is open only if it says so too. What a term says of success is not asked.
    """
    kept = _bounded(part, answer.score)
    if part.is_gate and answer.success is False:
        kept = min(kept, 0.0)
    said = _recorded(name, part, kept, comment=_with_bound(answer, kept, part), answer=answer)
    if part.kind != "outcome" or answer.success is None:
        return [said]
    return [said, RewardPart(name=name + SUCCESS_SUFFIX, score=float(answer.success), weight=0.0)]


def failed(name: str, part: Part, why: str) -> RewardPart:
    """Of a verifier that raised PolicyFailure: nothing, so a gate is closed."""
    return _recorded(name, part, _bounded(part, 0.0), comment=f"PolicyFailure: {why}")


def left_out(name: str, part: Part, error: str) -> RewardPart:
    """Of a verifier that failed and is not to fail the rollout: it adds nothing, and as an outcome no full marks."""
    return RewardPart(name=name, score=0.0, weight=part.weight, kind=part.kind, error=error)


def reward_of(
    parts: Sequence[RewardPart], verifiers: Mapping[str, Part], *, credit: Credit | None, unfinished: float
) -> Reward:
    """The parts added up, or what a closed gate gives where that is less, with `unfinished` for being cut.

    Less, since a gate must never be a way out of what the others take away. Of several closed gates the one that gives
    least decides, of equals the first. Behind a closed gate there is no credit.
    """
    total = sum(part.weight * part.score for part in parts)
    closed = [part.name for part in parts if part.is_closed]
    if not closed:
        return Reward(score=total + unfinished, parts=tuple(parts), unfinished=unfinished, credit=credit)
    deciding = min(closed, key=lambda name: verifiers[name].closed)
    score = min(verifiers[deciding].closed, total) + unfinished
    return Reward(score=score, parts=tuple(parts), unfinished=unfinished, closed=deciding)


def unjudged(parts: Sequence[RewardPart], verifiers: Mapping[str, Part]) -> str:
    """The error of the first outcome with a weight, where every one was left out and no gate is closed.

    Nothing says what the rollout is worth then. Empty: something does.
    """
    weighed = [name for name, part in verifiers.items() if part.kind == "outcome" and part.weight != 0]
    errors = [part.error for part in parts if part.name in weighed]
    if not errors or not all(errors) or any(part.is_closed for part in parts):
        return ""
    return errors[0]


def passes(reward: Reward) -> bool:
    """True when every gate is open and every outcome gave full marks; `unfinished` and terms don't count.

    An outcome that answered {"success": …} has decided for itself. Of the others the weighted sum of scores, each at
    most 1, must reach the sum of the positive weights; so a single 0/1 outcome passes at 1, one that was left out
    passes never, and weight 0 only informs. Without a decision and without a positive weight nothing passes.
    """
    if any(part.is_closed for part in reward.parts):
        return False
    outcomes = [part for part in reward.parts if part.kind == "outcome"]
    decided = {part.name.removesuffix(SUCCESS_SUFFIX): part.score for part in outcomes if is_decision(part)}
    scored = [part for part in outcomes if not is_decision(part) and part.name not in decided]
    full = sum(part.weight for part in scored if part.weight > 0)
    if not decided and full == 0:
        return False
    reached = sum(part.weight * min(part.score, 1.0) for part in scored)
    return all(decided.values()) and reached >= full - 1e-9


def is_decision(part: RewardPart) -> bool:
    """True of what an outcome that decides success itself leaves beside its score."""
    return part.weight == 0 and part.kind == "outcome" and part.name.endswith(SUCCESS_SUFFIX)


def _recorded(name: str, part: Part, score: float, *, comment: str, answer: Answer | None = None) -> RewardPart:
    return RewardPart(
        name=name,
        score=score,
        weight=0.0 if part.is_gate else part.weight,
        comment=comment,
        kind=part.kind,
        evidence={} if answer is None else answer.evidence,
    )


def _bounded(part: Part, score: float) -> float:
    """Within the part's bounds. Example: 3 of a part with high 1 -> 1."""
    if part.low is not None and score < part.low:
        return float(part.low)
    return float(part.high) if part.high is not None and score > part.high else score


def _with_bound(answer: Answer, kept: float, part: Part) -> str:
    """The comment, with the score that the bounds replaced."""
    if part.is_gate or kept == answer.score:
        return answer.comment
    said = f"{answer.score:g} is out of bounds and counts as {kept:g}"
    return f"{answer.comment} ({said})" if answer.comment else said
