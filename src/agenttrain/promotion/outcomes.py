"""What came of the conversations while a canary is tried: promotions/<name>/canary.db, shared by all processes.

A trial is one canary, named by the hash of its ledger line. Of each conversation it holds who began to answer it, the
last word on how it went, and every word (`history`, only added to); and of each look at the counts what it saw, so that
each is made once whatever process comes to it. SQLite in WAL mode: the folder must not be on a network file system.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from agenttrain.errors import PromotionError
from agenttrain.promotion.canary import ArmCount, Look, look_sizes, looked

Source = Literal["told", "raised", "ended"]
"""told: by the user's own word; raised: a run of the graph did; ended: a run ended, and nobody said how it went."""
Arm = Literal["canary", "incumbent", "before"]
"""Who began to answer a conversation; before: it began before the canary did, and counts for nobody."""
WAIT_S: Final = 10.0
"""For another process that writes."""
_SCHEMA = """
create table if not exists answered (
    trial text, conversation text, arm text, at real, primary key (trial, conversation)) without rowid;
create table if not exists outcomes (
    trial text, conversation text, is_canary integer, success integer, source text, at real,
    primary key (trial, conversation, is_canary)) without rowid;
create table if not exists history (
    id integer primary key, trial text, conversation text, is_canary integer, success integer, source text, why text,
    at real);
create table if not exists looks (
    trial text, number integer, canary_n integer, canary_success integer, incumbent_n integer,
    incumbent_success integer, p real, bound real, at real, primary key (trial, number)) without rowid;
"""
_COUNTED = "source != 'ended' or not exists (select 1 from outcomes where trial = :trial and source = 'told')"
"""Runs that only ended say nothing beside those of which somebody said how they went."""


class Outcomes:
    """The outcomes of one graph's canaries. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open canary.db in a folder that is there, or make it.

        Raises:
            PromotionError: it can't be opened.
        """
        self._path = folder / "canary.db"
        self._lock = threading.Lock()
        with self._told():
            self._db = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._db.close()

    def answered(self, trial: str, conversation: str, arm: Arm) -> None:
        """Note who began to answer a conversation: the first word counts, and any before "before"."""
        with self._written() as db:
            db.execute(
                "insert into answered values (?, ?, ?, ?) on conflict do update set arm = excluded.arm, "
                "at = excluded.at where arm = 'before'",
                (trial, conversation, arm, time.time()),
            )

    def disown(self, trial: str, conversations: list[str]) -> None:
        """Let conversations count for nobody."""
        with self._written() as db:
            db.executemany(
                "update answered set arm = 'before' where trial = ? and conversation = ?",
                [(trial, conversation) for conversation in conversations],
            )

    def arm_of(self, trial: str, conversation: str) -> Arm | None:
        """Who began to answer it. None: nobody is known to have."""
        found = self._read("select arm from answered where trial = ? and conversation = ?", trial, conversation)
        return found[0][0] if found else None

    def record(
        self, trial: str, conversation: str, success: bool, *, is_canary: bool, source: Source = "told", why: str = ""
    ) -> None:
        """Note how a conversation went: the last word counts, and one that somebody said before a run that ended."""
        row = (trial, conversation, is_canary, success, source)
        with self._written() as db:
            now = time.time()
            db.execute(
                "insert into history (trial, conversation, is_canary, success, source, why, at) "
                "values (?, ?, ?, ?, ?, ?, ?)",
                (*row, why, now),
            )
            db.execute(
                "insert into outcomes values (?, ?, ?, ?, ?, ?) on conflict do update set success = excluded.success, "
                "source = excluded.source, at = excluded.at where excluded.source != 'ended' or source != 'told'",
                (*row, now),
            )

    def counts(self, trial: str) -> tuple[ArmCount, ArmCount]:
        """(the canary's, the incumbent's) outcomes."""
        return _counts(self._read(_COUNTS, trial=trial))

    def conversations(self, trial: str) -> tuple[int, int]:
        """How many conversations (the canary, the incumbent) began to answer."""
        rows = self._read("select arm, count(*) from answered where trial = ? group by arm", trial)
        found: dict[Arm, int] = dict(rows)
        return found.get("canary", 0), found.get("incumbent", 0)

    def look(self, trial: str, *, min_outcomes: int, false_alarm: float) -> Look | None:
        """Look at a trial if its next look is due, and give the look that showed the canary to do worse.

        Returns:
            None while none did. After one did it is given at each call, so that a process that was killed before it
            acted on it is made up for.
        """
        with self._written() as db:
            counts = _counts(db.execute(_COUNTS, {"trial": trial}).fetchall())
            number = len(look_sizes(counts[0].n, min_outcomes=min_outcomes))
            last = db.execute("select max(number) from looks where trial = ?", (trial,)).fetchone()[0] or 0
            if number > last:
                _put(db, trial, looked(number, *counts, false_alarm=false_alarm))
            rows = db.execute(f"select {_LOOK} from looks where trial = ? and p <= bound limit 1", (trial,)).fetchall()
        return _look(rows[0]) if rows else None

    def looks(self, trial: str) -> tuple[Look, ...]:
        """Every look that was made, in order."""
        return tuple(map(_look, self._read(f"select {_LOOK} from looks where trial = ? order by number", trial)))

    def _read(self, query: str, *values: object, **named: object) -> list[Any]:
        with self._lock, self._told():
            return self._db.execute(query, named or values).fetchall()

    @contextmanager
    def _written(self) -> Iterator[sqlite3.Connection]:
        """One transaction, alone among all processes."""
        with self._lock, self._told():
            self._db.execute("begin immediate")
            try:
                yield self._db
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise PromotionError(
                f"{self._path} can't be used: {error}. It counts how a canary does: give this process a folder that it "
                "may write to, on a disk of this machine (no network file system); moved aside, it is made anew."
            ) from error


_COUNTS = (
    f"select is_canary, count(*), sum(success) from outcomes where trial = :trial and ({_COUNTED}) group by is_canary"
)
_LOOK = "number, canary_n, canary_success, incumbent_n, incumbent_success, p, bound"


def _counts(rows: list[Any]) -> tuple[ArmCount, ArmCount]:
    found = {is_canary: ArmCount(n=n, n_success=n_success) for is_canary, n, n_success in rows}
    nothing = ArmCount(n=0, n_success=0)
    return found.get(1, nothing), found.get(0, nothing)


def _put(db: sqlite3.Connection, trial: str, look: Look) -> None:
    canary, incumbent = look.canary, look.incumbent
    counts = (canary.n, canary.n_success, incumbent.n, incumbent.n_success)
    row = (trial, look.number, *counts, look.p, look.bound, time.time())
    db.execute("insert into looks values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _look(row: tuple[float, ...]) -> Look:
    number, canary_n, canary_success, incumbent_n, incumbent_success, p, bound = row
    return Look(
        number=int(number),
        canary=ArmCount(n=int(canary_n), n_success=int(canary_success)),
        incumbent=ArmCount(n=int(incumbent_n), n_success=int(incumbent_success)),
        p=p,
        bound=bound,
    )
