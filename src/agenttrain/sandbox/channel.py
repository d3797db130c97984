"""Requests of many threads to a sandbox's first process and its answers, as frames over two descriptors.

Knows nothing of what is asked: a header that is JSON, and bytes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from agenttrain.errors import SandboxError

GRACE_S = 60.0
"""Past its own limit, an answer is waited for this long; then the sandbox counts as failed."""
HEAD = struct.Struct(">II")
"""Of a frame: bytes of its header, and of its body."""

Frame = tuple[dict[str, Any], bytes]


class Channel:
    """Two descriptors that frames go over. Any thread may send; one at a time may receive."""

    def __init__(self, fd_from: int, fd_to: int) -> None:
        """Take what is read from and what is written to; they may be one, and are closed by `end`."""
        self._from, self._to = fd_from, fd_to
        self._sending = threading.Lock()
        self._is_open = True
        os.set_blocking(fd_to, False)

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, until: float) -> None:
        """Send one frame.

        Raises:
            OSError: the other side is gone, or takes nothing more by then.
        """
        head = json.dumps(header).encode()
        with self._sending:
            if not self._is_open:
                raise BrokenPipeError("closed")
            for part in (HEAD.pack(len(head), len(body)) + head, body):
                view = memoryview(part)
                while view:
                    view = view[self._written(view, until) :]

    def _written(self, data: memoryview, until: float) -> int:
        if not is_ready(self._to, select.POLLOUT, until):
            raise TimeoutError("it takes nothing in")
        try:
            return os.write(self._to, data)
        except BlockingIOError:
            return 0

    def receive(self, until: float) -> Frame | None:
        """The next frame. None: nothing came by then.

        Raises:
            EOFError: the other side is gone, or stopped within a frame.
        """
        if not is_ready(self._from, select.POLLIN, until):
            return None
        n_head, n_body = HEAD.unpack(self._exactly(HEAD.size))
        content = self._exactly(n_head + n_body)
        return json.loads(content[:n_head]), content[n_head:]

    def _exactly(self, n: int) -> bytes:
        parts: list[bytes] = []
        until = time.monotonic() + GRACE_S
        while n:
            if not is_ready(self._from, select.POLLIN, until):
                raise EOFError("it stopped within an answer")
            try:
                part = os.read(self._from, min(n, 1 << 20))
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError(str(error)) from error
            if not part:
                raise EOFError
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        """Let the other side see the end of its input; what it still says can be received."""
        with self._sending:
            if self._is_open and self._to != self._from:
                os.close(self._to)
            elif self._is_open:
                shut_down(self._to)
            self._is_open = False

    def end(self) -> None:
        """Close the last descriptor; nobody may be receiving."""
        os.close(self._from)


def is_ready(fd: int, event: int, until: float) -> bool:
    """Whether something can be read, or written, by then; also where the other side is gone."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))


def shut_down(fd: int) -> None:
    """End both directions of a socket, whoever else holds it."""
    with socket.socket(fileno=os.dup(fd)) as end:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Served:
    """Requests by number over a channel; several may be under way, and whoever waits longest receives for all."""

    def __init__(self, channel: Channel) -> None:
        """Take over a channel whose other side has been begun or not."""
        self._channel = channel
        self._turn = threading.Condition()
        self._n = 0
        self._answers: dict[int, Frame] = {}
        self._is_receiving = False
        self._gone: str | None = None
        self.has_ended = False
        """Whether the other side was gone without being asked to."""

    def ask(self, header: Mapping[str, Any], body: bytes = b"", *, within_s: float) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            SandboxError: the other side is gone, or does not answer in time.
        """
        with self._turn:
            self._n += 1
            id = self._n
        until = time.monotonic() + within_s
        try:
            self._channel.send({**header, "id": id}, body, until=until)
        except TimeoutError as error:
            self._lose(str(error))
        except OSError:
            self._lose_its_end()
        return self._answer(id, until)

    def end(self, why: str) -> None:
        """Have the other side end; requests under way fail, and so do later ones."""
        self._lose(why)
        until = time.monotonic() + GRACE_S
        with self._turn:
            while self._is_receiving:
                self._turn.wait(1.0)
        try:
            while self._channel.receive(until) is not None:
                pass
        except EOFError:
            pass
        self._channel.end()

    def _lose(self, why: str) -> None:
        with self._turn:
            self._gone = self._gone or why
            self._turn.notify_all()
        self._channel.hang_up()

    def _lose_its_end(self) -> None:
        with self._turn:
            self.has_ended = self.has_ended or self._gone is None
        self._lose("its first process has ended")

    def _answer(self, id: int, until: float) -> Frame:
        while True:
            with self._turn:
                while id not in self._answers and self._is_receiving and self._gone is None:
                    self._turn.wait(1.0)
                if id in self._answers:
                    return self._answers.pop(id)
                if self._gone is not None:
                    raise SandboxError(f"The sandbox can't be used any more: {self._gone}.")
                self._is_receiving = True
            self._receive(until)
            if time.monotonic() >= until:
                self._lose("it did not answer in time")

    def _receive(self, until: float) -> None:
        """Take one frame for whoever waits for it, and let the next one receive."""
        frame: Frame | None = None
        try:
            frame = self._channel.receive(min(until, time.monotonic() + 1.0))
        except EOFError:
            self._lose_its_end()
        finally:
            with self._turn:
                self._is_receiving = False
                if frame is not None:
                    self._answers[frame[0]["id"]] = frame
                self._turn.notify_all()
