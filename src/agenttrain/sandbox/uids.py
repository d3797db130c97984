"""A user id that is one sandbox's alone, so that its processes are told from all others by the kernel itself.

Only root can start programs as another user. Leases hold between the processes of a machine, and end with their owner.
"""

from __future__ import annotations

import os
import pwd
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agenttrain.errors import SandboxError

RANGE = range(58_000, 60_000)
"""Below what systemd gives to services and homes and above what distributions give to people; known in a container
that maps 65,536 ids. An id that somebody has is left out."""
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A user and group id, until `close`."""

    uid: int
    lock: socket.socket
    """The id stays taken while any process has it open, so that a sandbox's first process, which ends all of its user,
    is given it too and never outlives the lease."""

    def close(self) -> None:
        """Give it back; nothing of it may run any more."""
        self.lock.close()


def lease() -> Lease:
    """An id that nobody has and under which nothing runs.

    Raises:
        SandboxError: there is none left.
    """
    running = running_uids()
    for uid in random.sample(RANGE, len(RANGE)):  # locks hold within one network namespace; others seldom meet so
        if uid in running or _has_name(uid):
            continue
        lock = _locked(uid)
        if lock is not None:
            return Lease(uid=uid, lock=lock)
    raise SandboxError(
        f"Every user id from {RANGE.start} to {RANGE.stop - 1} is in use, and each sandbox takes one. Close some "
        "sandboxes, or see with `agenttrain doctor` what runs that were killed left behind."
    )


@contextmanager
def held(uid: int) -> Iterator[bool]:
    """Whether nobody has an id; no sandbox takes it until the block ends then."""
    lock = None if _has_name(uid) else _locked(uid)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _locked(uid: int) -> socket.socket | None:
    """A lock that ends with its owner, however that ends: a name without a file, which one socket has at a time."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0agenttrain-uid-{uid}")
    except OSError:
        lock.close()
        return None
    return lock


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def running_uids() -> dict[int, list[int]]:
    """User id of each process that runs, to the processes' ids."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        uid = _uid_of(folder)
        if uid is not None:
            found.setdefault(uid, []).append(int(folder.name))
    return found


def _uid_of(folder: Path) -> int | None:
    """The real one. None: it has ended."""
    try:
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text(errors="replace").splitlines())
    except (OSError, ValueError):
        return None
    if lines.get("State", "Z").split()[0] in "ZX":
        return None
    return int(lines["Uid"].split()[0])


def end_user(uid: int) -> None:
    """End every process of a sandbox's own user, however often it starts others meanwhile.

    Raises:
        SandboxError: something of it can't be ended.
    """
    until = time.monotonic() + _END_S
    while pids := running_uids().get(uid, []):
        for pid in pids:
            _end(pid, uid)
        if time.monotonic() > until:
            raise SandboxError(f"Processes {pids} of the sandbox's user {uid} don't end. End them by their ids.")
        time.sleep(0.002)


def _end(pid: int, uid: int) -> None:
    """Kill a process if it still is one of this user."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _uid_of(Path(f"/proc/{pid}")) == uid:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
