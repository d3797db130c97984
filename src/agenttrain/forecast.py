"""What a fit will need, held against what there is: a run that can't fit is refused before anything of it is loaded.

The trainer says what it will need, and an engine what it will hold beside that, since only they know; what they say is
summed and shown here. Knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agenttrain.errors import ModelError
from agenttrain.prepare import Job
from agenttrain.protocols import Forecast, ForecastContext

TIGHT = 0.85
"""Share of what is free above which a run that fits gets a note."""
TIGHT_NOTE = "Memory is tight"
"""Begins that note."""
GIB, MIB = 2**30, 2**20


def forecast(job: Job) -> Forecast | None:
    """What a fit of this job will need. None: its trainer doesn't say.

    Raises:
        ModelError: it can't fit; with the figures, and what would make it smaller.
    """
    if job.model is None:
        return None
    config, n_evaluated = job.config, len(job.held_out) * job.config.eval.repeats
    n_rollouts = max(config.trainer.tasks_per_step * config.trainer.group_size, n_evaluated)
    context = ForecastContext(
        config=config, model=str(job.model), n_rollouts=min(config.engine.concurrency, n_rollouts)
    )
    found = job.plugins.forecast(config.trainer.name, context)
    if found is None:
        return None
    for memory, free in found.free_bytes.items():
        if found.needed_bytes(memory) > free:
            raise ModelError(_why_not(found, memory, str(job.model)))
    return replace(found, notes=(*found.notes, *_tight(found)))


def table(found: Forecast) -> list[str]:
    """One line a part, the largest first, then the sum of each memory and the disk's."""
    rows = [(f"{part.process} {part.name}", part.n_bytes) for part in _by_size(found)]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {size(n_bytes):>9}" for name, n_bytes in rows if n_bytes >= MIB]
    sums = [
        f"{size(found.needed_bytes(memory))} of {size(free)} free ({memory})"
        for memory, free in found.free_bytes.items()
    ]
    return [f"memory at most: {', '.join(sums) or 'not known'}", *lines, f"disk at most: {size(found.disk_bytes)}"]


def as_dict(found: Forecast) -> dict[str, Any]:
    """The same for programs, in bytes."""
    memories: Mapping[str, int] = found.free_bytes
    return {
        "memory": {
            memory: {"needed_bytes": found.needed_bytes(memory), "free_bytes": free}
            for memory, free in memories.items()
        },
        "parts": [
            {"process": part.process, "name": part.name, "memory": part.memory, "bytes": part.n_bytes}
            for part in _by_size(found)
        ],
        "disk_bytes": found.disk_bytes,
    }


def size(n_bytes: int) -> str:
    """Example: 1610612736 -> "1.50 GiB", 3145728 -> "3 MiB"."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def _by_size(found: Forecast) -> list[Any]:
    return sorted(found.parts, key=lambda part: -part.n_bytes)


def _why_not(found: Forecast, memory: str, model: str) -> str:
    parts = [part for part in _by_size(found) if part.memory == memory]
    figures = ", ".join(f"{part.process} {part.name} {size(part.n_bytes)}" for part in parts if part.n_bytes >= MIB)
    remedies = f" In this order: {'; '.join(found.remedies)}." if found.remedies else " Choose a smaller model."
    return (
        f"A fit of {model} needs up to {size(found.needed_bytes(memory))} of memory ({memory}), and "
        f"{size(found.free_bytes[memory])} are free: {figures}.{remedies}"
    )


def _tight(found: Forecast) -> list[str]:
    return [
        f"{TIGHT_NOTE}: up to {size(found.needed_bytes(memory))} of {size(free)} free ({memory})."
        for memory, free in found.free_bytes.items()
        if found.needed_bytes(memory) > TIGHT * free
    ]
