"""One process at a time writes to a folder under promotions/, and what it wrote names who it was."""

from __future__ import annotations

import fcntl
import getpass
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agenttrain.disk import flush
from agenttrain.errors import PromotionError


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder, made if it isn't there, for this process alone; the others wait, and one that is killed lets go.

    Raises:
        PromotionError: it may not be written.
    """
    try:
        _made(folder)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise PromotionError(cant("written", folder, error)) from error
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cant(done: str, path: Path, error: OSError) -> str:
    """What is said of a disk that refuses.

    Args:
        done: "read" or "written".
    """
    return (
        f"{path} can't be {done}: {error.strerror or error}. agenttrain keeps what was promoted in promotions/ of the "
        "current directory: start where you may write to it."
    )


def user_and_machine() -> str:
    """Example: "ada@atlas"."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no name for this user id: KeyError up to Python 3.12
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def _made(folder: Path) -> None:
    """Make a folder, its name on disk."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder.parent, folder.parent.parent):
        flush(parent)
