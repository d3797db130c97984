"""One server that we started: its process group, its log, its end.

A server is several processes, and those that do the work outlive a signal to the first. They form one process group
under a shell, beside a guard that blocks on a pipe from this process: when this process ends, however it ends, the pipe
closes and the guard kills the group. The guard lives until then, so the group's number can't become another's.
Invariant: after `kill` nothing of the group is left, nor what it left in shared memory.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from agenttrain.errors import EngineError

from agenttrain_sglang.launch import HOST, Launch

LEAD = """\
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
(while read -r line; do :; done <&3; kill -KILL 0) >/dev/null 2>&1 &
exec 3<&-
wait "$server"
"""
"""The shell that leads the group: it ends as the server's first process does. Its guard stays."""
PORTS = range(20000, 32000)
GONE_IN_S = 10.0
"""How long the kernel may take to end a killed group."""
TOLD_BYTES, TOLD_LINES = 65536, 6
SHARED_MEMORY = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_|sem\.mp-)[\w.-]+")
"""What SGLang names so is its own."""
EXCEPTION = re.compile(
    r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?::|$)|.*\[Errno \d+\]|.*crashed with exit code"
)
ENTRY = re.compile(r"\[\d{4}-\d\d-\d\d ")
HARMLESS = "freeze_gc failed"
"""SGLang 0.5.23 tells so, with tracebacks, where its own first request was not answered."""
NOTICES = ("kill_process_tree called", "SIGQUIT received", "HTTP/1.1", "py-spy", "crash diagnostics", "warnings.warn(")
"""Lines of every end, which say nothing of its cause."""

_PIPES: weakref.WeakSet[_Pipe] = weakref.WeakSet()


class _Pipe:
    """The end of a guard's pipe that this process holds; a fork of it lets go at once."""

    def __init__(self) -> None:
        self.theirs, self.ours = os.pipe()
        self._open = True
        _PIPES.add(self)

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.ours)


def _let_go() -> None:
    for pipe in list(_PIPES):
        pipe.close()


os.register_at_fork(after_in_child=_let_go)


def free_port() -> int:
    """A port that nobody listens on now, of those that the system gives to no outgoing connection.

    Somebody may still be quicker than the server, which binds it only when its model is loaded; the server ends then.

    Raises:
        EngineError: none is found.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As servers do: a closed one doesn't count.
            probe.bind((HOST, port))
            return port
    raise EngineError(f"No free port from {PORTS.start} to {PORTS.stop - 1} for a SGLang server. End some servers.")


class ServerProcess:
    """A server that is starting or running, until `kill`."""

    def __init__(self, launch: Launch, *, log: Path) -> None:
        """Start it and return at once.

        Args:
            launch: its command line and variables.
            log: takes all that it prints; its folder must be there.

        Raises:
            EngineError: it can't be started at all.
        """
        self.launch, self.log = launch, log
        self._lock = threading.Lock()
        self._cpu_s = 0.0
        self._killed = False
        self._pipe = _Pipe()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", LEAD, "agenttrain-sglang", *launch.command],
                    stdin=self._pipe.theirs,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(launch.variables),
                    start_new_session=True,
                )
        except OSError as error:
            self._pipe.close()
            raise EngineError(f"A SGLang server can't be started: {error}. Its log would be {log}.") from error
        finally:
            os.close(self._pipe.theirs)

    @property
    def address(self) -> str:
        return self.launch.address

    @property
    def pid(self) -> int:
        """Of the group's leader, and the number of the group."""
        return self._process.pid

    @property
    def n_gpus(self) -> int:
        """That it holds while it runs."""
        return self.launch.n_gpus

    def has_ended(self) -> str | None:
        """Why the server's first process runs no more, with what its log says last; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if self._killed:
            return "it was ended by agenttrain"
        told = last_exceptions(self.log) if _was_killed(code) else last_words(self.log)
        return f"{_how_ended(code)}{f': {told}' if told else ''} (log: {self.log})"

    def listens(self) -> bool:
        """Whether its port is its own: what answers there may be somebody else, as long as this says no."""
        return any(self.launch.port in _ports(process) for process in self._members())

    def cpu_s(self) -> float:
        """CPU seconds of all its processes since the start; never less than what was told before."""
        with self._lock:
            if not self._killed:
                self._cpu_s = max(self._cpu_s, sum(map(_cpu_s, self._members())))
            return self._cpu_s

    def kill(self) -> None:
        """End all its processes and wait until they are gone. Safe to call twice, and from any thread.

        Raises:
            EngineError: the kernel keeps one of them.
        """
        self.cpu_s()
        with self._lock:
            if self._killed:
                return
            members = self._members()
            shared = set[Path]().union(*map(_shared_memory, members))
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._pipe.close()
            self._process.wait()
            _wait_until_gone(members, self.log)
            for path in shared:
                path.unlink(missing_ok=True)

    def _members(self) -> list[psutil.Process]:
        """Its processes, and those of their descendants that have left the group."""
        found = {process for process in psutil.process_iter() if _group(process) == self.pid}
        for process in list(found):
            with suppress(psutil.Error):
                found.update(process.children(recursive=True))
        return list(found)


def last_words(log: Path) -> str:
    """What the end of a log says about an end: its last exceptions, else its last lines; one line, "" of an empty log.

    Example: a traceback that ends in "ValueError: no such model" and a line of uvicorn's -> "ValueError: no such model"
    """
    return last_exceptions(log) or " | ".join(line[:400] for line in _last_lines(log)[-TOLD_LINES:])


def last_exceptions(log: Path) -> str:
    """What the end of a log says of what was raised; "" where it says nothing: whoever is killed has no last words."""
    raised = dict.fromkeys(line for line in _last_lines(log) if EXCEPTION.match(line))
    return " | ".join(line[:400] for line in list(raised)[-2:])


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TOLD_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return _without_harmless(line.strip() for line in text.splitlines() if line.strip())


def _without_harmless(lines: Iterable[str]) -> list[str]:
    """Leave out notices, and harmless entries of the log with their tracebacks up to the next entry."""
    kept, is_harmless = [], False
    for line in lines:
        if ENTRY.match(line):
            is_harmless = HARMLESS in line
        if not is_harmless and not any(notice in line for notice in NOTICES):
            kept.append(line)
    return kept


def _was_killed(code: int) -> bool:
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def _how_ended(code: int) -> str:
    """An exit code in words; a shell tells a child's end by signal N as 128 + N.

    SGLang ends itself by SIGKILL when one of its processes has failed, and the system does so when memory runs out.
    """
    number = -code if code < 0 else code - 128
    if number not in {int(known) for known in signal.Signals}:
        return f"it ended with exit code {code}"
    name = signal.Signals(number).name
    by = " (by SGLang itself, by the system for want of memory, or by hand)" if number == signal.SIGKILL else ""
    return f"it was ended by {name}{by}"


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _cpu_s(process: psutil.Process) -> float:
    """Of a process and of its children that have ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _ports(process: psutil.Process) -> set[int]:
    """On which it listens."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _shared_memory(process: psutil.Process) -> set[Path]:
    """What SGLang has laid in shared memory for this process."""
    try:
        return set(map(Path, SHARED_MEMORY.findall(Path(f"/proc/{process.pid}/maps").read_text())))
    except OSError:
        return set()


def _wait_until_gone(members: list[psutil.Process], log: Path) -> None:
    for process in members:  # Those that have left the group were not in reach of its signal.
        with suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + GONE_IN_S
    while left := [process for process in members if _runs(process)]:
        if time.monotonic() > end:
            pids = ", ".join(str(process.pid) for process in left)
            raise EngineError(f"Processes {pids} of a SGLang server don't end (log: {log}). End them: kill -9 {pids}")
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
