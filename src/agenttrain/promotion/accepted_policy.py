"""Whether the policy that a line of a ledger is about is still what was accepted, told in the same words everywhere.

A policy serves only while its folder is byte by byte what the line recorded. Knows nothing of who serves, and loads no
policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agenttrain.errors import PromotionError
from agenttrain.folder_hash import policy_hash
from agenttrain.promotion_record import BASE, LedgerEntry

State = Literal["as accepted", "gone", "changed", "unreadable"]
"""Of a policy's folder: byte by byte as the line recorded it, not there (or empty), otherwise, or nobody can say."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What became of the policy of a line."""

    state: State
    fault: str
    """In words, with what to do; empty while it is as accepted."""


def standing(
    entry: LedgerEntry, *, otherwise: str | None = None, hash_of: Callable[[Path], str] = policy_hash
) -> Standing:
    """Hold the folder of a line's policy against what the line recorded.

    Args:
        otherwise: what to do where there is no copy of it. None: take it back.
        hash_of: gives the hash of a folder.
    """
    folder = Path(entry.policy)
    try:
        found = hash_of(folder) if folder.is_dir() and any(folder.iterdir()) else None
    except OSError as error:
        return Standing("unreadable", _fault(entry, f"can't be read: {error.strerror or error}", otherwise))
    if found is None:
        return Standing("gone", _fault(entry, "isn't there any more", otherwise))
    if found != entry.weights:
        hashes = f"its hash is {found[:12]}, and that line recorded {entry.weights[:12]}"
        return Standing("changed", _fault(entry, f"is not as it was accepted: {hashes}", otherwise))
    return Standing("as accepted", "")


def refuse_changed(
    entry: LedgerEntry, *, otherwise: str | None = None, hash_of: Callable[[Path], str] = policy_hash
) -> None:
    """Refuse a policy that is not what was accepted; arguments as of `standing`.

    Raises:
        PromotionError: its folder is gone, can't be read, or holds other bytes.
    """
    if fault := standing(entry, otherwise=otherwise, hash_of=hash_of).fault:
        raise PromotionError(fault)


def _fault(entry: LedgerEntry, what: str, otherwise: str | None) -> str:
    name = "The base" if entry.run_id == BASE else entry.run_id
    return (
        f"{name} {_by_line(entry)}, and its policy, {entry.policy}, {what}. Put it back from a copy"
        f"{_otherwise(entry) if otherwise is None else otherwise}."
    )


def _by_line(entry: LedgerEntry) -> str:
    if entry.deed == "canary":
        return f"is a canary by line {entry.number} of the ledger"
    return f"was accepted to serve by line {entry.number} of the ledger"


def _otherwise(entry: LedgerEntry) -> str:
    """The way back; the base has none."""
    if entry.run_id == BASE:
        return ""
    if entry.deed == "canary":
        return f", or take it back: agenttrain promote {entry.run_id} --rollback"
    return ", or let what was accepted before serve again: agenttrain promote --rollback"
