"""The name of whatever a process makes outside of itself tells whose it is, so that a dead one's can be removed.

Nothing but the name is kept: it outlives a process that was killed, and needs no file that could be lost.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

_PATTERN = re.compile(r"agenttrain-(?P<pid>\d+)-(?P<started>\d+)-(?P<namespace>\d+)-(?P<serial>\d+)(-.*)?")
_SERIALS = itertools.count()
_FOREIGN = re.compile(r"[^A-Za-z0-9_]+")


def owned_name(name: str) -> str:
    """A name that no other process and no other call gives, with what is readable of another.

    A process is told by its id, by when it started (ids come again) and by its namespace (each has its own ids).
    """
    pid = os.getpid()
    readable = _FOREIGN.sub("_", name)[:40]
    return f"agenttrain-{pid}-{_started(pid)}-{_namespace()}-{next(_SERIALS)}-{readable}"


def is_left_behind(name: str) -> bool:
    """Whether a name is one of `owned_name` whose process has ended. What can't be known is not."""
    found = _PATTERN.fullmatch(name)
    if found is None or int(found["namespace"]) != _namespace():
        return False
    return _started(int(found["pid"])) != int(found["started"])


def _started(pid: int) -> int:
    """Clock ticks since the machine started. 0: there is no such process, or it has ended and waits for its parent."""
    try:
        after_command = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if after_command[0] in "ZX" else int(after_command[19])


def _namespace() -> int:
    """Of process ids. 0: unknown here."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
