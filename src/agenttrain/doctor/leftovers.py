"""What runs that were killed left behind: half-written files, engines without a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from agenttrain.doctor.finding import Finding
from agenttrain.doctor.versions import OURS
from agenttrain.local.process import SERVE

OLD_S = 3600.0
"""A half-written file that was touched later than that may belong to a run under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of this machine."""

    pid: int
    parent: int
    command: str


def part_findings(runs: Path, now: float) -> list[Finding]:
    """Files and folders that were being written when their run ended.

    Args:
        now: Unix seconds.
    """
    found = sorted(path for path in runs.glob("*/**/*.part") if now - _touched_at(path, now) > OLD_S)
    outermost = [path for path in found if not any(other in path.parents for other in found)]
    return [
        Finding(
            code="half_written",
            severity="warning",
            where=str(path),
            seen="a file or folder that a killed run was writing",
            accepted="none that is older than an hour",
            fix=f"rm -r {quote(str(path))}",
        )
        for path in outermost
    ]


def _touched_at(path: Path, now: float) -> float:
    """Unix seconds; now for what a run under way has just finished or renamed."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return now


def engine_findings(processes: Iterable[Process]) -> list[Finding]:
    """Engines of ours whose run is gone; they end by themselves unless something holds them.

    A parent with the id 1 adopted them, unless it is a run itself: the first process of a container.
    """
    seen = list(processes)
    if any(process.pid == 1 and OURS in process.command for process in seen):
        return []
    return [
        Finding(
            code="orphaned_engine",
            severity="warning",
            where=f"process {process.pid}",
            seen="an engine of agenttrain whose run is gone",
            accepted="none",
            fix=f"kill {process.pid}",
        )
        for process in seen
        if SERVE in process.command and process.parent == 1
    ]


def processes() -> Iterator[Process]:
    """Those that /proc shows; none elsewhere than on Linux."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        yield Process(pid=int(folder.name), parent=int(stat.rpartition(")")[2].split()[1]), command=command)
