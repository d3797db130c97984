"""The starter of this process: a small program that sandboxes are forked from, started at the first need.

A new one is started where it has ended; what was forked from the old one goes on by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenttrain.errors import SandboxError

STARTER = Path(__file__).with_name("starter")


class Starter:
    """The running program. Any thread may ask it."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: Mapping[str, Any], end: socket.socket) -> None:
        """Have a sandbox forked that serves this socket.

        Raises:
            SandboxError: no starter can be started.
        """
        data = json.dumps(request).encode()
        with self._lock:
            for attempt in (1, 2):
                try:
                    socket.send_fds(self._running(), [data], [end.fileno()])
                    return
                except OSError as error:
                    self._stop()
                    if attempt == 2:
                        raise SandboxError(f"No sandbox can be forked from {STARTER}: {error}.") from error

    def stop(self) -> None:
        """End it; sandboxes go on."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a process that was forked from the one that started it: it is that one's, and so may be the lock."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # nothing to wait for here
        self._lock = threading.Lock()
        self._control, self._process = None, None

    @property
    def pid(self) -> int | None:
        """Its process id. None: none runs."""
        return None if self._process is None else self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU time of the running one and of all sandboxes from it that have been closed, in seconds; 0 without one."""
        process = self._process
        if process is None:
            return 0.0
        try:
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        except OSError:
            return 0.0
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def _running(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(STARTER)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                )
            self._control = ours
        return self._control

    def _stop(self) -> None:
        control, process = self._control, self._process
        self._control, self._process = None, None
        if control is not None and process is not None:
            control.close()
            process.wait()


starter = Starter()
"""That of this process."""
atexit.register(starter.stop)
os.register_at_fork(after_in_child=starter.forget)
