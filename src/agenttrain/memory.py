"""What the kernel says about memory becomes what a run should know: that it grows, or that it is nearly used up.

A process that is killed for its memory loses what it was doing; one that ends before that saves first. Elsewhere than
on Linux nothing is known, and nothing is said.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20
RESERVE_BYTES = 256 * MIB
"""What must be left so that a checkpoint can be written."""
LOOK_EVERY_S = 0.5
SETTLING_STEPS = 3
"""First steps of a process, in which buffers and caches find their size."""
GROWING_STEPS = 4
"""Steps in a row with growth in each that are no coincidence."""
SLOWING = 0.5
"""What grows this much less in the later half of them than in the earlier one is still settling."""
GROWTH_BYTES = 64 * MIB
"""Growth over them that is worth a word."""
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that rose in each of the last steps."""

    mib: float
    """Over `GROWING_STEPS` steps."""
    mib_per_rollout: float
    steps_left: float
    """Until all that is available is used, at this rate."""


@dataclass(slots=True)
class MemoryWatch:
    """Looks at the memory of this process, and at what is left to it."""

    limit_bytes: int | None = None
    """Resident memory that this process may hold. None: as much as there is."""
    _looked_at: float = 0.0
    _trouble: str | None = None
    _n_steps: int = 0
    _steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=GROWING_STEPS + 1))
    """(resident bytes, rollouts made for it) at the end of the last steps."""

    def trouble(self) -> str | None:
        """Why the run must end now, in words; looks at most every half second. None: it need not."""
        if self._trouble is None and time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._trouble = self._look()
        return self._trouble

    def after_step(self, n_rollouts: int) -> Growth | None:
        """Note a step; the growth, once memory has risen in enough of them and does not slow down."""
        resident, self._n_steps = resident_bytes(), self._n_steps + 1
        if resident is None or self._n_steps < SETTLING_STEPS:
            return None
        self._steps.append((resident, n_rollouts))
        sizes = [size for size, _ in self._steps]
        grown = sizes[-1] - sizes[0]
        if len(sizes) <= GROWING_STEPS or grown < GROWTH_BYTES or not _goes_on_rising(sizes):
            return None
        made = sum(n for _, n in list(self._steps)[1:])
        left = self._left(resident)
        return Growth(
            mib=grown / MIB,
            mib_per_rollout=grown / MIB / max(1, made),
            steps_left=left / (grown / GROWING_STEPS) if left is not None else float("inf"),
        )

    def _look(self) -> str | None:
        resident = resident_bytes()
        left = self._left(resident or 0)
        if resident is None or left is None or left > 0:
            return None
        why = f"memory is nearly used up: this process holds {resident / MIB:,.0f} MiB"
        if self.limit_bytes is not None and resident >= self.limit_bytes:
            return f"{why}, and run.memory_mib is {self.limit_bytes / MIB:,.0f}"
        return f"{why}, and {(available_bytes() or 0) / MIB:,.0f} MiB are left"

    def _left(self, resident: int) -> int | None:
        """Bytes that it may still grow by."""
        available = available_bytes()
        left = [available - RESERVE_BYTES] if available is not None else []
        left += [self.limit_bytes - resident] if self.limit_bytes is not None else []
        return min(left, default=None)


def _goes_on_rising(sizes: Sequence[int]) -> bool:
    """Whether each is more than the one before, and the later half of the rise is no small part of it.

    Example: [1, 2, 3, 4, 5] -> True; [1, 5, 7, 8, 9] -> False, for 2 after 6 is settling.
    """
    middle = sizes[len(sizes) // 2]
    rises = all(later > earlier for earlier, later in itertools.pairwise(sizes))
    return rises and sizes[-1] - middle >= SLOWING * (middle - sizes[0])


def resident_bytes() -> int | None:
    """Of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def available_bytes() -> int | None:
    """What may still be used before the kernel kills: of the machine, or of the container this process is in."""
    found = [_of_machine(), *(_of_group(*files) for files in _group_files())]
    return min((each for each in found if each is not None), default=None)


def whole_bytes() -> int:
    """What the machine has, or the container this process is in where that is less."""
    limits = [_limit(limit) for limit, *_ in _group_files()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit in limits if limit is not None)])


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group_files() -> Iterator[tuple[Path, Path, Path, str]]:
    """(limit, usage, statistics, their key for cache that can be given back) of the control groups of this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if not controllers:
            for folder in {_GROUPS / inner, _GROUPS}:
                yield folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file"
        elif "memory" in controllers.split(","):
            for folder in {_GROUPS / "memory" / inner, _GROUPS / "memory"}:
                limit, used = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
                yield limit, used, folder / "memory.stat", "total_inactive_file"


def _of_group(limit: Path, used: Path, statistics: Path, key: str) -> int | None:
    """Bytes left in a control group; page cache that the kernel gives back before it kills counts as left."""
    try:
        lines = statistics.read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
        most = _limit(limit)
        return most - int(used.read_text()) + cache if most is not None else None
    except (OSError, ValueError):  # no such group here
        return None


def _limit(file: Path) -> int | None:
    """Bytes that a control group may hold. None: as many as there are ("max"), or there is no such group."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
