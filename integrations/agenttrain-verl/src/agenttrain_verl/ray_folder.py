"""The folder of an own Ray cluster: short enough for its sockets, nobody else's, and removed when its run is dead.

`<temporary folder>/agenttrain-ray-<user>/<random>` holds Ray's session and `owner.json`, which names the driver and the
cluster's processes by pid and start time. Ray's agents outlive a driver that was killed (2.60: they wait for a raylet
and then for its dead GCS), and its files stay for ever: a guard (`python -m agenttrain_verl.ray_folder FOLDER`, a
process of its own) ends and removes them when its driver dies, `sweep` what dead drivers left without one, and neither
anything else. Knows no Ray.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from agenttrain.errors import RunError

SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
BELOW_BYTES = 70
"""What Ray puts below its folder: `/session_<time>_<pid>/sockets/plasma_store` (2.60)."""
OWNER = "owner.json"
YOUNG_S = 60.0
"""A folder without an owner is one that is being made, for so long."""
ENDS_IN_S = 10.0

Stamp = tuple[int, float]
"""A process: its pid, and when it started, so that a pid that was given again is nobody's."""


def stamp(process: psutil.Process) -> Stamp | None:
    """None: it is gone."""
    try:
        return process.pid, process.create_time()
    except psutil.NoSuchProcess:
        return None


def running(stamped: Stamp) -> psutil.Process | None:
    """The process itself, unless it is gone, dead but not waited for, or another one of that pid."""
    try:
        process = psutil.Process(stamped[0])
        alive = process.create_time() == stamped[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFolder:
    """One cluster's."""

    path: Path

    @classmethod
    def make(cls) -> RayFolder:
        """A new one, after what dead drivers left is gone.

        Raises:
            RunError: there is no place for it whose path is short enough and ours alone.
        """
        root = _root()
        sweep(root)
        folder = cls(path=Path(tempfile.mkdtemp(dir=root, prefix="")))
        folder.write_owner(())
        return folder

    @property
    def logs(self) -> Path:
        """Of all of the cluster's processes on this machine; there once Ray has started."""
        return self.path / "session_latest" / "logs"

    def write_owner(self, processes: Iterable[Stamp]) -> None:
        """Note the processes of the cluster, as they are now."""
        noted = {"driver": stamp(psutil.Process()), "processes": list(processes)}
        part = self.path / f".{OWNER}"
        part.write_text(json.dumps(noted), encoding="utf-8")
        part.replace(self.path / OWNER)

    def guarded(self) -> subprocess.Popen[bytes]:
        """A process that ends what this one leaves when it dies.

        Its input is its cue: that ends with this process; a byte of it says that there is nothing to end.
        """
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # no Ctrl-C of the driver's terminal
        )

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(root: Path) -> None:
    """End the processes and remove the folders of drivers that are dead."""
    for folder in root.iterdir():
        if _owner(folder) is not None:
            end_of_dead(folder)
        elif _age_s(folder) > YOUNG_S:
            shutil.rmtree(folder, ignore_errors=True)


def end_of_dead(folder: Path) -> None:
    """End the processes of a folder whose driver is dead, and remove it."""
    owner = _owner(folder)
    if owner is not None and running(owner[0]) is None:
        end(owner[1])
        shutil.rmtree(folder, ignore_errors=True)


def end(stamps: Iterable[Stamp]) -> list[Stamp]:
    """Kill processes, and wait until they are gone; gives those that are not."""
    stamps = list(stamps)
    for stamped in stamps:
        process = running(stamped)
        if process is not None:
            with suppress(psutil.Error):
                process.kill()
    return wait_gone(stamps, ENDS_IN_S)


def wait_gone(stamps: Sequence[Stamp], timeout_s: float) -> list[Stamp]:
    """Those that still run after that time; returns as soon as there are none."""
    until = time.monotonic() + timeout_s
    while True:
        left = [stamped for stamped in stamps if running(stamped) is not None]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.05)


def _root() -> Path:
    for base in (Path(tempfile.gettempdir()), Path("/tmp")):
        root = base / f"agenttrain-ray-{os.getuid()}"
        if len(os.fsencode(root)) + len("/12345678") + BELOW_BYTES > SOCKET_BYTES:
            continue
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            raise RunError(f"{root} is not yours alone, and Ray's files go there. Remove it, or set TMPDIR.")
        return root
    raise RunError(
        f"Ray's sockets need a folder of at most {SOCKET_BYTES - BELOW_BYTES} bytes, and {tempfile.gettempdir()} is "
        "longer. Set TMPDIR to a short one, such as /tmp."
    )


def _owner(folder: Path) -> tuple[Stamp, list[Stamp]] | None:
    try:
        noted: dict[str, Any] = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        driver, processes = noted["driver"], noted["processes"]
        return (int(driver[0]), float(driver[1])), [(int(pid), float(at)) for pid, at in processes]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0


def guard(folder: Path) -> None:
    """Wait for the end of the driver, and end what it has left."""
    if sys.stdin.buffer.read():
        return
    owner = _owner(folder)
    if owner is not None:
        wait_gone([owner[0]], ENDS_IN_S)  # its files are closed before it is gone
        end_of_dead(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
