"""A Sandbox whose work is done by `inside`, running as the sandbox's first process: one class for every backend.

A backend starts that program, gives the two ends of its frames as a Channel, and says what to release when it has
ended. Nothing here touches a file that programs inside can write.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox.channel import GRACE_S, Channel, Frame, Served
from agenttrain.sandbox.making import sandbox_files, without_network
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxFile, SandboxRefusal, SandboxRequest
from agenttrain.sandbox_spec import Files, SandboxLimits

INSIDE = Path(__file__).with_name("inside")
"""The program, a folder of modules of the standard library alone: `python -I -S FOLDER` serves over its standard
input and output. Where it is copied to, the folder keeps its name."""
OPEN_S = 60.0
"""A sandbox that can't run programs by then counts as failed."""
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


class EndedByMemory(SandboxRefusal):
    """The kernel ended a sandbox's first process, too, when what runs in it had filled its memory."""


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
