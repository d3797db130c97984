"""A Sandbox whose work is done by `inside`, running as the sandbox's first process: one class for every backend.

A backend starts that program, gives the two ends of its frames as a Channel, and says what to release when it has
ended. Nothing here touches a file that programs inside can write.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.making import sandbox_files, without_network
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxFile, SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import Files, SandboxLimits

INSIDE = Path(__file__).with_name("inside")
"""The program, a folder of modules of the standard library alone: `python -I -S FOLDER` serves over its standard
input and output. Where it is copied to, the folder keeps its name."""
GRACE_S = 60.0
"""Past its own limit, an answer is waited for this long; then the sandbox counts as failed."""
OPEN_S = 60.0
"""A sandbox that can't run programs by then counts as failed."""
HEAD = struct.Struct(">II")
"""Of a frame: bytes of its header, and of its body."""

Frame = tuple[dict[str, Any], bytes]
Open = Callable[[SandboxRequest], Sandbox]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What `inside` is told of itself before anything else."""

    path: str
    """The working directory, as it sees it. It exists, and programs inside may write to it."""
    env: Mapping[str, str]
    """All that programs are given: PATH, HOME, LANG and TMPDIR among it."""
    python: str | None = None
    """What "python" runs, as a path inside. None: the first one of PATH."""
    ends: str = "namespace"
    """How every process is found: "namespace", it is the first of a process namespace; "uid", programs run as a user
    that is the sandbox's alone; "tree", they descend from it."""
    uid: int | None = None
    """User and group that programs run as. None: its own."""
    gid: int | None = None
    watch_memory: bool = False
    """Whether it ends everything itself when the sum goes past memory_mib; False where a control group does."""
    watch_disk: str | None = None
    """Folder of which all that stands below it counts as disk_mib, and everything is ended past that. None: where
    programs can write is no larger."""
    filter: str | None = None
    """Of system calls, for every program inside: `seccomp.filter_program` as hexadecimal digits."""


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
    import socket

    with socket.socket(fileno=os.dup(fd)) as end:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class EndedByMemory(SandboxRefusal):
    """The kernel ended a sandbox's first process, too, when what runs in it had filled its memory."""


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
        except OSError as error:
            self._lose_its_end(f"it is gone ({error})")
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

    def _lose_its_end(self, why: str) -> None:
        with self._turn:
            self.has_ended = self.has_ended or self._gone is None
        self._lose(why)

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
            self._lose_its_end("its first process has ended")
        finally:
            with self._turn:
                self._is_receiving = False
                if frame is not None:
                    self._answers[frame[0]["id"]] = frame
                self._turn.notify_all()


@dataclass(kw_only=True)
class ServedSandbox:
    """One sandbox, open until `close`."""

    request: SandboxRequest
    isolation: Isolation
    path: str
    served: Served
    reopen: Open
    """Makes another of the same kind."""
    release: Callable[[], None]
    """Called once, after the first process has been told to end and its channel is closed: waits for it, removes."""
    n_out_of_memory: Callable[[], int] = lambda: 0
    """How many processes the kernel has ended for memory so far, where something counts them."""
    first_ended_by_memory: Callable[[], bool] | None = None
    """Asked once the first process has ended by itself. None: it did where the kernel has ended any for memory."""
    initial: Mapping[str, SandboxFile] = field(init=False)
    _closing: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        """Keep what stood in the working directory at first."""
        self.initial = self.request.files

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        folder: str = ".",
    ) -> Execution:
        """Run a program and wait for it; one text goes to `sh -c`."""
        words = ("sh", "-c", argv) if isinstance(argv, str) else tuple(argv)
        check_words(words, env or {})
        most = self.request.limits.seconds
        given = seconds if seconds is not None and seconds < most else most  # also where it is no number
        n_before = self.n_out_of_memory()
        header = {"op": "run", "argv": words, "env": dict(env or {}), "seconds": given, "folder": folder}
        began = time.monotonic()
        try:
            answer, output = self._ask(header, as_bytes(stdin), within_s=given + GRACE_S)
        except EndedByMemory:
            answer, output = ended_by_memory(time.monotonic() - began), b""
        if answer["exit_code"] in (-9, 137) and self.n_out_of_memory() > n_before:
            answer = {**answer, "exit_code": None, "ended_by": "memory_mib"}
        n_stdout = answer["n_stdout"]
        return Execution(
            argv=words,
            exit_code=answer["exit_code"],
            stdout=as_text(output[:n_stdout]),
            stderr=as_text(output[n_stdout:]),
            seconds=answer["seconds"],
            ended_by=answer["ended_by"],
            n_dropped=answer["n_dropped"],
        )

    def read(self, path: str) -> str:
        """A file's text, up to output_kib."""
        return as_text(self._ask({"op": "read", "path": as_path(path), "text": True})[1])

    def read_bytes(self, path: str) -> bytes:
        """A file whole, up to disk_mib."""
        return self._ask({"op": "read", "path": as_path(path), "text": False})[1]

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file, its folders too."""
        self._ask({"op": "write", "path": as_path(path)}, as_bytes(content))

    def list(self, path: str = ".") -> list[str]:
        """All that stands in a folder and below it, relative to the working directory."""
        names: list[str] = self._ask({"op": "list", "path": as_path(path)})[0]["names"]
        return names

    def settle(self) -> None:
        """End every process in it; files stay."""
        with suppress(EndedByMemory):  # nothing in it can be read or changed any more
            self._ask({"op": "settle"})

    def snapshot(self) -> Mapping[str, SandboxFile]:
        """All that stands in the working directory."""
        answer, body = self._ask({"op": "snapshot"})
        return files_of(answer["index"], body)

    @contextmanager
    def fresh(
        self, files: Mapping[str, SandboxFile] | Files, *, limits: SandboxLimits | None = None
    ) -> Iterator[Sandbox]:
        """Another one of the same kind, without network, that holds only these files."""
        request = replace(
            without_network(self.request), files=sandbox_files(files), limits=limits or self.request.limits
        )
        sandbox = self.reopen(request)
        try:
            yield sandbox
        finally:
            sandbox.close()

    def close(self) -> None:
        """End every process and remove every file; calls under way fail."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self.served.end("it was closed")
                self.release()

    def _ask(self, header: Mapping[str, Any], body: bytes = b"", *, within_s: float = 2 * GRACE_S) -> Frame:
        try:
            answer, output = self.served.ask(header, body, within_s=within_s)
        except SandboxError as error:
            if self.served.has_ended and (self.first_ended_by_memory or self.n_out_of_memory)():
                limit = f"memory_mib={self.request.limits.memory_mib:g}"
                raise EndedByMemory(f"The sandbox was ended by its limit {limit}, and its files are lost.") from error
            raise
        if "refused" in answer:
            raise SandboxRefusal(answer["refused"])
        if "failed" in answer:
            raise SandboxError(f"The sandbox of {self.request.name} failed by itself: {answer['failed']}")
        return answer, output


def begun(channel: Channel, request: SandboxRequest, begin: Begin) -> Served:
    """The first process, told of itself and its files; it can run programs now.

    Raises:
        SandboxError: it ends before that, or the files don't fit.
    """
    index, body = index_of(request.files)
    served = Served(channel)
    try:
        header = {**asdict(begin), "op": "begin", "limits": asdict(request.limits), "index": index}
        answer, _ = served.ask({**header, "env": {**begin.env, **request.env}}, body, within_s=OPEN_S)
    except SandboxError as error:
        served.end("it could not begin")
        raise SandboxError(f"The sandbox of {request.name} could not begin: {error}") from error
    problem = answer.get("refused") or answer.get("failed")
    if problem:
        served.end("it could not begin")
        raise SandboxError(f"The sandbox of {request.name} could not begin: its files can't be laid. {problem}")
    return served


def index_of(files: Mapping[str, SandboxFile]) -> tuple[list[list[Any]], bytes]:
    """Files as ([path, kind, bytes, executable] each, their contents on end), folders before what stands in them."""
    index = [[path, file.kind, len(file.data), file.executable] for path, file in sorted(files.items())]
    return index, b"".join(file.data for _, file in sorted(files.items()))


def files_of(index: Sequence[Sequence[Any]], body: bytes) -> dict[str, SandboxFile]:
    """The files of what `index_of` gives."""
    found, at = {}, 0
    for path, kind, size, executable in index:
        found[path] = SandboxFile(kind=kind, data=body[at : at + size], executable=executable and kind == "file")
        at += size
    return found


def ended_by_memory(seconds: float) -> dict[str, Any]:
    """The answer to a run that ended with the whole sandbox."""
    return {"exit_code": None, "ended_by": "memory_mib", "seconds": seconds, "n_dropped": 0, "n_stdout": 0}


def check_words(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse what no operating system can be given.

    Raises:
        SandboxRefusal: there is no program, or a zero byte in a word.
    """
    if not words or not words[0]:
        raise SandboxRefusal("There is no program to run. Give its name and its arguments.")
    for word in (*words, *env, *env.values()):
        if not isinstance(word, str) or "\0" in word:
            raise SandboxRefusal(f"{word!r} can't be given to a program. Give texts without zero bytes.")


def as_bytes(content: str | bytes) -> bytes:
    """UTF-8 of a text.

    Raises:
        SandboxRefusal: it holds half of a character, as JSON can.
    """
    try:
        return content.encode(errors="surrogateescape") if isinstance(content, str) else bytes(content)
    except UnicodeEncodeError as error:
        raise SandboxRefusal(f"The text can't be written as UTF-8: {error.reason} at {error.start}.") from error


def as_path(path: str) -> str:
    """A path as it came, where a file can have that name.

    Raises:
        SandboxRefusal: none can.
    """
    if not isinstance(path, str):
        raise SandboxRefusal(f"{path!r} is no path. Give a text.")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise SandboxRefusal(f"{path!r} is no path: {error.reason} at {error.start}.") from error
    return path


def as_text(data: bytes) -> str:
    """UTF-8, what isn't replaced."""
    return data.decode(errors="replace")


def this_python() -> str:
    """What "python" is in a sandbox that sees this machine's system."""
    return sys.executable
