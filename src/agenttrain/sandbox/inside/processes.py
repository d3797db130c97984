"""Who is there in a sandbox, what they hold, and how they are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from .rights import become_user


def processes() -> list[int]:
    """Every process that is seen in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def family(pid: int) -> list[int]:
    """A process, its descendants, and all in sessions of these."""
    about = {}
    for each in processes():
        try:
            with open(f"/proc/{each}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            about[each] = (int(fields[1]), int(fields[3]))
    found = [pid] if pid in about else []
    members = {pid}
    while True:
        more = [
            each for each, (parent, session) in about.items() if each not in members and {parent, session} & members
        ]
        more = [each for each in more if each != os.getpid()]
        if not more:
            return found
        found += more
        members.update(more)


def end_all(members: Callable[[], list[int]]) -> None:
    """Kill what a function names, again until it names nothing that can be killed."""
    for _ in range(1000):
        if not kill_named(members):
            return
        time.sleep(0.001)


def kill_named(members: Callable[[], list[int]]) -> int:
    """How many were killed of what a function names twice: an id may have become another process's in between."""
    handles = {}
    try:
        for pid in members():
            try:
                handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        return sum(kill(handles[pid]) for pid in (members() if handles else ()) if pid in handles)
    finally:
        for handle in handles.values():
            os.close(handle)


def end_namespace() -> None:
    """Kill all other processes of the namespace that this one is the first of.

    Raises:
        RuntimeError: it is not the first, and "all others" would be the machine's.
    """
    if os.getpid() != 1:
        raise RuntimeError(f"process {os.getpid()} is not the first of its namespace, and ends no others")
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_processes_of(uid: int, gid: int) -> None:
    """Kill all processes of a user that is the sandbox's alone. Called in a process of its own, which is one of them.

    Raises:
        RuntimeError: this process did not become that user, or that user is root or the one that it was.
    """
    was = os.getuid()
    become_user(uid, gid)
    if os.getresuid() != (uid, uid, uid) or uid in (0, was):
        raise RuntimeError(f"user {os.getuid()} is not the sandbox's alone, and none of its processes is ended")
    os.kill(-1, signal.SIGKILL)


def kill(handle: int) -> bool:
    """Whether the process that a handle is of was there to kill."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    return True


def memory_of(pid: int) -> int:
    """Bytes of memory that a process holds and no file backs."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file if line.startswith((b"RssAnon", b"RssShmem")))
    except OSError:
        return 0
    return sum(int(value.split()[0]) for value in lines.values()) * 1024
