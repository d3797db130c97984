"""The time of one life of a run becomes its entry in lives.json, written as it passes.

A life is what one process does for a run; a run that was stopped and resumed has several. What a killed life came to
is known up to its last entry, at most `EVERY_S` seconds of rollouts before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agenttrain.alarms import Alarm
from agenttrain.figures import cpu_seconds
from agenttrain.run_folder import RunFolder

EVERY_S = 5.0
OF_COST = ("cpu_s", "gpus")
"""Of an engine's figures, those that are told as cost."""


@dataclass(slots=True)
class LifeAccount:
    """What one process does for a run; any thread may write it."""

    run: RunFolder
    number: int
    """0, then one more per resume."""
    stats: Callable[[], Mapping[str, float]]
    """Of the engine: its counters, its CPU seconds, its GPUs."""
    began: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    alarms: list[Alarm] = field(default_factory=list)
    """Those of no step and no evaluation."""
    _evaluated_s: float = 0.0
    _evaluating_since: float | None = None
    _written: float = 0.0
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What passes inside is an evaluation's time."""
        self._evaluating_since = time.monotonic()
        try:
            yield
        finally:
            self._evaluated_s, self._evaluating_since = self._evaluate_s(), None

    def write_when_due(self) -> None:
        if time.monotonic() - self._written >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Let lives.json say what this life has come to."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        stats, wall_s = self.stats(), time.monotonic() - self.began
        entry: dict[str, Any] = {
            "life": self.number,
            "wall_s": wall_s,
            "evaluate_s": self._evaluate_s(),
            "cpu_s": cpu_seconds(stats),
            "gpu_s": stats.get("gpus", 0.0) * wall_s,
            "engine": {name: value for name, value in stats.items() if name not in OF_COST},
            "alarms": [alarm.as_dict() for alarm in self.alarms],
        }
        self.run.write_life(entry)
        self._written = time.monotonic()

    def _evaluate_s(self) -> float:
        since = self._evaluating_since
        return self._evaluated_s + (time.monotonic() - since if since is not None else 0.0)
