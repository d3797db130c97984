"""A run's folder: made, found again, written to. Knows file names and nothing of what is in the records.

runs/<id>/config.toml  tasks/{train,evaluated}.jsonl  rollouts/*.db  metrics.jsonl  lives.json  checkpoints/step-N/
policy/  report.json  report.md
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w

from agenttrain.disk import replace_file
from agenttrain.errors import RunError
from agenttrain.records import Task

SPARE_BYTES = 64 * 2**20
"""Room for the rollouts of a run, asked for before it starts."""
REPLAY = "replay-"
"""How the ids of runs begin in which a promotion asked the regression set."""
MOST_TOLD = 5
"""Runs that are named where none was found."""
_CHECKPOINT = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's files."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluated_tasks(self) -> Path:
        """A task file: those that were evaluated, in order."""
        return self.path / "tasks" / "evaluated.jsonl"

    @property
    def train_tasks(self) -> Path:
        """A task file: those that may be trained on; not there where none is."""
        return self.path / "tasks" / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    def write_config(self, tables: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """config.toml: the resolved tables, and where everything came from under [provenance]."""
        written = _without_none({**tables, "provenance": dict(provenance)})
        _write(self.path / "config.toml", tomli_w.dumps(written).encode())

    def read_config(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tables, provenance) as they were written.

        Raises:
            RunError: there is no readable config.toml.
        """
        path = self.path / "config.toml"
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise RunError(f"{path} can't be read: {error}. Name the folder of a run that agenttrain made.") from None
        return tables, tables.pop("provenance", {})

    def write_tasks(self, path: Path, tasks: Sequence[Task]) -> None:
        """Tasks as a task file; none leaves no file."""
        if not tasks:
            return
        path.parent.mkdir(exist_ok=True)
        rows = [{key: value for key, value in asdict(task).items() if value is not None} for task in tasks]
        _write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl, on disk when this returns."""
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(_cant_write(self.path / "metrics.jsonl", error)) from error

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl; a last one that a killed process left without its end is none.

        Raises:
            RunError: a line that is no JSON.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        return [_parsed(line, path) for line in whole.split("\n") if line.strip()]

    def drop_metrics_after(self, step: int) -> None:
        """On resume: lines past the checkpoint go, so that each step stands once."""
        kept = [row for row in self.metrics() if row["step"] <= step]
        _write(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept).encode())

    def write_life(self, life: Mapping[str, Any]) -> None:
        """Let lives.json tell this of the life of that number, and the same as before of the others."""
        others = [each for each in self.lives() if each["life"] != life["life"]]
        _write(self.path / "lives.json", (json.dumps([*others, life], indent=1) + "\n").encode())

    def lives(self) -> list[dict[str, Any]]:
        """What each life of the run came to as far as it was written, the first one first.

        Raises:
            RunError: it is no JSON.
        """
        path = self.path / "lives.json"
        if not path.exists():
            return []
        found: list[dict[str, Any]] = _parsed(path.read_text(encoding="utf-8", errors="replace"), path)
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process from going on with this run; a process that is killed lets go.

        Raises:
            RunError: another one has it, or the folder may not be written.
        """
        try:
            lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise RunError(_cant_write(self.path / ".lock", error)) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{self.id} is being worked on by another process. Wait for it or stop it, then go on with "
                    f"agenttrain fit --resume {self.id}."
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def write_report(self, report: Mapping[str, Any], text: str) -> None:
        """report.md, then report.json, which says that the run has ended."""
        _write(self.path / "report.md", text.encode("utf-8", "backslashreplace"))
        _write(self.report_json, (json.dumps(report, indent=2) + "\n").encode())

    def read_report(self) -> dict[str, Any] | None:
        """report.json, or None while the run has not ended.

        Raises:
            RunError: it is no JSON.
        """
        if not self.report_json.exists():
            return None
        report: dict[str, Any] = _parsed(
            self.report_json.read_text(encoding="utf-8", errors="replace"), self.report_json
        )
        return report

    def checkpoint_folders(self) -> list[tuple[int, Path]]:
        """(step, folder) of the checkpoints, the newest last; whether one is whole, its seal says."""
        if not self.checkpoints.is_dir():
            return []
        named = [(_CHECKPOINT.fullmatch(folder.name), folder) for folder in self.checkpoints.iterdir()]
        return sorted((int(match[1]), folder) for match, folder in named if match and folder.is_dir())

    def prune_checkpoints(self, keep: int) -> None:
        """Keep the newest, at least one; links that led into the others go too."""
        for _, folder in self.checkpoint_folders()[:-keep]:
            shutil.rmtree(folder, ignore_errors=True)
        for link in self.checkpoints.iterdir() if self.checkpoints.is_dir() else ():
            if link.is_symlink() and not link.exists():
                link.unlink()


def new_run(root: Path, name: str, *, n_bytes: int = 0) -> RunFolder:
    """Make runs/<name>-<date>-<4 hex>/ with its folders.

    Args:
        n_bytes: what the run will write besides its rollouts; checked against the free space first.

    Returns:
        A folder with an absolute path: a graph may change the current directory, and other processes have another one.

    Raises:
        RunError: the folder can't be made, or the disk has too little room.
    """
    path = root.absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    check_place(root, n_bytes=n_bytes)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for folder in (path, path / "rollouts", path / "checkpoints"):
            folder.mkdir()
    except OSError as error:
        raise RunError(_cant_write(path, error)) from error
    return RunFolder(path)


def check_place(root: Path, *, n_bytes: int = 0) -> None:
    """Refuse, before anything starts, a place where no run can be written.

    Args:
        n_bytes: what the run will write besides its rollouts.

    Raises:
        RunError: the place is no folder or may not be written, or the disk has too little room.
    """
    there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RunError(_cant_write(root.absolute(), error)) from error
    check_room(there, n_bytes + SPARE_BYTES)


def check_room(folder: Path, n_bytes: int) -> None:
    """Refuse to start on a disk that is too full.

    Raises:
        RunError: with both figures.
    """
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise RunError(
            f"{folder} has {free / 2**20:.0f} MiB free, and this run needs about {n_bytes / 2**20:.0f} MiB. "
            "Make room, lower checkpoint.keep, or start in another folder."
        )


def find_run(run: str, root: Path) -> RunFolder:
    """The folder of an id under `root`, of the start of one where only one begins so, or of a path.

    Raises:
        RunError: none of them is a run; it names the newest runs there are.
    """
    for path in (root / run, Path(run)):
        if (path / "config.toml").is_file():
            return RunFolder(path.resolve())
    runs = newest_runs(root)
    begin_so = [each for each in runs if run and each.id.startswith(run)]
    if len(begin_so) == 1:
        return RunFolder(begin_so[0].path.resolve())
    if begin_so:
        some = ", ".join(each.id for each in begin_so[:MOST_TOLD])
        raise RunError(f"{len(begin_so)} runs under {root} begin with {run!r}, the newest {some}. Give more of the id.")
    raise RunError(f"No run is named {run!r} under {root} or at that path. {_seen(run, runs)}")


def newest_runs(root: Path) -> list[RunFolder]:
    """The runs under a folder, the one that was begun last first."""
    files = sorted(root.glob("*/config.toml"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [RunFolder(file.parent) for file in files]


def _seen(run: str, runs: Sequence[RunFolder]) -> str:
    """What there is in place of a run that isn't; a replay of a promotion is named where there is nothing else."""
    name, _, part = run.partition(":")
    if part and name in [each.id for each in runs]:
        return f"RUN:{part} is of an evaluation (agenttrain compare), and a run is wanted here: {name}."
    close = get_close_matches(run, [each.id for each in runs], n=1, cutoff=0.85)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    named = [each.id for each in runs if not each.id.startswith(REPLAY)] or [each.id for each in runs]
    newest = f"Newest runs there: {', '.join(named[:MOST_TOLD])}." if named else "There are no runs there."
    return guess + newest


def moved_tables(tables: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """The run's tables, with a model and tasks that stood in its graph's folder taken from where that is now."""
    moved = dict(tables)
    for key in ("model", "tasks"):
        path = Path(str(tables.get(key, "")))
        if path.is_relative_to(before) and (there := now / path.relative_to(before)).exists():
            moved[key] = str(there)
    return moved


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise RunError(_cant_write(path, error)) from error


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: {error}. Take that line out by hand, or start a new run.") from None


def _cant_write(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} can't be written: {error.strerror}. Make room; agenttrain fit --resume goes on with a run."
    return (
        f"{path} can't be written: {error.strerror or error}. "
        "agenttrain writes to runs/ of the current directory: start in a folder you may write to."
    )


def _without_none(value: Any) -> Any:
    """TOML has no null: keys without a value are left out."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
