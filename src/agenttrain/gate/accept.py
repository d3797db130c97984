"""THE GATE: an ended fit becomes a policy that may serve, or a list of the rules that keep it from that.

`verdict.Gate` holds it against the rules; `accepted` writes the line by which it serves; `held_to_it` asks what serves
the regression set once more, and takes it back when it fails. Invariant: a line is only written while the ledger is as
it was when it was decided, for a policy that passed every rule.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agenttrain.disk import replace_file
from agenttrain.errors import AgenttrainError, PromotionError, RunError
from agenttrain.folder_hash import policy_hash
from agenttrain.gate.candidate import DECLARED_TODAY, Candidate
from agenttrain.gate.replay import Replay, replayed
from agenttrain.gate.verdict import GateWatcher, Verdict, passes_of
from agenttrain.gate.way_back import canary_ended, rolled_back
from agenttrain.promotion import rules
from agenttrain.promotion.accepted_policy import refuse_changed
from agenttrain.promotion.cases import RegressionSet
from agenttrain.promotion.ledger import Ledger, canary_now, serving_now
from agenttrain.promotion_record import LedgerEntry
from agenttrain.tasks import read_tasks


def refuse_other_canary(entries: Sequence[LedgerEntry], run_id: str) -> None:
    """Refuse to let another run serve while a share of the conversations tries one.

    Raises:
        PromotionError: with what to do.
    """
    canary = canary_now(entries)
    if canary is not None and canary.run_id != run_id:
        raise PromotionError(
            f"{canary.run_id} is a canary: {100 * (canary.share or 0):g} % of the conversations try it. End that "
            f"first: agenttrain promote {canary.run_id} makes it serve, agenttrain promote {canary.run_id} --rollback "
            f"takes it back. Then agenttrain promote {run_id}."
        )


def accepted(candidate: Candidate, verdict: Verdict, ledger: Ledger, *, why: str, share: float | None) -> LedgerEntry:
    """Write the line by which a candidate serves.

    Args:
        verdict: of the candidate; every rule holds.
        share: of the conversations, for a canary. None: it serves them all.

    Raises:
        PromotionError: the policy is not what was checked, or the ledger has grown since.
    """
    weights, checked = policy_hash(candidate.run.policy), (candidate.report or {}).get("policy", {}).get("hash")
    if not verdict.passed or weights != checked:
        raise PromotionError(f"{candidate.run.policy} is not what the gate let pass. Promote again.")
    return ledger.append(
        "promoted" if share is None else "canary",
        graph=candidate.graph,
        run_id=candidate.run.id,
        policy=candidate.run.policy,
        weights=weights,
        base=candidate.job.model or "",
        why=why,
        incumbent=verdict.promotion.incumbent,
        share=share,
        results=verdict.results,
        hashes=candidate.hashes_then,
        versions=candidate.versions,
        decided_on=verdict.entries,
    )


def held_to_it(
    candidate: Candidate,
    verdict: Verdict,
    ledger: Ledger,
    entry: LedgerEntry,
    *,
    runs: Path,
    watcher: GateWatcher,
) -> Verdict:
    """The regression set once more, by what serves by the ledger: what fails it, or can't be asked, is taken back.

    Args:
        entry: the line by which the candidate serves.

    Returns:
        The verdict, with what the replay came to.

    Raises:
        PromotionError: the replay can't be made, and the candidate was taken back.
    """
    cases = RegressionSet(ledger.folder, read_tasks).tasks()
    try:
        served = _line(ledger, entry)
        refuse_changed(served)
        if cases:
            watcher.doing("the regression set once more, by what serves now")
        replay = replayed(candidate.job, cases, policy=Path(served.policy), runs=runs, watcher=watcher)
        in_gate = passes_of(verdict.regression) if verdict.regression is not None else {}
        for case, outcome in replay.outcomes.items():
            if outcome == "unmeasured" and in_gate.get(case):
                raise PromotionError(f"Case {case!r} can't be measured any more: {replay.causes[case]}")
        result = rules.replay(in_gate, passes_of(replay))
    except BaseException as error:
        taken_back(ledger, entry, why=f"its replay could not be made: {type(error).__name__}: {error}")
        if isinstance(error, AgenttrainError):
            raise PromotionError(f"{entry.run_id} was taken back, for its replay could not be made: {error}") from error
        raise
    if not result.passed:
        taken_back(ledger, entry, why=f"replay: {result.figure}")
    promotion = replace(verdict.promotion, results=(*verdict.results, result))
    return replace(verdict, promotion=promotion, replay=replay)


def _line(ledger: Ledger, entry: LedgerEntry) -> LedgerEntry:
    """What the ledger says now of what was just accepted.

    Raises:
        PromotionError: it serves no more.
    """
    entries = ledger.entries()
    served = canary_now(entries) if entry.deed == "canary" else serving_now(entries)
    if served is None or served.number != entry.number:
        raise PromotionError(f"{entry.run_id} serves no more: see agenttrain promote --status.")
    return served


def taken_back(ledger: Ledger, entry: LedgerEntry, *, why: str) -> None:
    """Let what served before a line serve again, unless the ledger has gone on since."""
    entries = ledger.entries()
    if entries[-1].number != entry.number:
        return
    if entry.deed == "canary":
        canary_ended(ledger, entries, why=why)
    else:
        rolled_back(ledger, why=why)


def as_dict(candidate: Candidate, verdict: Verdict, *, deed: str, entry: LedgerEntry | None = None) -> dict[str, Any]:
    """Everything that was decided, and by what.

    Args:
        deed: what came of it: "promoted", "canary", "checked", "refused" or "taken_back".
        entry: the line of the ledger. None: none was written.
    """
    incumbent, compare = verdict.incumbent, verdict.compared
    failed = [result.rule for result in verdict.results if not result.passed]
    failed = failed[:1] if failed[:1] == ["evidence"] else failed  # nothing else was checked
    return {
        "run_id": candidate.run.id,
        "graph": candidate.graph,
        "at": time.time(),
        "deed": deed,
        "share": entry.share if entry is not None else None,
        "ledger_line": entry.number if entry is not None else None,
        "exit_code": rules.exit_code(verdict.results),
        "rules": [asdict(result) for result in verdict.results],
        "next_steps": {rule: rules.NEXT_STEPS[rule] for rule in failed},
        "incumbent": {
            "run_id": verdict.promotion.incumbent,
            "evaluation": incumbent.evaluation.name if incumbent is not None else None,
            "from": incumbent.source if incumbent is not None else None,
        },
        "notes": [
            *candidate.settings,
            *(compare.notes if compare is not None else ()),
            *_earlier_ends(candidate.run.id, verdict.entries),
        ],
        "regression": _of_cases(verdict.regression),
        "replay": _of_cases(verdict.replay),
        "settings": {name: getattr(candidate.job.config, name).model_dump() for name in DECLARED_TODAY},
        "hashes": {"then": dict(candidate.hashes_then), "now": dict(candidate.hashes_now)},
    }


def _earlier_ends(run_id: str, entries: Sequence[LedgerEntry]) -> Iterator[str]:
    """When and why a run was taken back before: its evaluation says nothing of it."""
    for entry in entries:
        taken = entry.deed == "taken_back" and entry.run_id == run_id
        if taken or (entry.deed == "rolled_back" and entry.incumbent == run_id):
            yield f"{run_id} was taken back before, line {entry.number} of the ledger: {entry.why}"


def _of_cases(replay: Replay | None) -> dict[str, Any] | None:
    """The run in which the cases were rolled out, and what each came to."""
    return {"run_id": replay.run_id, "outcomes": dict(replay.outcomes)} if replay is not None else None


def write_decision(candidate: Candidate, decision: Mapping[str, Any]) -> dict[str, Any]:
    """promotion.json in the run's folder: the last decision on it, for audit.

    Returns:
        The decision, and where it is written.

    Raises:
        RunError: it can't be written.
    """
    path = candidate.run.path / "promotion.json"
    try:
        replace_file(path, (json.dumps(decision, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(f"{path} can't be written: {error.strerror or error}. Make room, then promote again.") from error
    return {**decision, "written": str(path)}
