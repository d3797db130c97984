"""The first process of a sandbox as a child of this one: started in its control group, spoken to, ended.

Knows nothing of what keeps the process apart.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import IO

from agenttrain.errors import SandboxError
from agenttrain.sandbox.cgroups import Group, open_group
from agenttrain.sandbox.channel import Channel, Served
from agenttrain.sandbox.served import Begin, begun
from agenttrain.sandbox_protocol import SandboxRequest

OVERHEAD_MIB = 48
"""Of the sandbox's first process and what starts it, beside the limit of what runs in it."""
OVERHEAD_PROCESSES = 8
"""The first process, what starts it, and those that work on files."""
_END_S = 20.0
_GATE = ("/bin/sh", "-c", 'read -r go && exec "$@"', "sh")
"""Becomes the program when a line comes, so that all that this starts is in the control group too."""

_Start = tuple[Future["subprocess.Popen[bytes]"], Callable[[], "subprocess.Popen[bytes]"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A first process that has not begun to serve."""

    channel: Channel
    errors: IO[bytes]
    """What it and what starts it write to stderr."""
    group: Group | None
    """None: this machine lets us make none."""
    process: subprocess.Popen[bytes]

    def begun(self, request: SandboxRequest, begin: Begin) -> Served:
        """The process, serving.

        Raises:
            SandboxError: it ends before that, with what it wrote, or the files don't fit.
        """
        try:
            return begun(self.channel, request, begin)
        except SandboxError as error:
            self.errors.seek(0)
            wrote = self.errors.read(4096).decode(errors="replace").strip()
            raise SandboxError(f"{error} It wrote: {wrote}" if wrote else str(error)) from error

    def exit_code(self) -> int | None:
        """Of what was launched, which is about to end. None: it does not."""
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def n_out_of_memory(self) -> int:
        """How many processes the kernel has ended for memory."""
        return self.group.n_out_of_memory() if self.group is not None else 0


def launch(
    argv: Sequence[str],
    request: SandboxRequest,
    made: ExitStack,
    *,
    env: Mapping[str, str] | None = None,
    grouped: bool = True,
    pass_fds: Sequence[int] = (),
) -> Launched:
    """Start the program that is, or becomes, the sandbox's first process.

    Args:
        made: takes what ends it: once its input has ended, it is waited for, then killed.
        env: of the program. None: this process's own.
        grouped: whether it is put into a control group with the request's limits.
        pass_fds: descriptors that it inherits.
    """
    group = group_of(request, made) if grouped else None
    errors: IO[bytes] = made.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    started: Future[subprocess.Popen[bytes]] = Future()
    start: Callable[[], subprocess.Popen[bytes]] = lambda: subprocess.Popen(  # noqa: E731
        [*_GATE, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
        cwd="/",
        env=env,
        pass_fds=pass_fds,
    )
    _starts().put((started, start))
    process = started.result()
    made.callback(_end, process)
    try:
        if group is not None:
            group.add(process.pid)
        channel = _opened(process)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    return Launched(channel=channel, errors=errors, group=group, process=process)


def group_of(request: SandboxRequest, made: ExitStack) -> Group | None:
    """A control group for all of a sandbox. None: this machine lets us make none."""
    group = open_group(
        request.name,
        memory_mib=int(request.limits.memory_mib) + OVERHEAD_MIB,
        processes=int(request.limits.processes) + OVERHEAD_PROCESSES,
    )
    if group is not None:
        made.callback(group.close)
    return group


def groups_work() -> bool:
    """Whether control groups can be made here."""
    group = open_group("trial", memory_mib=64, processes=8)
    if group is None:
        return False
    group.close()
    return True


@cache
def _starts() -> SimpleQueue[_Start]:
    """What one thread starts that lives as long as this process: the kernel ends what asks to die with its parent
    (prctl(2), PR_SET_PDEATHSIG) when the thread that started it ends, and a rollout's thread may."""
    starts: SimpleQueue[_Start] = SimpleQueue()
    threading.Thread(target=_start_all, args=(starts,), name="agenttrain-sandboxes", daemon=True).start()
    return starts


os.register_at_fork(after_in_child=_starts.cache_clear)  # a forked process has none of its parent's threads


def _start_all(starts: SimpleQueue[_Start]) -> None:
    while True:
        started, start = starts.get()
        try:
            started.set_result(start())
        except BaseException as error:  # the asker's to handle
            started.set_exception(error)
        del started, start


def _opened(process: subprocess.Popen[bytes]) -> Channel:
    """Let a process pass the gate; the channel has its standard input and output for itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    os.write(process.stdin.fileno(), b"\n")
    return Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the first process, which ends what is inside when nobody asks it any more."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
