"""A process under way in a sandbox: what is read from it, what it is fed, and when it is late."""

from __future__ import annotations

import os
import time

from .frames import CHUNK, Header


class Job:
    """A process under way, and what is read from it and written to it."""

    def __init__(self, header: Header, pid: int, deadline: float, most: int) -> None:
        self.header = header
        self.pid = pid
        self.deadline = deadline
        self.most = most
        """Bytes that are kept of each output."""
        self.began = time.monotonic()
        self.outputs: dict[int, list[bytes]] = {}
        """Descriptor to what was read from it, while it is read."""
        self.kept: list[list[bytes]] = []
        """The same lists, in order, read to the end or not."""
        self.n_dropped = 0
        self.stdin_fd: int | None = None
        self.stdin = memoryview(b"")
        self.ended_by = ""

    def take(self, fd: int) -> bool | None:
        """Read what there is. False: the output has ended; None: there is nothing yet."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return False
        kept = self.outputs[fd]
        room = max(0, self.most - sum(map(len, kept)))
        if room:
            kept.append(data[:room])
        self.n_dropped += max(0, len(data) - room)
        return bool(data)
