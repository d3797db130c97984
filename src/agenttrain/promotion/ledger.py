"""The ledger: what serves, since when and why, as lines that each hold the hash of the line before.

promotions/<name>/ledger.jsonl, and ledger.head, which says how many lines there are: `number hash` of the last one. A
line counts once it ends in a newline. Lines are only added; a changed, added, moved or missing one is found when the
file is read, also by a reader that holds no lock. Paths inside of the folder that holds promotions/ are written
relative to it, so that a project may be moved whole. Knows nothing of rules, and loads no policy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from agenttrain.disk import append_line, replace_file
from agenttrain.errors import PromotionError
from agenttrain.promotion.alone import alone, cant, user_and_machine
from agenttrain.promotion_record import BASE, Deed, LedgerEntry, RuleResult

LEDGER_VERSION = 1
"""Written into every line; a reader refuses a higher one."""
_FIELDS = {each.name for each in fields(LedgerEntry)} - {"hash"}
_PATHS = ("graph", "policy", "base")
_MAY_LACK = {"base"}
"""Of lines that an older agenttrain wrote."""
PROMOTIONS = Path("promotions")
"""Beside runs/, in the current directory."""


def ledger_folder(root: Path, name: str) -> Path:
    """Where a graph's ledger, regression set and outcomes are kept.

    Args:
        root: the folder that holds promotions/.
        name: `Job.name`, the folder of graph.py.
    """
    return root / PROMOTIONS / name


def serving_now(entries: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """The line that says what serves: the last "promoted" or "rolled_back".

    Returns:
        None where nothing was ever promoted. After a rollback of the first promotion a line whose run_id is `BASE`.
    """
    return next((entry for entry in reversed(entries) if entry.deed in ("promoted", "rolled_back")), None)


def canary_now(entries: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """The canary under way: whatever is done after it ends it."""
    return entries[-1] if entries and entries[-1].deed == "canary" else None


def before_now(entries: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """What a rollback returns to: the line by which it was accepted.

    Returns:
        None: the base, if a run serves now; if not, there is nothing to return from.

    Example: A promoted, B promoted -> A. C promoted after B was rolled back -> A.
    """
    return next(iter(accepted_before(entries)), None)


def accepted_before(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """What was accepted before what serves now and not rolled back since, the last one first."""
    return _accepted(entries)[-2::-1]


def _accepted(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """What was promoted and not rolled back since, in that order; the last one serves."""
    accepted: list[LedgerEntry] = []
    for entry in entries:
        if entry.deed == "promoted":
            accepted.append(entry)
        elif entry.deed == "rolled_back":
            del accepted[-1:]
            while accepted and accepted[-1].run_id != entry.run_id:
                accepted.pop()
    return accepted


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of one graph."""

    folder: Path
    """As of `ledger_folder`; made by the first line."""

    @property
    def file(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def head(self) -> Path:
        return self.folder / "ledger.head"

    def entries(self) -> tuple[LedgerEntry, ...]:
        """The lines, the oldest first, each held against the one before; none where there is no ledger.

        A last line without its newline, of which the head doesn't know, is one that a stopped process did not finish:
        it is none of these, and `unfinished` tells of it.

        Raises:
            PromotionError: a line that is not as it was written, by number; or a file that can't be read.
        """
        head = self._read(self.head)  # before the lines: it is never ahead of lines that are read after it
        lines, _ = self._lines()
        entries = self._verified(lines)
        self._check_head(head, entries)
        return entries

    def unfinished(self) -> str:
        """What a user should know of a last line that was not finished; empty where there is none.

        Raises:
            PromotionError: the file can't be read.
        """
        lines, rest = self._lines()
        if not rest:
            return ""
        return (
            f"{self.file}:{len(lines) + 1} was not finished: a process was stopped while it wrote it, and what it was "
            "about to do was not done. The next line that is written puts it into a file beside the ledger."
        )

    def append(
        self,
        deed: Deed,
        *,
        graph: str,
        run_id: str,
        policy: Path | str,
        weights: str,
        why: str,
        base: Path | str = "",
        by: str | None = None,
        incumbent: str = BASE,
        share: float | None = None,
        results: Sequence[RuleResult] = (),
        hashes: Mapping[str, str | None] | None = None,
        versions: Mapping[str, str] | None = None,
        decided_on: Sequence[LedgerEntry] | None = None,
    ) -> LedgerEntry:
        """Add a line, on disk when this returns; fields as in `LedgerEntry`.

        Args:
            by: None: the user and machine of this process.
            decided_on: the lines that were read before this was decided. None: it holds whatever was done since.

        Raises:
            PromotionError: the ledger is damaged, belongs to another graph or can't be written, or has grown since
                `decided_on` was read.
        """
        with alone(self.folder):
            entries = self.entries()
            self._check_still(entries, decided_on)
            entry = LedgerEntry(
                number=len(entries) + 1,
                at=time.time(),
                deed=deed,
                graph=graph,
                run_id=run_id,
                policy=str(Path(policy).absolute()) if policy else "",
                weights=weights,
                base=str(Path(base).absolute()) if base else "",
                why=why,
                by=user_and_machine() if by is None else by,
                incumbent=incumbent,
                share=share,
                results=tuple(results),
                hashes=dict(hashes or {}),
                versions=dict(versions or {}),
                previous=entries[-1].hash if entries else "",
            )
            self._check_graph(entry, entries)
            return self._written(entry)

    def take_back(self, canary: LedgerEntry, *, why: str, decided_on: Sequence[LedgerEntry]) -> LedgerEntry:
        """Add the line that ends a canary; raises as `append` does.

        Args:
            canary: the line that began it.
        """
        return self.append(
            "taken_back",
            graph=canary.graph,
            run_id=canary.run_id,
            policy=canary.policy,
            weights=canary.weights,
            base=canary.base,
            why=why,
            incumbent=canary.incumbent,
            share=canary.share,
            decided_on=decided_on,
        )

    def _written(self, entry: LedgerEntry) -> LedgerEntry:
        """The entry with its hash, once line and head are on disk."""
        content = self._content(entry)
        digest = _hash(content)
        line = _canonical({**content, "hash": digest}) + b"\n"
        self._put_aside_unfinished(entry.number)
        try:
            if entry.number > 1:
                replace_file(self.head, _head(entry.number - 1, entry.previous))  # a stopped process left it behind
            append_line(self.file, line)
            replace_file(self.head, _head(entry.number, digest))
        except OSError as error:
            raise PromotionError(cant("written", self.file, error)) from error
        return replace(entry, hash=digest)

    def _put_aside_unfinished(self, number: int) -> None:
        """Nothing is lost: the bytes of a line that was not finished go into a file of their own first."""
        lines, rest = self._lines()
        if not rest:
            return
        aside = self.file.with_name(f"ledger.unfinished-{number}-{secrets.token_hex(2)}")
        try:
            replace_file(aside, rest)
            os.truncate(self.file, sum(len(line) + 1 for line in lines))
        except OSError as error:
            raise PromotionError(cant("written", aside, error)) from error

    def _content(self, entry: LedgerEntry) -> dict[str, Any]:
        """A line's object without its hash."""
        content = {"version": LEDGER_VERSION, **asdict(entry)}
        del content["hash"]
        return content | {name: self._relative(content[name]) for name in _PATHS}

    def _lines(self) -> tuple[list[bytes], bytes]:
        """(lines that end in a newline, what stands after the last newline)."""
        *lines, rest = (self._read(self.file) or b"").split(b"\n")
        return lines, rest

    def _verified(self, lines: Sequence[bytes]) -> tuple[LedgerEntry, ...]:
        entries: list[LedgerEntry] = []
        previous = ""
        for number, line in enumerate(lines, start=1):
            content = self._parsed(line, number)
            digest = content.pop("hash", None)
            if line != _canonical({**content, "hash": digest}) or digest != _hash(content):
                raise self._damaged(number, "was changed after it was written: its hash is that of another content")
            if missing := sorted(_FIELDS - _MAY_LACK - content.keys()):
                raise self._damaged(number, f"is no line of a ledger: it lacks {', '.join(missing)}")
            if content["number"] != number or content["previous"] != previous:
                raise self._damaged(
                    number,
                    f"was written as line {content['number']} after another line than the one that stands before it: a "
                    "line was taken out, put in or moved",
                )
            previous = digest
            entries.append(self._entry(content, digest))
        return tuple(entries)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        """A line's object, of a version that can be read."""
        try:
            content = json.loads(line)
            _canonical(content)
        except (ValueError, RecursionError):  # also numbers that JSON doesn't have
            raise self._damaged(number, "is no JSON") from None
        version = content.get("version") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise self._damaged(number, "is no line of a ledger: it names no version")
        if version > LEDGER_VERSION:
            raise PromotionError(
                f"{self.file}:{number} is of ledger version {version}, and this agenttrain reads up to "
                f"{LEDGER_VERSION}. Install the agenttrain that wrote it, or a newer one."
            )
        return dict(content)

    def _entry(self, content: Mapping[str, Any], digest: str) -> LedgerEntry:
        given = {name: content[name] for name in _FIELDS if name in content}
        given["results"] = tuple(RuleResult(**result) for result in content["results"])
        given |= {name: self._absolute(content[name]) for name in _PATHS if name in content}
        return LedgerEntry(**given, hash=digest)

    def _check_head(self, head: bytes | None, entries: Sequence[LedgerEntry]) -> None:
        """Refuse lines that lack the end that was once written. A last line of which the head doesn't know is whole:
        its process was stopped before it came to the head."""
        if head is None:
            if len(entries) > 1:
                raise self._head_damaged("is missing", entries)
            return
        if head in [_head(entry.number, entry.hash) for entry in entries[-2:]]:
            return
        if head.partition(b" ")[0].isdigit() and int(head.partition(b" ")[0]) > len(entries):
            raise self._damaged(len(entries) + 1, f"is cut or missing: {self.head.name} says that it was written whole")
        raise self._head_damaged("names no line of it", entries)

    def _check_graph(self, entry: LedgerEntry, entries: Sequence[LedgerEntry]) -> None:
        """One ledger is of one graph: else what serves would be the policy of another one."""
        if entries and entries[0].graph != entry.graph:
            raise PromotionError(
                f"{self.folder} is the ledger of {entries[0].graph}, and this is {entry.graph}. Work on it from "
                "another directory (promotions/ is made in the current one), or rename the folder that holds graph.py."
            )

    def _check_still(self, entries: Sequence[LedgerEntry], decided_on: Sequence[LedgerEntry] | None) -> None:
        if decided_on is None or [each.hash for each in decided_on] == [each.hash for each in entries]:
            return
        if len(entries) <= len(decided_on):
            raise PromotionError(
                f"{self.file} is another one than this was decided on: it was moved or put back meanwhile. Look at "
                "what serves now, then decide again."
            )
        newest = entries[-1]
        raise PromotionError(
            f"{self.file} has grown meanwhile: {newest.by} wrote line {newest.number} ({newest.deed} "
            f"{newest.run_id}). Look at what serves now, then decide again."
        )

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PromotionError(cant("read", path, error)) from error

    def _relative(self, path: str) -> str:
        """As it is written: relative to what holds promotions/, where it lies inside of it."""
        root = self._root
        return os.path.relpath(path, root) if path and Path(path).is_relative_to(root) else path

    def _absolute(self, path: str) -> str:
        """As it is read."""
        return str(self._root / path) if path else path

    @property
    def _root(self) -> Path:
        return self.folder.resolve().parent.parent

    def _damaged(self, number: int, what: str) -> PromotionError:
        sound = f"Lines 1 to {number - 1} are sound. " if number > 1 else ""
        return PromotionError(
            f"{self.file}:{number} {what}. {sound}Put the file back as it was, from version control or a copy; if "
            f"there is none, move {self.file.name} and {self.head.name} aside and promote again, which begins a new "
            f"ledger. Leave the rest of {self.folder} where it is: the regression set, cases.jsonl, is in it."
        )

    def _head_damaged(self, what: str, entries: Sequence[LedgerEntry]) -> PromotionError:
        end = _head(entries[-1].number, entries[-1].hash).decode().strip() if entries else "nothing"
        return PromotionError(
            f"{self.head} {what}: it holds number and hash of the ledger's last line, so that a line missing at "
            f"the end is found. Put it back as it was, or, if you know that {self.file.name} is whole, write this line "
            f"into it: {end}"
        )


def _canonical(content: Mapping[str, Any]) -> bytes:
    """One text for one content: keys in order, no spaces, only ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _head(number: int, digest: str) -> bytes:
    """What ledger.head holds where this line is the last one."""
    return f"{number} {digest}\n".encode()
