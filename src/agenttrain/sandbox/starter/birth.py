"""A child of the starter becomes two: one makes the namespaces and ends, the other is the first in them.

With the rights of root, the room is made by root and owned by the machine, and the first process then goes into a user
namespace of two users of its own: itself, and the one that programs run as. Without, all are the caller's one user.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from . import room
from .kernel import (
    CAP_KILL,
    CAP_SETGID,
    CAP_SETUID,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    keep_capabilities,
    unshare,
)

Request = dict[str, Any]
Serve = Callable[[int, int], None]

PROGRAM_USER = 1000
"""Of programs, as they see it."""
_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID
_NO_MORE = ("max_user_namespaces", "max_mnt_namespaces", "max_pid_namespaces", "max_net_namespaces")


def give_birth(request: Request, fd: int, serve: Serve) -> None:
    """Make namespaces and their first process, and hand over what it is held by; returns in the process that ends."""
    groups = [way_in(folder) for folder in request["groups"]]
    network = 0 if request["network"] else CLONE_NEWNET
    host_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    users = request["users"]
    if users:
        unshare(_NAMESPACES | network)
    else:
        own = os.getuid(), os.getgid()
        unshare(_NAMESPACES | network | CLONE_NEWUSER)
        map_one_user(*own)
    from_first, to_parent = os.pipe()
    from_parent, to_first = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_first)
        os.close(to_first)
        become_first(request, fd, serve, groups, (from_parent, to_parent))
    os.close(to_parent)
    if os.read(from_first, 1) and users:
        map_two_users(host_proc, pid, users)
    hand_over(fd, os.pidfd_open(pid))  # by its parent: the id can be no other's yet
    os.write(to_first, b".")


def way_in(group: str) -> int:
    """What a process writes 0 to, to go into a control group: in version 1 where single threads go in.

    To move a whole process the kernel waits until all processors have passed a quiet state, which takes many
    milliseconds (cgroup_procs_write_start in kernel/cgroup/cgroup.c of Linux 6); a thread that moves itself waits for
    nothing, and the first process has but one.
    """
    tasks = f"{group}/tasks"
    return os.open(tasks if os.path.exists(tasks) else f"{group}/cgroup.procs", os.O_WRONLY)


def become_first(request: Request, fd: int, serve: Serve, groups: list[int], pipes: tuple[int, int]) -> None:
    """Enter the room, lay down all rights but those over programs inside, and serve."""
    from_parent, to_parent = pipes
    owner = request["users"] + 1 if request["users"] else PROGRAM_USER
    try:
        for group in groups:
            os.write(group, b"0")
        os.setsid()
        socket.sethostname("sandbox")
        room.build(request["room"], (owner, owner))
        handle = room.enter()
        if request["users"]:
            unshare(CLONE_NEWUSER)
        os.write(to_parent, b".")
        os.read(from_parent, 1)
        if request["users"]:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        forbid_more_namespaces(handle)
        fd = os.dup2(fd, 3, inheritable=False) if fd != 3 else fd
        os.closerange(4, 1 << 16)
        keep_capabilities(*((CAP_KILL, CAP_SETGID, CAP_SETUID) if request["users"] else ()))
    except BaseException as error:
        tell(fd, {"id": 1, "failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    try:
        serve(fd, fd)
    finally:
        os._exit(0)


def map_one_user(uid: int, gid: int) -> None:
    """The caller's, as the one that programs run as."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{PROGRAM_USER} {uid} 1"),
        ("gid_map", f"{PROGRAM_USER} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def map_two_users(host_proc: int, pid: int, first: int) -> None:
    """Of another process: its own, and the one that programs run as."""
    text = f"0 {first} 1\n{PROGRAM_USER} {first + 1} 1\n".encode()
    for name in ("uid_map", "gid_map"):
        fd = os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=host_proc)
        os.write(fd, text)
        os.close(fd)


def forbid_more_namespaces(handle: int) -> None:
    """In this user namespace, of any process, for good: nobody inside may write here."""
    for name in _NO_MORE:
        fd = os.open(name, os.O_WRONLY, dir_fd=handle)
        os.write(fd, b"0")
        os.close(fd)


def tell(fd: int, header: Request) -> None:
    """One frame without a body."""
    os.write(fd, frame_of(header))


def hand_over(fd: int, handle: int) -> None:
    """The first frame, and with it the handle of the first process."""
    with socket.socket(fileno=os.dup(fd)) as end:
        socket.send_fds(end, [frame_of({"id": 0, "born": True})], [handle])


def frame_of(header: Request) -> bytes:
    """The bytes of a frame without a body."""
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), 0) + head
