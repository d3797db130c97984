"""A filter of system calls: no user namespace, no memory that no process maps, no socket past a network namespace.

A virtual machine's sockets reach its host from any network namespace, rings do calls that no filter sees, and process 1
of a sandbox whose programs are of the same user is left alone: nobody sets its limits, priority or processors. Gives
the kernel's program as bytes; a backend has it loaded before anything of the sandbox runs.

Source: include/uapi/linux/{seccomp,filter,audit}.h and the system call tables of Linux 6.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
"""Bytes into what the filter is shown of a call; both machines have the lower half of an argument first."""
_CLONE_NEWUSER = 0x10000000
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
_OTHER_TABLE = 0x40000000
"""Numbers from here on are those of x86's third table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit: int
    clone: int
    socket: int
    missing: tuple[int, ...]
    """clone3, shmget, semget, msgget, mq_open, memfd_create, memfd_secret: answered as if this kernel had none, and
    programs know how to go on."""
    refused: tuple[int, ...]
    """unshare, setns, io_uring_setup, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, pidfd_getfd,
    syslog."""
    first_is_process: tuple[int, ...]
    """prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr."""
    second_is_process: tuple[int, ...]
    """setpriority, ioprio_set; the first argument says of what: 0 or 1, and others are refused."""


_MACHINES: Mapping[str, _Machine] = MappingProxyType(
    {
        "x86_64": _Machine(
            audit=0xC000003E,
            clone=56,
            socket=41,
            missing=(435, 29, 64, 68, 240, 319, 447),
            refused=(272, 308, 425, 248, 249, 250, 321, 298, 323, 438, 103),
            first_is_process=(302, 142, 144, 203, 314),
            second_is_process=(141, 251),
        ),
        "aarch64": _Machine(
            audit=0xC00000B7,
            clone=220,
            socket=198,
            missing=(435, 194, 190, 186, 180, 279, 447),
            refused=(97, 268, 425, 217, 218, 219, 280, 241, 282, 438, 116),
            first_is_process=(261, 118, 119, 122, 274),
            second_is_process=(140, 30),
        ),
    }
)


_REFUSES_PROCESS_1 = (
    (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
    (_JUMP_EQ, 0, 1, 1),
    (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
)
_REFUSES_PROCESS_1_SECOND = (
    (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
    (_JUMP_EQ, 0, 1, 1),
    (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
    (_JUMP_GE, 0, 1, 2),
    (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
)
_REFUSES_OTHER_FAMILIES = (
    (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
    *(step for family in _FAMILIES for step in ((_JUMP_EQ, 0, 1, family), (_RETURN, 0, 0, _ALLOW))),
    (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
)


def filter_program(*, sockets: bool) -> bytes | None:
    """The filter, as the kernel takes it. None: not known for this machine.

    Args:
        sockets: whether sockets may be made, of families that a network namespace holds; a pair that is connected to
            itself always may.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return None
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_JUMP_EQ, 1, 0, machine.audit),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GE, 0, 1, _OTHER_TABLE),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    refused = machine.refused if sockets else (*machine.refused, machine.socket)
    for numbers, error in ((machine.missing, errno.ENOSYS), (refused, errno.EPERM)):
        for number in numbers:
            steps += [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    for numbers, refusal in (
        (machine.first_is_process, _REFUSES_PROCESS_1),
        (machine.second_is_process, _REFUSES_PROCESS_1_SECOND),
        ((machine.socket,), _REFUSES_OTHER_FAMILIES),
    ):
        for number in numbers:
            steps += [(_JUMP_EQ, 0, len(refusal), number), *refusal]
    steps += [
        (_JUMP_EQ, 0, 3, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_SET, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
