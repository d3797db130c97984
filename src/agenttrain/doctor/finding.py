"""One thing that a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong, in parts."""

    code: str
    """Stable: a script may look for it."""
    severity: Severity
    """error: a run will fail or train on wrong things. warning: it will run, worse than it could."""
    where: str
    """A distribution, a file, a device."""
    seen: str
    accepted: str
    fix: str
    """A command, where there is one; else what to do."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
