"""Calls of the kernel that this Python has not, by libc and by number. Each raises OSError where it fails."""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 23, 24, 36

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """A call's result; below 0 it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Go into namespaces of its own."""
    checked(libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount something."""
    words = [os.fsencode(word) if word else None for word in (source, target, kind)]
    data = options.encode() if options else None
    checked(libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Take a mount and all below it away, as soon as nobody uses it."""
    checked(libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root, and put the old one somewhere."""
    number = _PIVOT_ROOT[os.uname().machine]
    checked(libc.syscall(number, os.fsencode(new), os.fsencode(old)), f"pivot_root {new}")


def set_attributes(target: str, attributes: int, *, below: bool) -> None:
    """Add attributes to a mount, and to those below it. Linux 5.12 and later."""
    wanted = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0))
    flags = _AT_RECURSIVE if below else 0
    result = libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, wanted, ctypes.c_size_t(len(wanted.raw) - 1)
    )
    checked(result, f"mount_setattr {target}")


def prctl(option: int, value: int) -> int:
    """One of the settings of this process."""
    return checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def keep_capabilities(*kept: int) -> None:
    """Drop all others, for this process and for whatever it executes."""
    number = 0
    while libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
        number += 1
    mask = sum(1 << number for number in kept)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", mask, mask, 0, 0, 0, 0))
    checked(libc.capset(header, data), "capset")


def has_capability(number: int) -> bool:
    """Whether this process may use it."""
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)
