"""The file system of a sandbox: the system and this Python read-only, one limited tmpfs for all that is written.

Only what the request names is there; a link in it leads within it. Nothing of the machine can be reached once the old
root is gone.
"""

from __future__ import annotations

import os
from typing import Any

from .kernel import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_root,
    set_attributes,
    unmount,
)

Room = dict[str, Any]

DEVICES = ("null", "zero", "full", "random", "urandom")
FIXED_IN_PROC = ("sys", "irq", "bus", "fs", "sysrq-trigger", "acpi", "scsi", "tty")
_STAGE = "/tmp"
"""Any folder that every machine has; what is in it stays reachable."""
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV


def build(room: Room, owner: tuple[int, int]) -> None:
    """Build it at /newroot of a root that holds the machine at /oldroot.

    Args:
        owner: user and group that what is written belongs to, as the caller's namespace numbers them.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=64k")
    os.mkdir(f"{_STAGE}/newroot", 0o755)
    os.mkdir(f"{_STAGE}/oldroot", 0o755)
    mount("tmpfs", f"{_STAGE}/newroot", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m,nr_inodes=4096")
    os.chdir(_STAGE)
    pivot_root(".", "oldroot")
    os.chdir("/")
    for folder in ("proc", "dev", "etc", "tmp", "dev/shm", room["path"].lstrip("/")):
        os.makedirs(f"/newroot/{folder}", exist_ok=True)
    add_disk(room, owner)  # first: what is seen may lie in it
    for source, target in room["binds"]:
        show(source, target)
    for path, text in room["files"]:
        write(path, text)
    for path, leads_to in room["links"]:
        os.makedirs(os.path.dirname(f"/newroot{path}"), exist_ok=True)
        os.symlink(leads_to, f"/newroot{path}")
    add_devices()


def show(source: str, target: str) -> None:
    """A file or folder of the machine, read-only, with what is mounted in it."""
    place, origin = f"/newroot{target}", f"/oldroot{source}"
    if os.path.isdir(origin):
        os.makedirs(place, exist_ok=True)
    else:
        write(target, "")
    mount(origin, place, flags=MS_BIND | MS_REC)
    set_attributes(place, _READ_ONLY, below=True)


def write(path: str, text: str) -> None:
    """A file of the room itself."""
    place = f"/newroot{path}"
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "w") as file:
        file.write(text)


def add_devices() -> None:
    """Those that only give or take bytes, and the usual links."""
    for name in DEVICES:
        write(f"/dev/{name}", "")
        mount(f"/oldroot/dev/{name}", f"/newroot/dev/{name}", flags=MS_BIND)
        set_attributes(f"/newroot/dev/{name}", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, below=False)
    for name, leads_to in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{leads_to}", f"/newroot/dev/{name}")


def add_disk(room: Room, owner: tuple[int, int]) -> None:
    """One file system with a limit, of which the places that can be written are parts."""
    options = f"mode=0755,size={room['disk_bytes']},nr_inodes={room['disk_inodes']}"
    os.mkdir("/disk", 0o755)
    mount("tmpfs", "/disk", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, target in (("work", room["path"]), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/disk/{name}", 0o700)
        os.chown(f"/disk/{name}", *owner)
        mount(f"/disk/{name}", f"/newroot{target}", flags=MS_BIND)


def enter() -> int:
    """Make it the root, as the first process of its namespace, and give a handle on /proc/sys/user that can write."""
    mount("proc", "/newroot/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    handle = os.open("/newroot/proc/sys/user", os.O_PATH | os.O_DIRECTORY)
    for name in FIXED_IN_PROC:
        place = f"/newroot/proc/{name}"
        if os.path.exists(place):
            mount(place, place, flags=MS_BIND | MS_REC)
            set_attributes(place, MOUNT_ATTR_RDONLY, below=True)
    os.chdir("/newroot")
    pivot_root(".", ".")
    unmount(".")  # what was the root until now, with the machine in it
    os.chdir("/")
    set_attributes("/", _READ_ONLY, below=False)
    return handle
