"""The name of whatever a process makes outside of itself tells whose it is, so that a dead one's can be removed.

Nothing but the name is kept: it outlives a process that was killed, and needs no file that could be lost.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from functools import cache
from pathlib import Path

_PATTERN = re.compile(r"agenttrain-(?P<pid>\d+)-(?P<started>\d+)-(?P<namespace>\d+)-(?P<serial>\d+)(-.*)?")
_SERIALS = itertools.count()
_FOREIGN = re.compile(r"[^A-Za-z0-9_]+")


def owned_name(name: str) -> str:
    """A name that no other process and no other call gives, with what is readable of another.

    A process is told by its id, by when it started (ids come again) and by where ids are counted (`_namespace`).
    """
    pid = os.getpid()
    readable = _FOREIGN.sub("_", name)[:40]
    return f"agenttrain-{pid}-{_started(pid) or 0}-{_namespace()}-{next(_SERIALS)}-{readable}"


def is_left_behind(name: str) -> bool:
    """Whether a name is one of `owned_name` whose process has ended. What can't be known is not."""
    found = _PATTERN.fullmatch(name)
    if found is None or int(found["namespace"]) == 0 or int(found["namespace"]) != _namespace():
        return False
    started = _started(int(found["pid"]))
    return started is not None and started != int(found["started"])


def _started(pid: int) -> int | None:
    """Clock ticks since the machine started. 0: there is no such process, or it has ended and waits for its parent;
    None: that can't be known, since it is hidden or no file can be opened."""
    try:
        after_command = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if _is_there(pid) else 0
    except OSError:
        return None
    return 0 if after_command[0] in "ZX" else int(after_command[19])


def _is_there(pid: int) -> bool:
    """Whether a process of this id can be sent signals, by whomever; sends none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _namespace() -> int:
    """Of process ids, of this start of this machine: engines and folders may be shared by several. 0: unknown here."""
    try:
        return _numbered(os.stat("/proc/self/ns/pid").st_ino, Path("/proc/sys/kernel/random/boot_id").read_text())
    except OSError:
        return 0


@cache
def _numbered(namespace: int, boot: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{namespace} {boot}".encode()).digest()[:6])
