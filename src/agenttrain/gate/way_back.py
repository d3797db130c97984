"""The ledger's way back: what was accepted before serves again, a canary ends; and what serves is what was accepted.

A policy serves again only when its folder is byte by byte what the ledger recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.config import resolve
from agenttrain.errors import AgenttrainError, PromotionError
from agenttrain.export.policy_source import ledger_lines
from agenttrain.folder_hash import policy_hash
from agenttrain.prepare import model_folder, model_hash
from agenttrain.promotion.ledger import Ledger, before_now, canary_now, serving_now
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.run_folder import RunFolder, moved_tables


def refuse_changed(entry: LedgerEntry) -> None:
    """Refuse a policy that is not what was accepted.

    Raises:
        PromotionError: its folder is gone, or holds other bytes.
    """
    folder = Path(entry.policy)
    try:
        found = policy_hash(folder) if folder.is_dir() else None
    except OSError as error:
        raise PromotionError(f"{folder} can't be read: {error.strerror or error}. Make it readable again.") from error
    if found == entry.weights:
        return
    what = (
        "isn't there any more" if found is None else f"is not as it was accepted ({found[:12]}, {entry.weights[:12]})"
    )
    raise PromotionError(
        f"The policy of {entry.run_id}, {folder}, {what}. Put it back from a copy: the ledger's line {entry.number} "
        "holds its hash, and nothing else may serve by it."
    )


def refuse_to_replace(run: RunFolder) -> None:
    """Refuse to train a policy on that the ledger may let serve: its folder would hold another one.

    Raises:
        PromotionError: naming the line, and how to train on from it.
    """
    accepted = next((entry for entry in ledger_lines(run) if entry.deed in ("promoted", "canary")), None)
    if accepted is not None:
        raise PromotionError(
            f"{run.id} was accepted to serve (line {accepted.number} of its ledger), and to go on with it would "
            f"replace {run.policy}. Train on from it in a new run: agenttrain fit GRAPH --model {run.policy}"
        )


def canary_ended(ledger: Ledger, entries: Sequence[LedgerEntry], *, why: str) -> LedgerEntry:
    """End the canary under way: all conversations go to what serves.

    Raises:
        PromotionError: no canary is under way, or the ledger has grown since it was read.
    """
    canary = canary_now(entries)
    if canary is None:
        raise PromotionError(f"No canary is under way in {ledger.folder}. See agenttrain promote --status.")
    return ledger.take_back(canary, why=why, decided_on=entries)


def rolled_back(ledger: Ledger, *, why: str) -> list[LedgerEntry]:
    """Let what was accepted before serve again; a canary under way ends first.

    Returns:
        The lines that were written.

    Raises:
        PromotionError: nothing was promoted, or what served before is not as it was accepted; then nothing is written.
    """
    entries = ledger.entries()
    now, canary = serving_now(entries), canary_now(entries)
    if now is None or now.run_id == BASE:
        if canary is not None:
            return [canary_ended(ledger, entries, why=why)]
        raise PromotionError(f"The base serves by {ledger.folder}: there is nothing to go back from.")
    before = before_now(entries)
    policy, weights = _accepted(before) if before is not None else _base(now)
    written = [canary_ended(ledger, entries, why=why)] if canary is not None else []
    line = ledger.append(
        "rolled_back",
        graph=now.graph,
        run_id=before.run_id if before is not None else BASE,
        policy=policy,
        weights=weights,
        why=why,
        incumbent=now.run_id,
        hashes=before.hashes if before is not None else {},
        versions=before.versions if before is not None else {},
        decided_on=(*entries, *written),
    )
    return [*written, line]


def _accepted(entry: LedgerEntry) -> tuple[str, str]:
    refuse_changed(entry)
    return entry.policy, entry.weights


def _base(now: LedgerEntry) -> tuple[str, str]:
    """(folder, hash) of the base that what serves was trained from; of a graph that was moved, beside it there.

    Raises:
        PromotionError: it can't be found, or is another by now.
    """
    run = RunFolder(Path(now.policy).parent)
    try:
        tables, made_by = run.read_config()
        moved = moved_tables(tables, Path(made_by["graph"]).parent, Path(now.graph.rpartition(":")[0]).parent)
        folder = model_folder(resolve((str(run.path), {"model": moved["model"]})))
        found = model_hash(folder)
    except (AgenttrainError, OSError, KeyError) as error:
        raise PromotionError(
            f"The base of {now.run_id} can't be found, and nothing else was accepted before it: {error} Put it back, "
            "or promote another run."
        ) from error
    if found != now.hashes.get("model"):
        raise PromotionError(
            f"The base of {now.run_id}, {folder}, is not as it was when that was promoted ({found}, "
            f"{now.hashes.get('model')}). Put it back from a copy, or promote another run."
        )
    return str(folder), policy_hash(folder)
