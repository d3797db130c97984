"""How long one Python thread keeps the GIL from the others while an engine is open.

A thread that answers many others (an engine's, an event loop's) has to get its turn quickly: at Python's own 5 ms it
waits behind every busy rollout. The interval is the process's, so the first engine that opens lowers it and the last
one that closes puts it back.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0001
"""Measured with 128 busy Python threads beside the embedded engine: 6.3 s at Python's own 5 ms, 4.7 s at 0.1 ms, no
better below."""

_lock = threading.Lock()
_before: list[float] = []
"""The interval found by each engine that is open; the first is the process's own."""


def lower_switch_interval() -> None:
    """An engine opens."""
    with _lock:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def restore_switch_interval() -> None:
    """It closes; once for each `lower_switch_interval`."""
    with _lock:
        own = _before[0]
        _before.pop()
        if not _before:
            sys.setswitchinterval(own)
