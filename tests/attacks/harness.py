"""What a malicious policy reaches for, and what must be as it was afterwards.

A `Prey` is everything of the machine that an attack may not touch, made anew for each: files that every user may read
and write, servers, a process, secrets in the environment. An attack's program is told where all of it is, which is more
than a policy would know. `outside` runs the same program where nothing holds it, so that an attack is known to be one.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxBackend, SandboxFile, SandboxRequest
from agenttrain.sandbox_spec import SandboxLimits

ROOT = Path(__file__).parents[2]
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/etc", "/usr/local/bin", "/")
"""Folders of the machine in which an attack would leave something under the prey's token."""
OF_THE_SYSTEM = ("/etc/passwd", "/etc/hosts", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname")
"""Texts of the machine that stay what they are."""
HEAD = """\
import ctypes, errno, glob, json, os, resource, signal, socket, stat, subprocess, sys, threading, time
PREY = json.loads(os.environ["PREY"])
TOKEN = PREY["token"]
libc = ctypes.CDLL(None, use_errno=True)

def won(what):
    print("WON", what, flush=True)

def may_fail(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        print("HELD", type(error).__name__, error, flush=True)

def call(name, *args):
    result = getattr(libc, name)(*args)
    print("HELD" if result < 0 else "WON", name, result, os.strerror(ctypes.get_errno()), flush=True)
    return result

def put(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return os.write(fd, text.encode())
    finally:
        os.close(fd)

def background(function):
    '''A process of its own, which has begun when this returns.'''
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.write(write, b".")
        os.close(write)
        try:
            function()
        finally:
            os._exit(0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    return pid

try:
    exec(compile(sys.stdin.read(), "attack", "exec"), globals())
except BaseException as error:
    print("HELD", type(error).__name__, error)
print("TRIED", flush=True)
"""
"""Begins each program; it comes over stdin. WON: it got what it may not have. TRIED: it came to its end."""


def attack(kind: str, name: str, tried: str, *values: Any, outcome: str = "contained", slow: bool = False) -> Any:
    """One attack of a list, for `pytest.mark.parametrize`.

    Args:
        values: of the test's arguments.
    """
    marks = [pytest.mark.attack(kind=kind, name=name, tried=tried, outcome=outcome)]
    return pytest.param(*values, marks=[*marks, pytest.mark.slow] if slow else marks, id=name.replace(" ", "-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What runs in a sandbox."""

    body: str
    needs: str = "filesystem"
    """The boundary or limit that holds it; a backend that leaves it unenforced promises nothing here."""
    works: bool = True
    """Whether it reaches the prey where nothing holds it. False: it is not tried there, for what it would do."""


@dataclass(kw_only=True)
class Prey:
    """What an attack may not touch, or learn."""

    token: str
    folder: Path
    process: subprocess.Popen[bytes]
    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    named: socket.socket
    secrets: Mapping[str, str]
    """What to its secret text."""
    system: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What the attack's program is told."""
        return {
            "token": self.token,
            "now": time.time(),
            "folder": str(self.folder),
            "file": str(self.folder / "file.txt"),
            "hidden": str(self.folder / "repository" / "hidden" / "test_hidden.py"),
            "tasks": str(self.folder / "repository" / "tasks.jsonl"),
            "repository": str(ROOT),
            "pid": self.process.pid,
            "agenttrain": os.getpid(),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "abstract": f"agenttrain-attack-{self.token}",
            "named": str(self.folder / "socket"),
        }

    def learnt(self, text: str) -> list[str]:
        """Which secrets a text tells."""
        return [what for what, secret in self.secrets.items() if secret in text]

    def touched(self) -> list[str]:
        """What is no longer as it was, in words."""
        found = [f"{path} changed" for path, text in self.system.items() if _text(path) != text]
        found += [f"{path} came to be" for path in self.left_files()]
        if tree(self.folder) != self._tree:
            found.append("the folder changed")
        found += [f"{name} was reached" for name in ("tcp", "abstract", "named") if _was_called(getattr(self, name))]
        if _readable(self.udp):
            found.append("udp was reached")
        if self.process.poll() is not None or state(self.process.pid) not in "SRD":
            found.append("the process was ended or stopped")
        return found

    def left_files(self) -> list[str]:
        """Files with the token in their name, in folders that everybody uses."""
        own = {self.folder}
        found = [path for folder in SHARED for path in Path(folder).glob(f"*{self.token}*") if path not in own]
        return [str(path) for path in found if not path.name.startswith("agenttrain-")]

    def left_processes(self) -> list[int]:
        """Processes that an attack's program is, or has become."""
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return sorted({pid for pid in pids if self._is_attack(pid)} - {self.process.pid, os.getpid()})

    def _is_attack(self, pid: int) -> bool:
        """Whether it runs with the token in its environment, in some thread at least."""
        folders = [f"/proc/{pid}"] if state(pid) not in "ZX" else glob.glob(f"/proc/{pid}/task/*")
        for folder in folders:
            with suppress(OSError):
                if self.token.encode() in Path(folder, "environ").read_bytes():
                    return True
        return False

    def left_of_sandboxes(self) -> list[str]:
        """Folders and control groups that bear a sandbox's name."""
        groups = [f"{folder}/{name}" for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names]
        folders = Path(tempfile.gettempdir()).glob("agenttrain-*")
        return [path for path in (*groups, *map(str, folders)) if self.token in path]

    def __post_init__(self) -> None:
        """Keep what stands now."""
        self.system = {path: _text(path) for path in OF_THE_SYSTEM}
        self._tree = tree(self.folder)


@contextmanager
def prey() -> Iterator[Prey]:
    """All of it, until the block ends."""
    token = secrets.token_hex(6)
    told = {what: secrets.token_hex(8) for what in ("file", "hidden", "tasks", "environment", "argument", "key")}
    folder = Path(tempfile.mkdtemp(prefix=f"attacked-{token}-", dir="/var/tmp"))
    (folder / "repository" / "hidden").mkdir(parents=True)
    (folder / "file.txt").write_text(told["file"])
    (folder / "repository" / "hidden" / "test_hidden.py").write_text(told["hidden"])
    (folder / "repository" / "tasks.jsonl").write_text(told["tasks"])
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    process = subprocess.Popen(
        ["/bin/sh", "-c", "while read line; do :; done", told["argument"]],
        stdin=subprocess.PIPE,
        env={"SECRET": told["environment"]},
    )
    sockets = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM), *(socket.socket(socket.AF_UNIX) for _ in "12")]
    tcp, udp, abstract, named = sockets
    try:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0agenttrain-attack-{token}")
        named.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        for each in (tcp, abstract, named):
            each.listen(8)
        yield Prey(
            token=token,
            folder=folder,
            process=process,
            tcp=tcp,
            udp=udp,
            abstract=abstract,
            named=named,
            secrets=told,
        )
    finally:
        for each in sockets:
            each.close()
        process.kill()
        process.communicate()
        shutil.rmtree(folder)


def outside(body: str) -> list[str]:
    """What an attack learns or touches where nothing holds it, of a prey made for that."""
    with prey() as victim, tempfile.TemporaryDirectory(dir=victim.folder.parent) as folder:
        env = {**os.environ, "PREY": json.dumps(victim.facts), "OPENAI_API_KEY": victim.secrets["key"]}
        opened = os.open(victim.folder / "file.txt", os.O_RDWR)
        os.set_inheritable(opened, True)
        try:
            ran = subprocess.run(
                [sys.executable, "-c", HEAD],
                input=textwrap.dedent(body).encode(),
                capture_output=True,
                env=env,
                cwd=folder,
                close_fds=False,
                timeout=60,
                check=False,
            )
        finally:
            os.close(opened)
        found = [*victim.learnt(ran.stdout.decode(errors="replace")), *victim.touched()]
        for path in victim.left_files():
            os.unlink(path)
        return found


@dataclass(kw_only=True)
class Siege:
    """One backend, and a prey outside of what it makes."""

    backend: SandboxBackend
    prey: Prey

    @contextmanager
    def sandbox(self, files: Mapping[str, SandboxFile] | None = None, **limits: Any) -> Iterator[Sandbox]:
        """A sandbox whose programs bear the token; when the block ends nothing of it may be left."""
        sandbox = self.backend.open(
            SandboxRequest(
                name=self.prey.token,
                files=files or {},
                env={"PREY": json.dumps(self.prey.facts)},
                limits=SandboxLimits(**limits),
            )
        )
        try:
            yield sandbox
        finally:
            sandbox.close()
        assert self.prey.left_processes() == []
        assert self.prey.left_of_sandboxes() == []
        assert self.prey.touched() == []

    @contextmanager
    def beside(self) -> Iterator[Sandbox]:
        """Another sandbox while one is open, which looks at what is left."""
        sandbox = self.backend.open(SandboxRequest(name="beside", env={"PREY": json.dumps(self.prey.facts)}))
        try:
            yield sandbox
        finally:
            sandbox.close()

    def holds(self, name: str) -> bool:
        """Whether the backend promises a boundary or limit on this machine."""
        return name in self.backend.isolation(SandboxRequest(name="asked")).enforced

    def skip_unless_it_holds(self, name: str) -> None:
        if not self.holds(name):
            pytest.skip(f"the backend {self.backend.name} leaves {name} unenforced here")

    def attacked(self, program: Program) -> Execution:
        """Run a program inside, and see that it came to its end with nothing to show for it."""
        self.skip_unless_it_holds(program.needs)
        with self.sandbox(memory_mib=128, disk_mib=8, processes=24) as sandbox:
            execution = run(sandbox, program.body)
        self.hold(execution)
        assert "TRIED" in execution.stdout, execution.text
        return execution

    def hold(self, execution: Execution) -> None:
        """Nothing was won or learnt."""
        assert not any(line.startswith("WON ") for line in execution.text.splitlines()), execution.text
        assert self.prey.learnt(execution.text) == [], execution.text


def run(sandbox: Sandbox, body: str, **more: Any) -> Execution:
    """Run an attack's program in a sandbox."""
    return sandbox.run(["python", "-c", HEAD], stdin=textwrap.dedent(body), **more)


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path to (mode, content) of all below a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def state(pid: int) -> str:
    """A process's, as one letter; X: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace")


def _was_called(server: socket.socket) -> bool:
    if not _readable(server):
        return False
    server.accept()[0].close()
    return True


def _readable(server: socket.socket) -> bool:
    import select

    return bool(select.select([server], [], [], 0)[0])


Ask = Callable[..., Mapping[str, Any]]
Files = Mapping[str, str | bytes | SandboxFile]
Words = Sequence[str]
