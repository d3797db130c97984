"""The roles in a sandbox: SandboxBackend makes a Sandbox of a SandboxRequest; tools and verifiers use it.

Built-in backends and third parties come through the same door (`agenttrain.hookspecs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agenttrain.errors import PolicyFailure
from agenttrain.records import Isolation
from agenttrain.sandbox_spec import Files, SandboxLimits


class SandboxRefusal(PolicyFailure):
    """What was asked of a sandbox can't be done there: no such file, a path that leads out, no such program; no file
    at all once what ran in it had the kernel end it as a whole by its limit of memory.

    A tool may catch it and give its text to the agent. Uncaught it is the policy's failure, not the environment's.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How one run in a sandbox ended."""

    argv: tuple[str, ...]
    exit_code: int | None
    """Of the program; negative: the number of the signal that ended it. None: a limit of the sandbox ended it."""
    stdout: str
    """Decoded as UTF-8, what isn't replaced; at most output_kib."""
    stderr: str
    seconds: float
    ended_by: str = ""
    """The limit that ended it, a name of SandboxLimits. Empty: none did."""
    n_dropped: int = 0
    """Bytes of output past output_kib."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """What people would read of it: both outputs, what was dropped of them, and how it ended if not well."""
        end = f"ended by its limit of {self.ended_by}" if self.ended_by else f"exit code {self.exit_code}"
        dropped = f"[… {self.n_dropped:,} bytes more]" if self.n_dropped else ""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), dropped, "" if self.ok else f"[{end}]"]
        return "\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFile:
    """Something in a sandbox's working directory."""

    kind: Literal["file", "folder", "link", "other"] = "file"
    """other: a socket, a pipe or a device."""
    data: bytes = b""
    """Of a file; of a link where it leads."""
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """What a backend makes a sandbox of."""

    name: str
    """For logs and the names of folders: the rollout's id."""
    files: Mapping[str, SandboxFile] = field(default_factory=dict)
    """Path relative to the working directory to what stands there at first."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside PATH, HOME, LANG and TMPDIR."""
    visible: tuple[str, ...] = ()
    """Absolute paths of the machine that are seen read-only beside its system and this Python."""
    network: bool = False
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    image: str | None = None
    """None: the machine's own system, or the backend's default image."""


class Sandbox(Protocol):
    """A place of its own for one rollout. Thread-safe: runs of parallel tools go side by side.

    Paths are relative to the working directory, which is the only place that is kept; a link is followed inside the
    sandbox, never on the machine. Whatever `run` starts belongs to it and ends with it.
    """

    isolation: Isolation
    path: str
    """The working directory, as programs inside see it."""
    initial: Mapping[str, SandboxFile]
    """What stood there at first, from where the agent can't reach it."""

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        folder: str = ".",
    ) -> Execution:
        """Run a program and wait for it; one text goes to `sh -c`. "python" is this Python.

        What it leaves in the background goes on in the sandbox, and counts in its limits, until `settle` or `close`.

        Args:
            env: beside the sandbox's own.
            seconds: at most limits.seconds. None: that.

        Raises:
            SandboxRefusal: no such program or folder.
            SandboxError: the sandbox itself failed, or was closed.
        """

    def read(self, path: str) -> str:
        """A file's text, as UTF-8, what isn't replaced.

        Raises:
            SandboxRefusal: there is no such file, it is none, or it is larger than output_kib.
        """

    def read_bytes(self, path: str) -> bytes:
        """A file whole, up to disk_mib.

        Raises:
            SandboxRefusal: there is no such file, or it is none.
        """

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file, its folders too, with no more rights than a program inside has.

        Raises:
            SandboxRefusal: the path leads out, something there is no folder, or the disk is full.
        """

    def list(self, path: str = ".") -> list[str]:
        """All that stands in a folder and below it, sorted, relative to the working directory; folders end in "/".

        Raises:
            SandboxRefusal: there is no such folder.
        """

    def settle(self) -> None:
        """End every process in it; files stay. What may have been running can change nothing any more."""

    def snapshot(self) -> Mapping[str, SandboxFile]:
        """All that stands in the working directory, links not followed."""

    def fresh(
        self, files: Mapping[str, SandboxFile] | Files, *, limits: SandboxLimits | None = None
    ) -> AbstractContextManager[Sandbox]:
        """Another one of the same kind, without network, that shares nothing with this one and holds only these files.

        Raises:
            SandboxError: it can't be made.
        """

    def close(self) -> None:
        """End every process and remove every file; calls under way fail with SandboxError. May be called twice."""


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    name: str

    def isolation(self, request: SandboxRequest) -> Isolation:
        """What such a sandbox would be kept apart by on this machine; `unenforced` is all that it can't.

        Raises:
            SandboxError: it can't work here at all, and why.
        """

    def open(self, request: SandboxRequest) -> Sandbox:
        """Make one; returns when it can run programs.

        Raises:
            SandboxError: it can't be made.
        """


SandboxFactory = Callable[[], SandboxBackend]
"""Called once per process, when its kind is first asked for."""
