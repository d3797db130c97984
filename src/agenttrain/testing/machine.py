"""What a test looks for on the machine: processes, files, groups, descriptors and mounts that should be gone."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
"""Leaves a process that no parent, group or session leads to; its arguments are the program's."""


def processes_with(marker: str) -> list[int]:
    """Processes of the machine that have a text among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def wait_for_none(marker: str) -> list[int]:
    """What is still there after a while; a killed process takes a moment to go."""
    until = time.monotonic() + 20
    while (found := processes_with(marker)) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def left_on_the_machine(marker: str) -> list[Path]:
    """Files, folders and control groups with a text in their names, where sandboxes might leave them."""
    places = [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm", str(Path.home()), os.getcwd())]
    found = [path for place in places for path in place.glob(f"*{marker}*")]
    found += list(Path("/tmp").glob(f"agenttrain-*/*/{marker}"))
    return found + [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if marker in folder]


def held_by_us() -> tuple[int, list[str]]:
    """Descriptors of this process, and mounts that it sees."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sorted(line.split()[4] for line in mounts)
