"""What a graph's sandbox would be kept apart by on this machine, and what rollouts did to what judges them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agenttrain.check.finding import Finding, counted, error, warning
from agenttrain.errors import AgenttrainError, ConfigError
from agenttrain.records import Isolation, RolloutResult, Task
from agenttrain.reward.tampering import tampering_of
from agenttrain.sandbox.making import SandboxMaker

MOST_SHOWN = 3
"""Kinds of tampering that a finding tells."""


def isolation_findings(maker: SandboxMaker | None, task: Task | None) -> tuple[list[Finding], Isolation | None]:
    """What is wrong with the sandbox, and what was found to hold; a backend tries once for real.

    Args:
        maker: None: the graph has no sandbox.
        task: one that it would be made for. None: there is none, and nothing can be told.
    """
    if maker is None or task is None:
        return [], None
    try:
        isolation = maker.isolation(task)
    except AgenttrainError as refused:
        return [_refusal(refused)], None
    if not isolation.unenforced:
        return [], isolation
    text = f"The backend {isolation.backend} does not enforce {', '.join(isolation.unenforced)} here."
    return [warning("sandbox_unenforced", "sandbox=", text)], isolation


def _refusal(refused: AgenttrainError) -> Finding:
    """With the code's fix where a backend is lacking; where sandbox= itself is wrong, with the error's own."""
    cause, _, step = str(refused).rpartition(". ")
    if isinstance(refused, ConfigError) and cause:
        return error("sandbox_refused", "sandbox=", f"{cause}.", fix=step)
    return error("sandbox_refused", "sandbox=", str(refused))


def tampering_findings(results: Sequence[RolloutResult]) -> list[Finding]:
    """What rollouts changed of what judges them: it changed no score, and should be known."""
    seen = [found for result in results if (found := tampering_of(result.rollout))]
    if not seen:
        return []
    kinds = Counter(text for found in seen for text in found)
    shown = "; ".join(text for text, _ in kinds.most_common(MOST_SHOWN))
    rollouts = f"{len(seen)} of {counted(len(results), 'rollout')}"
    return [warning("tampering", "the submission", f"{rollouts} changed what judges them, to no effect: {shown}.")]
