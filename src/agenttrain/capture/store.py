"""Records are put into SQLite files by whoever makes them, and read back as one store.

A run has one file per writing process, and each file one writer thread that owns its connection. A put only queues:
all that is queued at one moment goes into one transaction (WAL, synchronous=NORMAL: a commit survives the death of the
process). `read_store` merges the files of a folder and never writes.

Invariants: a record read back equals the one written (a trained sample but for its routed experts, which the turns
hold); a second put of an equal record changes nothing, and of a
different one fails; after a failure every put and flush raises, so that nothing is lost in silence. Files are
numbered in the order they were made, which no clock decides. A rollout is read from one file: of those that several
processes hold (one was killed, a later one told how it ended), the latest that finished it.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agenttrain.capture.rows import (
    SCHEMA,
    Row,
    begun_row,
    request_of,
    result_rows,
    rollout_of,
    sample_of,
    takes_from_turns,
    trained_of,
    trained_row,
    trajectory_of,
    turn_of,
    turn_row,
)
from agenttrain.errors import CaptureError, RunError
from agenttrain.records import (
    RECORD_VERSION,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sample,
    TrainedSample,
    Trajectory,
    Turn,
)

WAVE: Final = 4096
"""Puts that one transaction takes at most."""

_NUMBERED: Final = re.compile(r"([0-9]{5})-[0-9]+-[0-9a-f]{8}\.db")

Put = Callable[[], list[Row]]
"""Rows to write; made on the writer thread where the record can't change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A model call that was begun; lost when no turn was recorded for it."""

    turn_id: str
    rollout_id: str
    started_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A rollout that was begun."""

    request: RolloutRequest
    started_at: float
    """Unix seconds."""


class SqliteStore:
    """Keeps every record of this process in one new file of a folder. Thread-safe.

    Example: store = SqliteStore(run_dir / "rollouts"); store.put_turn(turn); store.flush(); store.close()
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder and the file.

        Raises:
            RunError: neither can be written.
        """
        self.path = folder / f"{_next_number(folder):05d}-{os.getpid()}-{secrets.token_hex(4)}.db"
        self._queue: queue.SimpleQueue[Put | Future[None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._closed = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="agenttrain-store", daemon=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} can't be made: {error}. Free the disk or choose a folder to write in.") from error
        self._thread.start()
        opened.result()

    def put_begun(self, request: RolloutRequest, *, started_at: float) -> None:
        """Queue that a rollout begins. The task is read now: the graph may change it later."""
        row = begun_row(request, started_at)
        self._send(lambda: [row])

    def put_all_of(self, begun: Begun, calls: Sequence[Intent], result: RolloutResult) -> None:
        """Queue a whole rollout that another file holds in part: no kill leaves it in two halves."""
        rows = [begun_row(begun.request, begun.started_at)]
        rows += [("intents", (call.turn_id, call.rollout_id, call.started_at)) for call in calls]
        rows += [*map(turn_row, result.turns), *result_rows(result)]
        self._send(lambda: rows)

    def put_intent(self, *, turn_id: str, rollout_id: str, started_at: float) -> None:
        row: Row = ("intents", (turn_id, rollout_id, started_at))
        self._send(lambda: [row])

    def put_turn(self, turn: Turn) -> None:
        self._send(lambda: [turn_row(turn)])

    def put_result(self, result: RolloutResult) -> None:
        """Queue a rollout, its trajectories and samples. The task is read now: the graph may change it later."""
        rows = result_rows(result)
        self._send(lambda: rows)

    def put_trained(
        self,
        step: int,
        life: int,
        samples: Sequence[Sample],
        *,
        advantages: Sequence[Sequence[float]] = (),
        staleness: Sequence[int | None] = (),
    ) -> None:
        """Queue what a step handed to its loss, exactly; a trajectory that is trained twice fails.

        Routed experts are left out: the turns of the rollout hold them, and the samples of a whole run are read at
        once.

        Args:
            life: of the run, when the step was made.
            advantages: [samples][T]; empty: the trainer did not tell.
            staleness: [samples]; empty: not known.
        """
        n = len(samples)
        each = zip(samples, staleness or [None] * n, advantages or [()] * n, strict=True)
        rows = [trained_row(step, life, sample, age, credit) for sample, age, credit in each]
        self._send(lambda: rows)

    def flush(self) -> None:
        done: Future[None] = Future()
        self._send(done)
        done.result()

    def close(self) -> None:
        """Write what is queued and end the thread. Closing twice does nothing.

        Raises:
            RunError, CaptureError: something that was put could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failed()

    def _send(self, item: Put | Future[None]) -> None:
        if self._failure is not None:
            raise self._failed()
        if self._closed:
            raise RunError(f"{self.path} was closed. Put records before the store is closed.")
        self._queue.put(item)

    def _failed(self) -> Exception:
        failure = self._failure
        if isinstance(failure, CaptureError):
            return CaptureError(str(failure))
        return RunError(
            f"{self.path} can't be written: {failure}. What was flushed before is kept. "
            "Free the disk, then go on with agenttrain fit --resume."
        )

    # The writer thread

    def _run(self, opened: Future[None]) -> None:
        try:
            connection = _create(self.path)
        except sqlite3.Error as error:
            self._failure = error
            opened.set_exception(self._failed())
            return
        opened.set_result(None)
        with closing(connection):
            while self._serve(connection, self._wave()):
                pass
            self._serve(connection, [item for item in self._late() if item])

    def _wave(self) -> list[Put | Future[None] | None]:
        """What is queued now; waits for the first."""
        wave = [self._queue.get()]
        while len(wave) < WAVE and not self._queue.empty():
            wave.append(self._queue.get())
        return wave

    def _late(self) -> Iterator[Put | Future[None] | None]:
        """What other threads queued while the store was being closed."""
        while not self._queue.empty():
            yield self._queue.get()

    def _serve(self, connection: sqlite3.Connection, wave: Sequence[Put | Future[None] | None]) -> bool:
        """Write one wave and answer its flushes; False after the last."""
        puts = [item for item in wave if callable(item)]
        if self._failure is None and puts:
            self._write(connection, puts)
        for item in wave:
            if isinstance(item, Future):
                item.set_result(None) if self._failure is None else item.set_exception(self._failed())
        return None not in wave

    def _write(self, connection: sqlite3.Connection, puts: Sequence[Put]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for put in puts:
                for table, values in put():
                    _insert(connection, table, values)
            connection.execute("COMMIT")
        except Exception as error:
            # Nothing may end this thread in silence: whoever puts or flushes next gets the failure.
            self._failure = error
            if connection.in_transaction:
                _roll_back(connection)


def _next_number(folder: Path) -> int:
    """One more than the highest there: a file that was moved away leaves a gap."""
    numbers = [match[1] for file in folder.glob("*.db") if (match := _NUMBERED.fullmatch(file.name))]
    return 1 + max(map(int, numbers), default=-1)


def _create(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={RECORD_VERSION}; COMMIT;")
    return connection


def _insert(connection: sqlite3.Connection, table: str, values: tuple[Any, ...]) -> None:
    marks = ", ".join("?" * len(values))
    if connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", values).rowcount == 1:
        return
    n_key = 2 if table in ("trajectories", "samples", "trained") else 1
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")][:n_key]
    where = " AND ".join(f"{name} = ?" for name in columns)
    if connection.execute(f"SELECT * FROM {table} WHERE {where}", values[:n_key]).fetchone() != values:
        raise CaptureError(
            f"{values[0]} was put into {table} twice with different content. A record is written once: "
            "give a new attempt its own rollout id."
        )


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # SQLite has rolled back by itself, as it does on a full disk.


# Reading


def read_store(folder: Path) -> StoreView:
    """All that the files of a folder hold, as of each question; processes may still be writing.

    Raises:
        RunError: the folder is missing, a file is damaged, or its records have a higher version than this agenttrain.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder. Give the rollouts folder of a run: runs/<id>/rollouts.")
    view = StoreView(folder)
    view.refuse_unreadable()
    return view


class StoreView:
    """Reads the merged records of a folder. Make it with `read_store`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rollouts(self) -> tuple[Rollout, ...]:
        """Every finished rollout, by life of the run and start."""
        return tuple(rollout for rollout, _ in self._finished())

    def rollout(self, id: str) -> Rollout:
        """One finished rollout.

        Raises:
            RunError: no file holds it; names some that are there.
        """
        for body in self._of_rollout("SELECT body FROM results", id):
            return rollout_of(json.loads(body[0])["rollout"])
        known = ", ".join(rollout.id for rollout in self.rollouts()[:5]) or "none"
        raise RunError(f"{self.folder} holds no finished rollout {id!r}. Rollouts there: {known} …")

    def turns(self, rollout_id: str) -> tuple[Turn, ...]:
        """The turns of a rollout, finished or not, by index."""
        turns = map(turn_of, self._of_rollout("SELECT * FROM turns", rollout_id))
        return tuple(sorted(turns, key=lambda turn: turn.index))

    def trajectories(self, rollout_id: str) -> tuple[Trajectory, ...]:
        rows = self._of_rollout("SELECT * FROM trajectories", rollout_id)
        turns = self.turns(rollout_id) if any(map(takes_from_turns, rows)) else ()
        return _trajectories(rows, turns)

    def prefix_breaks(self) -> dict[str, Counter[str]]:
        """Finished rollout to its trajectories but the first, by why they began."""
        counts = self._counts(
            "SELECT rollout_id, json_extract(body, '$.break_cause'), COUNT(*) FROM trajectories GROUP BY 1, 2"
        )
        return {id: Counter({why: n for why, n in of.items() if why != "first_turn"}) for id, of in counts.items()}

    def respelled(self) -> dict[str, Counter[str]]:
        """Rollout to its turns after a reply that the template would write otherwise, by how; those that have any."""
        return self._counts(
            "SELECT rollout_id, each.value, COUNT(*) FROM turns, json_each(body, '$.respelled') AS each GROUP BY 1, 2"
        )

    def _counts(self, query: str) -> dict[str, Counter[str]]:
        """Rollout to a count by cause, each rollout from the one file that it is read from."""
        homes, counts = self._homes(), dict[str, Counter[str]]()
        for path in self.paths():
            for id, cause, n in self._rows(path, query):
                if homes.get(id) == path:
                    counts.setdefault(id, Counter())[cause] += n
        return counts

    def results(self, wanted: Callable[[Rollout], bool] = lambda rollout: True) -> Iterator[RolloutResult]:
        """The finished rollouts that are wanted with all that they left, one at a time, by start."""
        for rollout, path in self._finished():
            if wanted(rollout):
                with self._open(path) as connection:
                    yield _result(connection, rollout)

    def unfinished(self) -> tuple[Begun, ...]:
        """The rollouts that were begun and that no file holds a result of, in the order they began."""
        done = {rollout.id for rollout, _ in self._finished()}
        rows = [row for path in self.paths() for row in self._rows(path, "SELECT * FROM begun ORDER BY rowid", since=2)]
        return tuple(
            Begun(request=request_of(json.loads(body)), started_at=at) for id, at, body in rows if id not in done
        )

    def refuse_unreadable(self) -> None:
        """Open every file once.

        Raises:
            RunError: one is no store of ours, or of a newer version.
        """
        for path in self.paths():
            self._rows(path, "SELECT 1")

    def refuse_damaged(self) -> None:
        """Look through all files, so that what can't be read is told before anything builds on it.

        Raises:
            RunError: naming the first damaged file.
        """
        for path in self.paths():
            for (found,) in self._rows(path, "PRAGMA quick_check(1)"):
                if found != "ok":
                    raise RunError(_damaged(path, found.splitlines()[-1]))

    def trained_samples(self, lives: Mapping[int, int] | None = None) -> list[Sample]:
        """What was handed to the loss.

        Args:
            lives: step to the life that made it, of the steps that count; an undone step is left out. None: of each
                step the last life.
        """
        rows = [row for path in self.paths() for row in self._rows(path, "SELECT * FROM trained")]
        if lives is None:
            lives = {}
            for _, _, step, life, *_ in rows:
                lives[step] = max(life, lives.get(step, 0))
        return [trained_of(row).sample for row in rows if row[3] == lives.get(row[2])]

    def trained(self, rollout_id: str) -> list[TrainedSample]:
        """The samples of a rollout that steps handed to their loss, undone steps too."""
        query = "SELECT * FROM trained WHERE rollout_id = ?"
        return [trained_of(row) for path in self.paths() for row in self._rows(path, query, (rollout_id,))]

    def turn(self, id: str) -> Turn | None:
        """One turn, or None."""
        rows = self._of_rollout("SELECT * FROM turns", id.rpartition("#")[0])
        return next((turn for turn in map(turn_of, rows) if turn.id == id), None)

    def turn_of_span(self, span_id: str) -> Turn | None:
        """The turn whose call had that span, or None."""
        query = "SELECT id FROM turns WHERE json_extract(body, '$.span_id') = ?"
        ids = [id for path in self.paths() for (id,) in self._rows(path, query, (span_id,))] if span_id else []
        return self.turn(ids[-1]) if ids else None

    def intents(self) -> tuple[Intent, ...]:
        """Every call that was begun, by start; those with a turn are not lost."""
        return self._intents("SELECT turn_id, rollout_id, started_at FROM intents")

    def intents_of(self, rollout_id: str) -> tuple[Intent, ...]:
        """The calls that a rollout began, by start."""
        rows = self._of_rollout("SELECT turn_id, rollout_id, started_at FROM intents", rollout_id)
        calls = [Intent(turn_id=id, rollout_id=of, started_at=at) for id, of, at in rows]
        return tuple(sorted(calls, key=lambda call: (call.started_at, call.turn_id)))

    def lost_calls(self) -> tuple[Intent, ...]:
        """Calls that were begun and whose answer no file holds."""
        return self._intents(
            "SELECT turn_id, rollout_id, started_at FROM intents WHERE turn_id NOT IN (SELECT id FROM turns)"
        )

    def paths(self) -> tuple[Path, ...]:
        """The files, the oldest first."""
        return tuple(sorted(self.folder.glob("*.db")))

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        """A connection that can't write; it reads what a killed process left in its WAL too."""
        try:
            with closing(_reader(path)) as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version > RECORD_VERSION:
                    raise RunError(
                        f"{path} holds records of version {version}, and this agenttrain reads up to {RECORD_VERSION}. "
                        "Install the agenttrain that wrote it, or a newer one."
                    )
                yield connection
        except sqlite3.Error as error:
            raise RunError(_damaged(path, str(error))) from error

    def _rows(self, path: Path, query: str, values: Sequence[Any] = (), *, since: int = 1) -> list[tuple[Any, ...]]:
        """Rows of a file, none where its records are of a version before `since`: 0 when it was only just made."""
        with self._open(path) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            return connection.execute(query, values).fetchall() if version >= since else []

    def _homes(self, rollout_id: str | None = None) -> dict[str, Path]:
        """Rollout id to the file that it is read from: the latest that finished it, else the latest that began it."""
        homes: dict[str, Path] = {}
        paths = self.paths()
        where, values = ("", ()) if rollout_id is None else (" WHERE rollout_id = ?", (rollout_id,))
        for table in ("intents", "turns", "results"):
            for path in paths:
                homes |= dict.fromkeys(
                    (id for (id,) in self._rows(path, f"SELECT DISTINCT rollout_id FROM {table}{where}", values)), path
                )
        return homes

    def _of_rollout(self, query: str, rollout_id: str) -> list[tuple[Any, ...]]:
        home = self._homes(rollout_id).get(rollout_id)
        return self._rows(home, f"{query} WHERE rollout_id = ?", (rollout_id,)) if home else []

    def _finished(self) -> list[tuple[Rollout, Path]]:
        latest: dict[str, tuple[Rollout, Path]] = {}
        for path in self.paths():
            for id, body in self._rows(path, "SELECT rollout_id, body FROM results"):
                latest[id] = (rollout_of(json.loads(body)["rollout"]), path)
        return sorted(latest.values(), key=lambda found: (found[0].life, found[0].started_at, found[0].id))

    def _intents(self, query: str) -> tuple[Intent, ...]:
        homes = self._homes()
        calls = [
            Intent(turn_id=id, rollout_id=of, started_at=at)
            for path in self.paths()
            for id, of, at in self._rows(path, query)
            if homes.get(of) == path  # a process that is still writing may have begun it since
        ]
        return tuple(sorted(calls, key=lambda call: (call.started_at, call.turn_id)))


def _reader(path: Path) -> sqlite3.Connection:
    """A connection for reading only. On a disk that may not be written SQLite can't make the index of a WAL; a file
    without a WAL is whole, and is read as one that nobody changes."""
    address = f"{path.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=30)
    try:
        connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists() or os.access(path.parent, os.W_OK):
            raise
        return sqlite3.connect(f"{address}&immutable=1", uri=True)
    return connection


def _damaged(path: Path, why: str) -> str:
    return (
        f"{path} can't be read: {why}. Move the file and its -wal away to go on with the others: what it held is made "
        "again where the run needs it."
    )


def _result(connection: sqlite3.Connection, rollout: Rollout) -> RolloutResult:
    def rows(columns: str, table: str, order: str = "") -> list[tuple[Any, ...]]:
        query = f"SELECT {columns} FROM {table} WHERE rollout_id = ? {order}"
        return connection.execute(query, (rollout.id,)).fetchall()

    ((body,),) = rows("body", "results")
    turns = tuple(sorted(map(turn_of, rows("*", "turns")), key=lambda turn: turn.index))
    paths = _trajectories(rows("*", "trajectories", "ORDER BY place"), turns)
    return RolloutResult(
        request=request_of(json.loads(body)["request"]),
        rollout=rollout,
        turns=turns,
        trajectories=paths,
        samples=tuple(sample_of(row, paths) for row in rows("*", "samples", "ORDER BY place")),
    )


def _trajectories(rows: Sequence[tuple[Any, ...]], turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    by_id = {turn.id: turn for turn in turns}
    return tuple(trajectory_of(row, by_id) for row in rows)
