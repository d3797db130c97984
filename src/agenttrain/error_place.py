"""An exception becomes the place in the user's code that it came from, in words.

Invariant: equal faults give equal words, wherever a process was started: files go by their names alone.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_FOREIGN_ROOTS = (
    *(str(Path(sysconfig.get_path(kind))) for kind in ("stdlib", "platstdlib")),
    str(Path(__file__).parent),
)
_PACKAGES = ("site-packages", "dist-packages")
_NODE_NOTE = re.compile(r"During task with name '(.*)' and id '")
"""How LangGraph 1.0 to 1.2 notes a node on what it raised (pregel/_retry.py), the innermost first."""


def place_of_error(error: BaseException) -> str:
    """Where the user's own code raised: its innermost frame, and the nodes around it as LangGraph notes them.

    Returns:
        Begins with a space; empty when nothing is known. Of an error that comes from libraries alone, the innermost
        frame. Of a group of errors, the place of its first.

    Example: " at my_agent.py:29 (get_order) in node worker:tools"
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)] or frames
    at = f" at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].name})" if own else ""
    nodes = _nodes(error)
    return f"{at} in node {':'.join(nodes)}" if nodes else at


def _nodes(error: BaseException) -> list[str]:
    """Names of the nodes that an error went through, outermost first."""
    noted = (_NODE_NOTE.match(note) for note in reversed(getattr(error, "__notes__", ())))
    return list(dict.fromkeys(found[1] for found in noted if found))


def _is_users(filename: str) -> bool:
    """Whether a file is no part of Python, of an installed package, of agenttrain or of code made at run time."""
    path = Path(filename)
    if filename.startswith("<") or any(part in _PACKAGES for part in path.parts):
        return False
    return not any(path.is_relative_to(root) for root in _FOREIGN_ROOTS)
