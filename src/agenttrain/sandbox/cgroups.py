"""A control group of its own for each sandbox: memory and number of all its processes together, enforced by the kernel.

Version 2 is used where its controllers are delegated to this process, else the hierarchies of version 1. A group is
always made below a group that this process's own limits hold for, so that no limit of a container or service is left.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux 6.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from agenttrain.errors import SandboxError
from agenttrain.sandbox.owners import is_left_behind, owned_name

_NEEDED = frozenset({"memory", "pids"})
_END_S = 5.0
"""How long a killed process may take to leave its group; one in uninterruptible sleep takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One tree of control groups as this process sees it."""

    controllers: frozenset[str]
    """Of version 1; empty: version 2."""
    mount: Path
    own: Path
    """The group that this process is in."""


@dataclass(kw_only=True)
class Group:
    """An open control group. What is put into it stays in it, with everything that it starts."""

    memory: Path
    """Its folder in the hierarchy that holds the controller."""
    pids: Path
    """The same as `memory` in version 2."""
    made: list[Path] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Put a process in; what it has started before stays outside.

        Raises:
            SandboxError: there is no such process, or it may not be moved.
        """
        for folder in dict.fromkeys((self.memory, self.pids)):
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError as error:
                raise SandboxError(f"Process {pid} can't be put into the control group {folder}: {error}.") from error

    def n_out_of_memory(self) -> int:
        """How many processes of the group the kernel has ended for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                counts = dict(line.split() for line in (self.memory / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0))
        return 0

    def peak_mib(self) -> float | None:
        """The most memory that was used at once. None: this kernel does not tell."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with suppress(OSError):
                return int((self.memory / name).read_text()) / 2**20
        return None

    def close(self) -> None:
        """End every process that is still in it and remove it. May be called twice."""
        end_all(self.pids)
        for folder in self.made:
            _remove(folder)


def open_group(name: str, *, memory_mib: int, processes: int) -> Group | None:
    """A group with these limits, swap counted where the kernel counts it. None: this machine lets us make none.

    The first call of a process removes what processes that have ended left.

    Args:
        name: readable part of the folder's name.
        memory_mib: of all processes together, files in memory among it.
        processes: processes and threads at once.
    """
    _remove_left_behind_once()
    folder_name = owned_name(name)
    for parents in _places(hierarchies()):
        group = Group(memory=parents[0] / folder_name, pids=parents[1] / folder_name)
        try:
            _make(group, memory_mib * 2**20, processes)
        except OSError:
            group.close()
            continue
        return group
    return None


def hierarchies() -> list[Hierarchy]:
    """The mounted trees that this process is in."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    own_by_controllers = {frozenset(each[1].split(",")) - {""}: each[2] for each in own}
    found = []
    for line in mounts:
        before, _, after = (part.split() for part in line.partition(" - "))
        kind, options = after[0], frozenset(after[2].split(","))
        for controllers, path in own_by_controllers.items():
            if kind == ("cgroup" if controllers else "cgroup2") and controllers <= options:
                mount = Path(before[4])
                found.append(Hierarchy(controllers=controllers, mount=mount, own=_below(mount, before[3], path)))
    return found


def left_behind() -> list[Path]:
    """Groups whose process has ended, anywhere on the machine."""
    found = []
    for hierarchy in hierarchies():
        if not hierarchy.controllers or hierarchy.controllers & _NEEDED:
            for folder, names, _ in os.walk(hierarchy.mount):
                found += [Path(folder, name) for name in names if is_left_behind(name)]
    return sorted(found)


def remove_left_behind() -> None:
    """End what is still in groups whose process has ended, and remove them; what isn't ours to remove stays."""
    for folder in left_behind():
        with suppress(OSError, SandboxError):
            end_all(folder)
            _remove(folder)


@cache
def _remove_left_behind_once() -> None:
    remove_left_behind()


def end_all(folder: Path) -> None:
    """End every process of one group, and let none start meanwhile. Waits until they are gone, a while at most."""
    with suppress(OSError):
        (folder / "pids.max").write_text("0")
    with suppress(OSError):  # version 2, Linux 5.14
        (folder / "cgroup.kill").write_text("1")
    until = time.monotonic() + _END_S
    while (pids := _processes(folder)) and time.monotonic() < until:
        for pid in pids:
            _end(pid, folder)
        time.sleep(0.002)


def _below(mount: Path, root: str, path: str) -> Path:
    """Where a group's path is seen; a container may see a part of the tree only."""
    with suppress(ValueError):
        return mount / PurePosixPath(path).relative_to(root)
    return mount


def _places(found: list[Hierarchy]) -> Iterator[tuple[Path, Path]]:
    """Folders that a group for memory and one for pids could be made in, best first."""
    for hierarchy in found:
        if not hierarchy.controllers:
            yield from ((folder, folder) for folder in (hierarchy.own, hierarchy.own.parent) if _delegates(folder))
    first = {name: hierarchy.own for hierarchy in reversed(found) for name in hierarchy.controllers & _NEEDED}
    if len(first) == len(_NEEDED):
        yield first["memory"], first["pids"]


def _delegates(folder: Path) -> bool:
    """Whether groups made in a folder of version 2 have the controllers."""
    try:
        return set((folder / "cgroup.subtree_control").read_text().split()) >= _NEEDED
    except OSError:
        return False


def _make(group: Group, memory_bytes: int, processes: int) -> None:
    for folder in dict.fromkeys((group.memory, group.pids)):
        folder.mkdir()
        group.made.append(folder)
    (group.pids / "pids.max").write_text(str(processes))
    version_2 = group.memory == group.pids
    limit, swap = (
        ("memory.max", "memory.swap.max") if version_2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    )
    (group.memory / limit).write_text(str(memory_bytes))
    if (group.memory / swap).exists():  # version 2 limits swap alone, version 1 both together
        (group.memory / swap).write_text("0" if version_2 else str(memory_bytes))


def _processes(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _end(pid: int, folder: Path) -> None:
    """Kill a process if it is still the one that the group listed."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid in _processes(folder):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """A group whose last process has just ended may be busy for a moment."""
    until = time.monotonic() + _END_S
    while folder.exists():
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > until:
                raise SandboxError(
                    f"The control group {folder} can't be removed: {error}. What is still in it: "
                    f"{_processes(folder)}. End that by its id, then rmdir {folder}."
                ) from error
            time.sleep(0.002)
