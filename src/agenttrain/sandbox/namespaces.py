"""Sandboxes in Linux namespaces of their own, made by calls of the kernel: no program but this Python is needed.

As root, programs inside are a user of the machine's that nothing else is; without, the caller's own, with none of its
rights but what a user namespace leaves.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.cgroups import Group
from agenttrain.sandbox.channel import HEAD, Channel
from agenttrain.sandbox.launch import group_of
from agenttrain.sandbox.layout import WORK, Layout, layout
from agenttrain.sandbox.seccomp import filter_program
from agenttrain.sandbox.served import OPEN_S, Begin, ServedSandbox, begun
from agenttrain.sandbox.starting import starter
from agenttrain.sandbox_protocol import Sandbox, SandboxRequest

PROGRAM_USER = 1000
"""Of programs, as they see it."""
FIRST_USER, N_USERS = 1_900_000_000, 200_000_000
"""Users of the machine that sandboxes of root are given, two each, drawn anew: past those of people, services and
containers."""
INODES_PER_MIB = 256
CAP_SYS_ADMIN = 21
_END_S = 10.0


@dataclass(kw_only=True)
class NamespacesBackend:
    """Makes them; finds out once what this machine allows."""

    name: str = "namespaces"

    def isolation(self, request: SandboxRequest) -> Isolation:
        """What such a sandbox is kept apart by here; the first time one is made for trial."""
        held = {name: by for name, by in trial.held().items() if name != "network" or not request.network}
        return Isolation(
            backend=self.name,
            enforced={name: by for name, by in held.items() if by},
            unenforced=tuple(name for name, by in held.items() if not by),
        )

    def open(self, request: SandboxRequest) -> Sandbox:
        """Make one; returns when it can run programs."""
        isolation = self.isolation(request)
        with ExitStack() as made:
            return opened(self, request, isolation, group_of(request, made), made)


def opened(
    backend: NamespacesBackend, request: SandboxRequest, isolation: Isolation, group: Group | None, made: ExitStack
) -> ServedSandbox:
    """One that can run programs.

    Args:
        made: takes what ends it; the sandbox's own from then on.
    """
    seen = layout(request.visible, network=request.network)
    users = FIRST_USER + 2 * secrets.randbelow(N_USERS // 2) if is_root() else 0
    channel = born(request, seen, group, made, users=users)
    filters = filter_program(sockets=True)
    begin = Begin(
        path=WORK,
        env=seen.env,
        python=seen.python,
        ends="namespace",
        uid=PROGRAM_USER if users else None,
        gid=PROGRAM_USER if users else None,
        watch_memory=group is None,
        filter=filters.hex() if filters else None,
    )
    served = begun(channel, request, begin)
    return ServedSandbox(
        request=request,
        isolation=isolation,
        path=WORK,
        served=served,
        reopen=backend.open,
        release=made.pop_all().close,
        n_out_of_memory=group.n_out_of_memory if group is not None else lambda: 0,
    )


def born(request: SandboxRequest, seen: Layout, group: Group | None, made: ExitStack, *, users: int) -> Channel:
    """The channel to the first process of new namespaces, which has not begun to serve."""
    asked = birth_request(request, seen, group, users)
    channel, handle = announced(asked)
    if handle is None:  # the starter ended while it was asked; there is a new one now
        channel, handle = announced(asked)
    if handle is None:
        raise SandboxError("No sandbox in namespaces can be made on this machine: its starter ends when it is asked.")
    made.callback(see_it_end, handle)
    return channel


def announced(asked: dict[str, object]) -> tuple[Channel, int | None]:
    """The channel to a first process, and a handle of it. None: the starter has ended, and the channel too."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            starter.fork(asked, theirs)
            theirs.close()
            handle = told(ours)
        except EOFError:
            handle = None
        except BaseException:
            ours.close()
            raise
    channel = Channel(fd := ours.detach(), fd)
    if handle is None:
        channel.hang_up()
        channel.end()
    return channel, handle


def birth_request(request: SandboxRequest, seen: Layout, group: Group | None, users: int) -> dict[str, object]:
    """What the starter is asked for."""
    return {
        "groups": [] if group is None else [str(folder) for folder in dict.fromkeys((group.memory, group.pids))],
        "network": request.network,
        "users": users,
        "room": {
            "path": WORK,
            "binds": seen.binds,
            "links": seen.links,
            "files": seen.files,
            "disk_bytes": int(request.limits.disk_mib * 2**20),
            "disk_inodes": max(1024, int(request.limits.disk_mib * INODES_PER_MIB)),
        },
    }


def told(ours: socket.socket) -> int:
    """The handle that a birth is announced with.

    Raises:
        EOFError: the starter has ended.
        SandboxError: there was no birth.
    """
    ours.settimeout(OPEN_S)
    try:
        head, handles, _, _ = socket.recv_fds(ours, HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        head += exactly(ours, HEAD.size - len(head)) if head else b""
        if not head:
            raise EOFError
        header = json.loads(exactly(ours, sum(HEAD.unpack(head))))
    except TimeoutError:
        raise SandboxError(
            "No sandbox in namespaces can be made on this machine: its starter does not answer."
        ) from None
    except ConnectionError as error:
        raise EOFError from error
    ours.settimeout(None)
    if handles:
        return handles[0]
    why = header.get("failed", "it gave no reason")
    raise SandboxError(f"No sandbox in namespaces can be made on this machine: {why}.")


def exactly(ours: socket.socket, n: int) -> bytes:
    """That many bytes.

    Raises:
        EOFError: the other side is gone before that.
    """
    data = b""
    while len(data) < n:
        part = ours.recv(n - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def see_it_end(handle: int) -> None:
    """Wait until the first process is gone, and everything with it; kill it if it stays."""
    try:
        for seconds in (_END_S, _END_S):
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if poll.poll(seconds * 1000):
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def is_root() -> bool:
    """Whether this process may make file systems and give users."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


class _Trial:
    """What this machine allows, found out by making a sandbox and looking around in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, str] | None = None
        self._error = ""

    def held(self) -> dict[str, str]:
        """Each boundary and limit to what enforces it; empty: nothing does.

        Raises:
            SandboxError: none can be made here.
        """
        with self._lock:
            if self._held is None and not self._error:
                try:
                    self._held = self._tried()
                except SandboxError as error:
                    self._error = str(error)
            if self._held is None:
                raise SandboxError(self._error)
            return self._held

    def _tried(self) -> dict[str, str]:
        request = SandboxRequest(name="trial")
        isolation = Isolation(backend="namespaces", enforced={})
        with ExitStack() as made:
            group = group_of(request, made)
            sandbox = opened(NamespacesBackend(), request, isolation, group, made)
        try:
            self._look_around(sandbox)
        finally:
            sandbox.close()
        memory = "control group" if group is not None else "RLIMIT_DATA and a watcher"
        user = "a user of its own, " if is_root() else ""
        return {
            "filesystem": "mount namespace",
            "network": "network namespace, seccomp" if filter_program(sockets=True) else "",
            "processes_end": "process namespace",
            "privileges": f"{user}user namespace, no capabilities, no_new_privs",
            "seconds": "clock of its first process",
            "memory_mib": memory,
            "processes": "RLIMIT_NPROC of a user namespace",
            "disk_mib": "tmpfs",
            "output_kib": "its first process",
        }

    def _look_around(self, sandbox: ServedSandbox) -> None:
        """See that it runs this Python, and holds what it should.

        Raises:
            SandboxError: it doesn't.
        """
        ran = sandbox.run(["python", "-I", "-S", "-c", "import os; print(os.getuid(), os.listdir('/proc/sys'))"])
        if not ran.ok or not ran.stdout.startswith(f"{PROGRAM_USER} "):
            raise SandboxError(f"A sandbox in namespaces does not run this Python: {ran.text}")


trial = _Trial()
"""That of this process."""
