"""The ledger's way back: what was accepted before serves again, a canary ends.

A policy serves again only when its folder is byte by byte what the ledger recorded. The run that serves need not be
there any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.config import resolve
from agenttrain.errors import AgenttrainError, PromotionError
from agenttrain.export.policy_source import ledger_lines
from agenttrain.folder_hash import policy_hash
from agenttrain.prepare import model_folder, model_hash
from agenttrain.promotion.accepted_policy import refuse_changed, standing
from agenttrain.promotion.ledger import Ledger, accepted_before, canary_now, serving_now
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.run_folder import RunFolder, moved_tables


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
    before, passed_over = _before(now, entries)
    why += "".join(f"; {each.run_id} is gone" for each in passed_over)
    if before is not None:
        refuse_changed(before, otherwise=", or promote another run")
        policy, weights = before.policy, before.weights
    else:
        policy, weights = _base(now, entries)
    written = [canary_ended(ledger, entries, why=why)] if canary is not None else []
    line = ledger.append(
        "rolled_back",
        graph=now.graph,
        run_id=before.run_id if before is not None else BASE,
        policy=policy,
        weights=weights,
        base=before.base if before is not None else policy,
        why=why,
        incumbent=now.run_id,
        hashes=before.hashes if before is not None else {},
        versions=before.versions if before is not None else {},
        decided_on=(*entries, *written),
    )
    return [*written, line]


def _before(now: LedgerEntry, entries: Sequence[LedgerEntry]) -> tuple[LedgerEntry | None, list[LedgerEntry]]:
    """(what serves again, or None for the base; what is passed over for it, since neither it nor what serves is there).

    While what serves is as it was accepted nothing is passed over: then there is time to put back what is gone.
    """
    earlier = accepted_before(entries)
    if not earlier or not _is_gone(earlier[0]) or standing(now).state == "as accepted":
        return (earlier[0] if earlier else None), []
    n_gone = next((n for n, each in enumerate(earlier) if not _is_gone(each)), len(earlier))
    return (earlier[n_gone] if n_gone < len(earlier) else None), earlier[:n_gone]


def _is_gone(entry: LedgerEntry) -> bool:
    return not Path(entry.policy).is_dir()


def _base(now: LedgerEntry, entries: Sequence[LedgerEntry]) -> tuple[str, str]:
    """(folder, hash) of the base that what serves was trained from: where the ledger has it, else where its run does.

    Raises:
        PromotionError: it can't be found, or is another by now.
    """
    made_from = now.hashes.get("model")
    told = _bases_told(now, entries) if made_from is not None else []
    folder = next((each for each in told if _model_hash(each) == made_from), None)
    if folder is None:
        folder = _base_of_run(now)
        if (found := model_hash(folder)) != made_from:
            raise PromotionError(
                f"The base of {now.run_id}, {folder}, is not as it was when that was promoted ({found}, {made_from}). "
                "Put it back from a copy, or promote another run."
            )
    return str(folder), policy_hash(folder)


def _bases_told(now: LedgerEntry, entries: Sequence[LedgerEntry]) -> list[Path]:
    """Where the ledger says that a base was, the likeliest first."""
    told = [now.base, *(each.policy if each.run_id == BASE else each.base for each in reversed(entries))]
    return [Path(folder) for folder in dict.fromkeys(told) if folder]


def _model_hash(folder: Path) -> str | None:
    try:
        return model_hash(folder)
    except OSError:
        return None


def _base_of_run(now: LedgerEntry) -> Path:
    """By the run's config.toml; of a graph that was moved, beside it there.

    Raises:
        PromotionError: it can't be found.
    """
    run = RunFolder(Path(now.policy).parent)
    try:
        tables, made_by = run.read_config()
        moved = moved_tables(tables, Path(made_by["graph"]).parent, Path(now.graph.rpartition(":")[0]).parent)
        folder = model_folder(resolve((str(run.path), {"model": moved["model"]})))
        model_hash(folder)
    except (AgenttrainError, OSError, KeyError) as error:
        told = f"{now.base}, where the ledger has it, holds it no more; " if now.base else ""
        raise PromotionError(
            f"The base of {now.run_id} can't be found, and nothing else was accepted before it: {told}{error} Put it "
            "back, or promote another run."
        ) from error
    return folder
