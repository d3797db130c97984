"""Files and folders that are whole or not there, whatever stops the process or the machine.

What replaces a file is written beside it, flushed to the disk and renamed; then the folder that names it is flushed
too. Knows no file by name, and tells a disk that refuses from a fault of whoever wrote.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""How Rust's std::io::Error ends, which safetensors passes on as text."""
_TORCH_ERROR = re.compile("iostream error|failed with strerror")
"""torch 2.x's inline_container.cc, which knows no errno."""


def replace_file(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new; what could not be written leaves nothing.

    Raises:
        OSError: the disk refuses.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        flush(path.parent)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Add a line, its newline with it, on disk when this returns; what could not be written whole leaves nothing.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("ab") as file:
        before = file.tell()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(path, before)
            raise
    flush(path.parent)


def replace_folder(aside: Path, target: Path) -> None:
    """Let a folder that was written aside stand at the target, whole and flushed; what stood there goes first.

    Raises:
        OSError: the disk refuses.
    """
    for path in (*aside.rglob("*"), aside):
        flush(path)
    shutil.rmtree(target, ignore_errors=True)
    aside.replace(target)
    flush(target.parent)


@contextmanager
def empty_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write to; what is left of it when the block ends goes."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Return when a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_trouble(error: BaseException) -> str | None:
    """Why the disk refused, where that is what an exception comes from. None: it is a fault of another kind.

    Example: safetensors' "Error while serializing: I/O error: No space left on device (os error 28)" -> "No space left
    on device"
    """
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno is not None:
            return each.strerror or str(each)
        if found := _RUST_ERROR.search(str(each)):
            return os.strerror(int(found[1]))
        if _TORCH_ERROR.search(str(each)):
            return str(error)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
