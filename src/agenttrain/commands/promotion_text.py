"""What a person sees of a promotion: what the gate is at, one line a rule, the verdict, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agenttrain.commands.progress import Progress
from agenttrain.gate.candidate import Candidate

PASSED, FAILED, NOT_ASKED = "\N{CHECK MARK}", "\N{BALLOT X}", "\N{EN DASH}"
DEEDS = {
    "promoted": "{run_id} serves now.",
    "canary": "{run_id} is a canary: {share:.3g} % of the conversations try it. agenttrain promote {run_id} lets it "
    "serve.",
    "checked": "Every rule holds: agenttrain promote {run_id} lets it serve.",
    "refused": "{run_id} does not serve: {failed}.",
    "taken_back": "{run_id} was taken back: {failed}. What served before serves again.",
}


class GateProgress(Progress):
    """Watches the gate: what it is at, and the rollouts that it makes."""

    def starts_gate(self, candidate: Candidate) -> None:
        """A candidate comes before the gate; rules of today that are not those of the run are told."""
        self._say(f"promote {candidate.run.id}")
        for setting in candidate.settings:
            self._say(f"note: {setting}", "yellow")

    def doing(self, what: str) -> None:
        self._say(f"{what} …")

    def stops(self, why: str) -> None:
        self._say(why, "yellow")


def decision_text(decision: Mapping[str, Any]) -> str:
    """What was decided, and why."""
    against, source = decision["incumbent"]["run_id"], decision["incumbent"]["from"]
    failed = list(decision["next_steps"])
    said = DEEDS[decision["deed"]].format(
        run_id=decision["run_id"], share=100 * (decision["share"] or 0), failed=", ".join(failed)
    )
    lines = [f"{decision['run_id']} against {against}{f' ({source})' if source else ''}", ""]
    lines += [_rule_line(rule) for rule in decision["rules"]]
    lines += [*(f"note: {note}" for note in decision["notes"]), "", said]
    return "\n".join([*lines, *(_step_line(rule, step, decision) for rule, step in decision["next_steps"].items())])


def _step_line(rule: str, step: str, decision: Mapping[str, Any]) -> str:
    """What to do about a rule; for one of cases with the run in which they were asked."""
    asked = (decision[rule] or {}).get("run_id") if rule in ("regression", "replay") else None
    return f"  {rule}: {step}{f': agenttrain inspect {asked}' if asked else ''}."


def _rule_line(rule: Mapping[str, Any]) -> str:
    accepted = f"  [{rule['bound']}]" if rule["bound"] else ""
    sign = FAILED if not rule["passed"] else PASSED if rule["asked"] else NOT_ASKED
    return f"{sign} {rule['rule']:<12} {rule['figure']}{accepted}"
