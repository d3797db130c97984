"""Sandboxes of ordinary processes, where nothing better works: limits, a private folder, and as root an own user.

The rest of the machine is seen as that user sees it, so `filesystem` is never enforced here, and as an ordinary user
neither is anything that programs of the same user could undo.
"""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox import uids
from agenttrain.sandbox.launch import groups_work, launch
from agenttrain.sandbox.owners import is_left_behind, owned_name
from agenttrain.sandbox.seccomp import filter_program
from agenttrain.sandbox.served import INSIDE, Begin, ServedSandbox
from agenttrain.sandbox_protocol import Sandbox, SandboxRequest

_WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")


class SubprocessBackend:
    """Starts `inside` as a process of this machine."""

    name = "subprocess"

    def __init__(self, *, python: str | None = None) -> None:
        """Make a backend.

        Args:
            python: what "python" runs. None: this Python.
        """
        self._python = python or sys.executable
        self._trial: Trial | None = None
        self._lock = threading.Lock()

    def isolation(self, request: SandboxRequest) -> Isolation:
        """What holds here; found out by trying once."""
        trial = self._tried()
        enforced = {
            "seconds": "clock of its first process",
            "output_kib": "its first process",
            "memory_mib": "control group" if trial.groups else "RLIMIT_DATA and a watcher",
        }
        if trial.is_root:
            enforced |= {
                "processes": "RLIMIT_NPROC of a user of its own",
                "processes_end": "a user of its own",
                "privileges": "a user of its own, no_new_privs" + (", seccomp" if trial.filters else ""),
            }
        elif trial.filters:
            enforced["privileges"] = "no_new_privs, seccomp"
        names = ("filesystem", "network", "processes_end", "privileges", "processes", "disk_mib")
        if trial.is_root and trial.filters and not request.network:
            enforced["network"] = "seccomp: no sockets"
        missing = [name for name in names if name not in enforced and not (name == "network" and request.network)]
        return Isolation(backend=self.name, enforced=enforced, unenforced=tuple(missing))

    def open(self, request: SandboxRequest) -> Sandbox:
        """Make one; what dead processes have left behind is removed first."""
        isolation = self.isolation(request)
        remove_left_folders(Path(tempfile.gettempdir()))
        with ExitStack() as made:
            own = uids.lease() if self._tried().is_root else None
            if own is not None:
                made.callback(own.close)
            uid = own.uid if own is not None else None
            folder = _folder(request.name, uid)
            made.callback(_remove_all_of, folder, uid)
            (folder / "bin").mkdir()
            (folder / "bin" / "python").symlink_to(self._python)
            if uid is not None:
                made.callback(uids.end_user, uid)
            lock = (own.lock.fileno(),) if own is not None else ()
            launched = launch((sys.executable, "-I", "-S", str(INSIDE)), request, made, env={}, pass_fds=lock)
            begin = self._begin(request, folder, uid, watch_memory=launched.group is None)
            served = launched.begun(request, begin)
            release = made.pop_all()
        return ServedSandbox(
            request=request,
            isolation=isolation,
            path=str(folder / "work"),
            served=served,
            reopen=self.open,
            release=release.close,
            n_out_of_memory=launched.n_out_of_memory,
        )

    def _begin(self, request: SandboxRequest, folder: Path, uid: int | None, *, watch_memory: bool) -> Begin:
        filters = filter_program(sockets=request.network or uid is None)
        return Begin(
            path=str(folder / "work"),
            env={
                "PATH": f"{os.path.dirname(self._python)}:{folder}/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(folder / "home"),
                "TMPDIR": str(folder / "tmp"),
                "LANG": "C.UTF-8",
            },
            python=self._python,
            ends="tree" if uid is None else "uid",
            uid=uid,
            gid=uid,
            watch_memory=watch_memory,
            watch_disk=str(folder),
            filter=filters.hex() if filters else None,
        )

    def _tried(self) -> Trial:
        with self._lock:
            if self._trial is None:
                self._trial = Trial.made(self._python)
            return self._trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What this machine lets us do."""

    is_root: bool
    """Programs run as users of their own."""
    groups: bool
    """Control groups can be made."""
    filters: bool
    """System calls can be filtered."""

    @classmethod
    def made(cls, python: str) -> Trial:
        """Try it.

        Raises:
            SandboxError: programs can't be run as they would have to be.
        """
        is_root = os.geteuid() == 0
        if is_root:
            _try_as_another_user(python)
        return cls(is_root=is_root, groups=groups_work(), filters=filter_program(sockets=True) is not None)


def _try_as_another_user(python: str) -> None:
    uid = uids.RANGE[-1]
    try:
        subprocess.run(
            [python, "-I", "-S", "-c", ""],
            user=uid,
            group=uid,
            extra_groups=[],
            check=True,
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxError(
            f"Where agenttrain is root, programs in a sandbox of the backend 'subprocess' run as user {uid}, and "
            f"{python} can't: {error}. Use a Python that every user may run (outside of /root), or the backend "
            "'namespaces'."
        ) from error


def remove_left_folders(parent: Path) -> None:
    """Remove folders of sandboxes whose process has ended; what isn't this user's to remove stays."""
    for folder in left_folders(parent):
        with suppress(OSError, SandboxError):
            uid = folder.lstat().st_uid
            if uid in uids.RANGE:
                with uids.held(uid) as is_held:
                    _remove_all_of(folder, uid if is_held else None)
            elif uid == os.geteuid():
                _remove_all_of(folder, None)


def left_folders(parent: Path) -> list[Path]:
    """Folders of sandboxes whose process has ended."""
    return sorted(folder for folder in parent.glob("agenttrain-*") if is_left_behind(folder.name))


def _folder(name: str, uid: int | None) -> Path:
    """A new folder that only the sandbox's user may enter."""
    folder = Path(tempfile.gettempdir(), owned_name(name))
    for path in (folder, *(folder / inner for inner in ("work", "home", "tmp"))):
        path.mkdir(mode=0o700)
        if uid is not None:
            os.chown(path, uid, uid)
    return folder


def _remove_all_of(folder: Path, uid: int | None) -> None:
    """A sandbox's folder, and as root what its user left in folders that everybody may write to."""
    if uid is not None:
        uids.end_user(uid)
        for shared in _WORLD_WRITABLE:
            for path in _owned(Path(shared), uid):
                _remove(path)
    _remove(folder)


def _owned(folder: Path, uid: int) -> list[Path]:
    found = []
    for name in os.listdir(folder) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # others come and go there
            if (folder / name).lstat().st_uid == uid:
                found.append(folder / name)
    return found


def _remove(path: Path) -> None:
    """A file, or a folder with all below it, however deep; its owner may have closed folders in it.

    No link is followed, whoever changes the folder meanwhile: everything is named by an open folder. What stands in a
    folder's folder is moved up before, so that neither a path nor the number of open folders grows.

    Raises:
        OSError: something else keeps filling it.
    """
    with _opened(str(path.parent)) as parent, suppress(FileNotFoundError):
        with _opened_or_unlinked(path.name, parent) as top:
            if top is None:
                return
            own_name, serials = secrets.token_hex(8), itertools.count()
            while names := os.listdir(top):
                for name in names:
                    _lift(name, top, (f"{own_name}-{next(serials)}" for _ in itertools.count()))
        os.rmdir(path.name, dir_fd=parent)


def _lift(name: str, top: int, new_names: Iterator[str]) -> None:
    """Remove what stands in a folder; folders in it are moved up into that one under new names."""
    with _opened_or_unlinked(name, top) as folder:
        if folder is None:
            return
        for below in os.listdir(folder):
            with _opened_or_unlinked(below, folder) as inner:
                if inner is not None:
                    os.rename(below, next(new_names), src_dir_fd=folder, dst_dir_fd=top)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=top)


@contextmanager
def _opened_or_unlinked(name: str, folder: int) -> Iterator[int | None]:
    """A folder in another, opened for good. None: it was something else, and is gone."""
    try:
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        os.unlink(name, dir_fd=folder)
        yield None
        return
    try:
        os.chmod(f"/proc/self/fd/{held}", 0o700)  # of what is held, whatever has the name by now
        with _opened(".", held) as opened:
            yield opened
    finally:
        os.close(held)


@contextmanager
def _opened(path: str, folder: int | None = None) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
