"""A reward becomes lines for the terminal: each part with its kind, and what its verifier saw.

Comments and evidence are what an agent may have had a hand in: each is one line here, without control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agenttrain.part import GATES, SUCCESS_SUFFIX
from agenttrain.reward.layers import is_decision

if TYPE_CHECKING:
    from agenttrain.records import Reward, RewardPart

OUTPUT_LINES = 10
"""Of a program that a verifier ran; --json has all that was kept."""


def reward_lines(reward: Reward) -> list[str]:
    """The score first, then each part, and under it its evidence."""
    closed = f", by the closed gate {reward.closed}" if reward.closed else ""
    unfinished = f", unfinished {reward.unfinished:+g}" if reward.unfinished else ""
    lines = [f"reward: {reward.score:g}{closed}{unfinished}"]
    decided = {part.name.removesuffix(SUCCESS_SUFFIX): part.score for part in reward.parts if is_decision(part)}
    for part in reward.parts:
        if is_decision(part):
            continue
        lines += [
            f"  {_part_line(part, decided.get(part.name))}",
            *(f"    {line}" for line in _evidence_lines(part.evidence)),
        ]
    return lines


def _part_line(part: RewardPart, decided: float | None) -> str:
    """Example: "tests: outcome 0.5 × 1, success: no, 2 of 4 cases"; of a gate "no_secret: safety 0, closed".

    Args:
        decided: 1 or 0, whether it was a success, of a part that decided so itself.
    """
    if part.error:
        return f"{part.name}: {part.kind}, left out: {_one_line(part.error)}"
    worth = f"{part.score:g} × {part.weight:g}"
    if part.kind in GATES:
        worth = f"{part.score:g}, {'closed' if part.is_closed else 'open'}"
    if decided is not None:
        worth += f", success: {'yes' if decided else 'no'}"
    return f"{part.name}: {part.kind} {worth}" + (f", {_one_line(part.comment)}" if part.comment else "")


def _evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """Which checks failed and what was changed; of checks that passed only how many, of an output its end."""
    checks = evidence.get("checks", [])
    lines = [f"checks: {sum(each['passed'] for each in checks)} of {len(checks)} passed"] if checks else []
    wrong = [each for each in checks if not each["passed"]]
    lines += [f"failed: {_one_line(each['name'])}: {_one_line(each.get('reason', ''))}".rstrip(": ") for each in wrong]
    lines += [f"tampering: {_one_line(text)}" for text in evidence.get("tampering", [])]
    if evidence.get("exit_code") is not None:
        lines.append(f"exit code: {evidence['exit_code']}")
    lines += [f"output: {_one_line(line)}" for line in evidence.get("output", "").strip().splitlines()[-OUTPUT_LINES:]]
    rest = {key: value for key, value in evidence.items() if key not in ("checks", "tampering", "exit_code", "output")}
    return lines + [f"{_one_line(key)}: {_one_line(str(value))}" for key, value in rest.items()]


def _one_line(text: str) -> str:
    """Printable signs only. Example: "a\\nb\\x1b[2J" -> "a b�[2J"."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in " ".join(text.split()))
