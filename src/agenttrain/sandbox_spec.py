"""What a user writes over a sandbox: where its files come from, and what it may use. Starts nothing.

Paths are relative to graph.py's folder. Whatever differs from task to task may be a function of the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.records import Task

Files = Mapping[str, str | bytes]
"""Path relative to the working directory to content."""

BOUNDARIES = ("filesystem", "network", "processes_end", "privileges")
"""What a sandbox keeps in beside its limits: the system is read-only and nothing else of the machine is seen; no
network; no process outlives it; no more rights than an ordinary user has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one sandbox may use. Each is enforced, or the sandbox is refused by the limit's name."""

    seconds: float = 10.0
    """Wall clock of one run, all its processes together; what is left of it is ended then."""
    memory_mib: int = 512
    """Of all processes of the sandbox together, its files in memory among it."""
    processes: int = 64
    """Processes and threads at once."""
    disk_mib: int = 64
    """Of all files that it writes, in its working directory and elsewhere."""
    output_kib: int = 64
    """Kept of what one run writes to each of stdout and stderr; the rest is dropped, and the run goes on."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"SandboxLimits got {each.name}={value!r}. Give a number above 0.")


LIMITS = tuple(each.name for each in fields(SandboxLimits))
"""Their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """How each rollout's sandbox is made: `@trainable(sandbox=SandboxSpec(…))`."""

    template: str | Callable[[Task], str] | None = None
    """Folder that is copied into the working directory. None: it begins empty."""
    files: Files | Callable[[Task], Files] = field(default_factory=dict)
    """Laid over the template."""
    env: Mapping[str, str] | Callable[[Task], Mapping[str, str]] = field(default_factory=dict)
    """Environment variables beside PATH, HOME, LANG and TMPDIR; nothing of this process's own is passed on."""
    visible: Sequence[str] = ()
    """Folders and files of the machine, beside its system and this Python, that are seen there, read-only."""
    network: bool = False
    limits: SandboxLimits = SandboxLimits()
    backend: str | None = None
    """Name of what makes it. None: sandbox.backend of the configuration, else the best that works here."""
    image: str | None = None
    """Of a container, where a container engine makes it."""
    allow_unenforced: Sequence[str] = ()
    """Names of `BOUNDARIES` and `LIMITS` that this machine may leave unenforced."""

    def __post_init__(self) -> None:
        for name in self.allow_unenforced:
            if name not in (*BOUNDARIES, *LIMITS):
                raise ConfigError(
                    f"SandboxSpec got allow_unenforced={list(self.allow_unenforced)!r}, and there is no {name!r}. "
                    f"Accepted: {', '.join((*BOUNDARIES, *LIMITS))}."
                )
