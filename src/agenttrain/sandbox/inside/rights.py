"""What a process inside may do: its user, its limits, and no way to more."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

NOFILE = 1024
"""Descriptors of one process."""
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
_libc: Any = None


def prctl(option: int, value: int) -> None:
    """One of the kernel's settings of this process."""
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None, use_errno=True)
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl {option} failed")


def become_subreaper() -> None:
    """What loses its parent inside becomes a child of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide() -> None:
    """No process of the same user may look into this one, or trace it."""
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def lay_down_privileges() -> None:
    """No program started from here on gains rights by what it executes."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: bytes) -> None:
    """Have the kernel ask this program about each system call from here on; privileges are laid down before."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("n_steps", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    given = Program(n_steps=len(program) // 8, steps=program)
    if ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError("the filter of system calls can't be loaded")


def become_first_to_end() -> None:
    """Where memory runs out, this process ends before the sandbox's first one."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass


def set_limit(which: int, value: int) -> None:
    """A limit that can't be raised again; where a lower one holds already, that."""
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def become_user(uid: int, gid: int) -> None:
    """For good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def restore_signals() -> None:
    """None ignored and none blocked, as programs expect it, whatever agenttrain was started with."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
