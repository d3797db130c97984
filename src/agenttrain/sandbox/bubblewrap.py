"""Sandboxes in namespaces that `bwrap` makes: the system read-only, one tmpfs to write to, no network.

As root the first process is root without other rights than to become the sandbox's own user, which programs run as; as
an ordinary user all of it is in a user namespace that allows no other.

Source: bwrap(1) of bubblewrap 0.8.0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox import uids
from agenttrain.sandbox.launch import groups_work, launch
from agenttrain.sandbox.layout import ROOM, WORK, Layout, layout
from agenttrain.sandbox.seccomp import filter_program
from agenttrain.sandbox.served import INSIDE, Begin, ServedSandbox
from agenttrain.sandbox_protocol import Sandbox, SandboxRequest

_INSIDE = "/run/agenttrain/inside"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NEEDED = ("--as-pid-1", "--cap-drop", "--die-with-parent", "--new-session", "--perms", "--unshare-all")
PROGRAM_USER = 1000
_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


class BubblewrapBackend:
    """Has bwrap start `inside`."""

    name = "bubblewrap"

    def __init__(self, *, program: str = "bwrap") -> None:
        """Make a backend.

        Args:
            program: bwrap's name or path.
        """
        self._program = program
        self._trial: _Trial | None = None
        self._lock = threading.Lock()

    def isolation(self, request: SandboxRequest) -> Isolation:
        """What holds here; found out by making one once."""
        trial = self._tried()
        enforced = {
            "filesystem": "mount namespace",
            "processes_end": "process namespace",
            "seconds": "clock of its first process",
            "memory_mib": "control group" if trial.groups else "RLIMIT_DATA and a watcher",
            "processes": "RLIMIT_NPROC of a user of its own" if trial.is_root else "RLIMIT_NPROC of a user namespace",
            "output_kib": "its first process",
        }
        if not request.network:
            enforced["network"] = "network namespace"
        if trial.has("--size"):
            enforced["disk_mib"] = "tmpfs of that size"
        privileges = trial.privileges()
        if privileges:
            enforced["privileges"] = privileges
        missing = [name for name in ("privileges", "disk_mib") if name not in enforced]
        return Isolation(backend=self.name, enforced=enforced, unenforced=tuple(missing))

    def open(self, request: SandboxRequest) -> Sandbox:
        """Make one."""
        return self._opened(request, self._tried(), self.isolation(request))

    def _opened(self, request: SandboxRequest, trial: _Trial, isolation: Isolation) -> ServedSandbox:
        seen = layout(request.visible, network=request.network)
        with ExitStack() as made:
            own = uids.lease() if trial.is_root else None
            if own is not None:
                made.callback(own.close)
                made.callback(uids.end_user, own.uid)
            user = own.uid if own is not None else PROGRAM_USER
            files = _files(seen, user, made)
            command = trial.command(request, seen, files)
            lock = (own.lock.fileno(),) if own is not None else ()
            launched = launch(command, request, made, env={}, pass_fds=(*files.values(), *lock))
            begin = _begin(trial, seen, own.uid if own is not None else None, watch_memory=launched.group is None)
            served = launched.begun(request, begin)
            release = made.pop_all()
        return ServedSandbox(
            request=request,
            isolation=isolation,
            path=WORK,
            served=served,
            reopen=self.open,
            release=release.close,
            n_out_of_memory=launched.n_out_of_memory,
        )

    def _tried(self) -> _Trial:
        with self._lock:
            if self._trial is None:
                trial = _Trial.of(self._program)
                self._try(trial)
                self._trial = trial
            return self._trial

    def _try(self, trial: _Trial) -> None:
        request = SandboxRequest(name="trial")
        try:
            sandbox = self._opened(request, trial, Isolation(backend=self.name, enforced={}))
        except SandboxError as error:
            raise SandboxError(f"{trial.version} makes no sandbox here: {error}") from error
        try:
            execution = sandbox.run(["python", "-I", "-S", "-c", ""])
        finally:
            sandbox.close()
        if not execution.ok:
            raise SandboxError(f"In a sandbox by {trial.version} this Python does not run here: {execution.text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What there is to make sandboxes of."""

    program: str
    version: str
    options: frozenset[str]
    """That this version of bwrap knows."""
    is_root: bool
    groups: bool
    """Control groups can be made."""

    @classmethod
    def of(cls, program: str) -> _Trial:
        """Look at bwrap and at this process.

        Raises:
            SandboxError: bwrap is missing, or too old.
        """
        path = shutil.which(program)
        if path is None:
            raise SandboxError(
                f"No program {program!r} is on the PATH. Install bubblewrap (apt-get install bubblewrap)."
            )
        version, usage = _output(path, "--version"), _output(path, "--help")
        options = frozenset(word for word in usage.split() if word.startswith("--"))
        missing = [option for option in _NEEDED if option not in options]
        if missing:
            raise SandboxError(
                f"{version or path} has no option {', '.join(missing)}. Install bubblewrap 0.5.0 or newer "
                "(0.8.0 is tested)."
            )
        is_root = os.geteuid() == 0
        return cls(program=path, version=version, options=options, is_root=is_root, groups=groups_work())

    def has(self, option: str) -> bool:
        """Whether this bwrap knows it."""
        return option in self.options

    def privileges(self) -> str:
        """What lays them down. Empty: programs could make user namespaces of their own."""
        filtered = filter_program(sockets=True) is not None
        if self.is_root:
            return "a user of its own, no_new_privs, seccomp" if filtered else ""
        if self.has("--disable-userns"):
            return "user namespace that allows no other, no_new_privs"
        return "user namespace, no_new_privs, seccomp" if filtered else ""

    def command(self, request: SandboxRequest, seen: Layout, files: Mapping[str, int]) -> list[str]:
        """The whole command that becomes the first process."""
        words = [self.program, "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        words += self._apart(network=request.network)
        binds = [*seen.binds, (str(INSIDE), _INSIDE)]
        words += _folders([*(where for _, where in binds), *(where for where, _ in seen.links), *files])
        for source, where in binds:
            words += ["--ro-bind", source, where]
        for where, leads_to in seen.links:
            words += ["--symlink", leads_to, where]
        for where, fd in files.items():
            words += ["--perms", "0644", "--file", str(fd), where]
        words += [*_devices(), *self._room(int(request.limits.disk_mib * 2**20))]
        if not any(PurePosixPath(path).is_relative_to("/tmp") for path in (*files, *(where for _, where in binds))):
            words += ["--symlink", f"{ROOM}/tmp", "/tmp"]
        words += ["--remount-ro", "/", "--chdir", WORK, "--", seen.python, "-I", "-S", "-B", _INSIDE]
        return words

    def _apart(self, *, network: bool) -> list[str]:
        if self.is_root:  # the user namespace that bwrap makes for root has no user but the machine's root in it
            words = [*_NAMESPACES, *(() if network else ("--unshare-net",))]
            for right in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
                words += ["--cap-add", right]
            return words
        words = ["--unshare-all", "--unshare-user", *(("--share-net",) if network else ())]
        words += ["--uid", str(PROGRAM_USER), "--gid", str(PROGRAM_USER)]
        return [*words, "--disable-userns"] if self.has("--disable-userns") else words

    def _room(self, n_bytes: int) -> list[str]:
        """The one place that can be written to; so that one size holds, what programs write elsewhere leads there."""
        size = ["--size", str(n_bytes)] if self.has("--size") else []
        words = [*size, "--perms", "0755", "--tmpfs", ROOM]
        for name in ("work", "tmp", "shm"):
            words += ["--perms", "0777", "--dir", f"{ROOM}/{name}"]
        return [*words, "--symlink", f"{ROOM}/shm", "/dev/shm"]


def _begin(trial: _Trial, seen: Layout, uid: int | None, *, watch_memory: bool) -> Begin:
    filters = filter_program(sockets=True)
    return Begin(
        path=WORK,
        env={**seen.env, "HOME": f"{ROOM}/tmp", "TMPDIR": f"{ROOM}/tmp"},
        python=seen.python,
        uid=uid,
        gid=uid,
        watch_memory=watch_memory,
        watch_disk=None if trial.has("--size") else ROOM,
        filter=filters.hex() if filters else None,
    )


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def _files(seen: Layout, user: int, made: ExitStack) -> dict[str, int]:
    """Path of each made-up file to a descriptor that its text is read from; the sandbox's user has a name in them."""
    found = {}
    for path, text in seen.files:
        found[path] = os.memfd_create("agenttrain")
        made.callback(os.close, found[path])
        os.write(found[path], text.replace(f":{PROGRAM_USER}:", f":{user}:").encode())
        os.lseek(found[path], 0, os.SEEK_SET)
    return found


def _folders(paths: Iterable[str]) -> list[str]:
    """Make what the paths stand in, so that every user may go through; bwrap would make it for its own user alone."""
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"/"}
    return [word for parent in sorted(parents) for word in ("--perms", "0755", "--dir", parent)]


def _devices() -> list[str]:
    """Those that hold nothing, and /proc."""
    words = ["--proc", "/proc", "--perms", "0755", "--dir", "/dev"]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        words += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return words
