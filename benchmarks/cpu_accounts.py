"""CPU seconds of a process by owner: functions are wrapped from outside, each thread's own clock is read around them.

A wrapped function is charged what its thread used in it, less what wrapped functions inside it used, so that no second
is counted twice; waiting (for the engine, for the GIL) costs no CPU and is charged to nobody. A slow ticker notes the
process's whole CPU, so that what nobody owns is told too. Both stand in buckets of time on the machine's monotonic
clock, which two processes share.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUCKET_S = 0.05

Key = tuple[int, str]
"""(bucket, owner)."""


class CpuAccounts:
    """The accounts of this process, from now until `read`."""

    def __init__(self) -> None:
        self.n_calls: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        """Owner to the sum of what `size` gave for its calls."""
        self._by_thread: list[Counter[Key]] = []
        self._local = threading.local()
        self._whole: list[tuple[int, float]] = [(int(time.monotonic() / BUCKET_S), 0.0)]
        threading.Thread(target=self._tick, name="cpu-accounts", daemon=True).start()

    def own(self, owner: str, *places: str, size: Callable[..., int] | None = None) -> None:
        """Charge functions to an owner.

        Args:
            places: "module:function" or "module:Class.method"; a function is charged where that module calls it.
            size: of one call's arguments.
        """
        for place in places:
            module, _, path = place.partition(":")
            holder: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for each in outer:
                holder = getattr(holder, each)
            setattr(holder, name, self._charged(owner, getattr(holder, name), size))

    def _charged(self, owner: str, function: Callable[..., Any], size: Callable[..., int] | None) -> Callable[..., Any]:
        @functools.wraps(function)
        def charged(*args: Any, **options: Any) -> Any:
            inside, charges = self._of_thread()
            inside.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent = time.thread_time() - began
                charges[int(time.monotonic() / BUCKET_S), owner] += spent - inside.pop()
                if inside:
                    inside[-1] += spent
                self.n_calls[owner] += 1
                if size is not None:
                    self.sizes[owner] += size(*args, **options)

        return charged

    def _of_thread(self) -> tuple[list[float], Counter[Key]]:
        """What wrapped calls inside the open ones used, and the charges, of this thread."""
        if not hasattr(self._local, "inside"):
            self._local.inside, self._local.charges = [], Counter()
            self._by_thread.append(self._local.charges)
        return self._local.inside, self._local.charges

    def _tick(self) -> None:
        while True:
            time.sleep(BUCKET_S)
            self._note()

    def _note(self) -> None:
        self._whole.append((int(time.monotonic() / BUCKET_S), time.process_time()))

    def read(self) -> dict[str, Any]:
        """What has been charged, as JSON takes it."""
        self._note()
        charges: Counter[Key] = Counter()
        for each in list(self._by_thread):
            charges.update(dict(each))
        return {
            "charges": [[bucket, owner, s] for (bucket, owner), s in charges.items()],
            "whole": self._whole,
            "n_calls": dict(self.n_calls),
            "sizes": dict(self.sizes),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.read()))


def by_phase(read: dict[str, Any], phases: list[tuple[float, str]]) -> dict[str, Counter[str]]:
    """Phase to owner to CPU seconds; the owner "" has what nobody owns.

    Args:
        phases: (monotonic seconds of its beginning, name), in order; time before the first belongs to the first.
    """
    starts = [
        (int(at / BUCKET_S) + 1, name) for at, name in phases
    ]  # a call is charged when it ends: to the one before

    def phase_at(bucket: int) -> str:
        return next((name for start, name in reversed(starts) if start <= bucket), starts[0][1])

    found: dict[str, Counter[str]] = {name: Counter() for _, name in phases}
    for bucket, owner, s in read["charges"]:
        found[phase_at(bucket)][owner] += s
        found[phase_at(bucket)][""] -= s
    for (_, before), (bucket, now) in zip(read["whole"], read["whole"][1:], strict=False):
        found[phase_at(bucket)][""] += now - before
    return found
