"""What is done to files, by a process that has the sandbox's rights: links are followed inside, and never out."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

from .frames import Header, read_exactly, write_all

Limits = dict[str, float]


class Refusal(Exception):
    """What was asked for can't be done inside; its text is for whoever asked."""


def place_of(root: str, path: str) -> str:
    """The absolute place of a path, links resolved.

    Raises:
        Refusal: it leads out of the working directory.
    """
    if path == ".":
        return root
    if "\0" in path:
        raise Refusal(f"{path!r} is no path.")
    resolved = os.path.realpath(os.path.join(root, path))
    if resolved != root and not resolved.startswith(root.rstrip("/") + "/"):
        raise Refusal(f"{path!r} leads out of the working directory {root}. Give a path within it.")
    return resolved


def read_file(root: str, path: str, most: int, most_name: str) -> bytes:
    """A file's content."""
    fd = os.open(place_of(root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        about = os.fstat(fd)
        if stat.S_ISDIR(about.st_mode):
            raise Refusal(f"{path!r} is a folder. List it, or name a file.")
        if not stat.S_ISREG(about.st_mode):
            raise Refusal(f"{path!r} is no file but a pipe, a socket or a device.")
        data = read_exactly(fd, most + 1)
    finally:
        os.close(fd)
    if len(data) > most:
        raise Refusal(f"{path!r} has {about.st_size} bytes, and {most_name} allows {most}.")
    return data


def write_file(root: str, path: str, data: bytes, executable: bool = False) -> None:
    """Content into a file, its folders too."""
    place = place_of(root, path)
    if place == root:
        raise Refusal(f"{path!r} is the working directory. Name a file in it.")
    os.makedirs(os.path.dirname(place), exist_ok=True)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o777 if executable else 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refusal(f"{path!r} is no file but a pipe, a socket or a device.")
        os.ftruncate(fd, 0)
        write_all(fd, data)
    finally:
        os.close(fd)


def walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path relative to the folder, stat) of all below it, links not followed, in order; what can't be seen is left."""
    left = [""]
    while left:
        inner = left.pop()
        try:
            names = sorted(os.listdir(os.path.join(folder, inner)), reverse=True)
        except PermissionError:
            names = opened_names(os.path.join(folder, inner))
        except OSError:
            continue
        for name in reversed(names):
            path = os.path.join(inner, name)
            try:
                about = os.lstat(os.path.join(folder, path))
            except OSError:
                continue
            yield path, about
        left += [os.path.join(inner, n) for n in names if is_folder(os.path.join(folder, inner, n))]


def is_folder(path: str) -> bool:
    """Whether a folder stands there, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def opened_names(folder: str) -> list[str]:
    """Names in a folder that its owner closed, which is opened for good."""
    try:
        os.chmod(folder, 0o700)
        return sorted(os.listdir(folder), reverse=True)
    except OSError:
        return []


def list_folder(root: str, path: str) -> list[str]:
    """All that stands in a folder and below it, relative to the working directory; folders end in "/"."""
    place = place_of(root, path)
    if not os.path.isdir(place):
        raise Refusal(f"{path!r} is no folder." if os.path.lexists(place) else f"There is no folder {path!r}.")
    below = os.path.relpath(place, root)
    return sorted(
        os.path.normpath(os.path.join(below, name)) + ("/" if stat.S_ISDIR(about.st_mode) else "")
        for name, about in walk(place)
    )


def snapshot(root: str, most: int) -> tuple[list[list[Any]], bytes]:
    """([path, kind, bytes, executable] each, their contents on end) of all that stands there, links not followed."""
    index: list[list[Any]] = []
    contents: list[bytes] = []
    n = 0
    for path, about in walk(root):
        kind, data = content_of(os.path.join(root, path), about, most - n)
        n += len(data)
        if n > most:
            raise Refusal(f"The working directory holds more than disk_mib allows: {n} bytes or more of {most}.")
        index.append([path, kind, len(data), bool(about.st_mode & 0o100)])
        contents.append(data)
    return index, b"".join(contents)


def content_of(place: str, about: os.stat_result, most: int) -> tuple[str, bytes]:
    """(kind, content) of what stands there; a file that its owner closed is opened for good."""
    if stat.S_ISLNK(about.st_mode):
        return "link", os.fsencode(os.readlink(place))
    if stat.S_ISDIR(about.st_mode):
        return "folder", b""
    if not stat.S_ISREG(about.st_mode):
        return "other", b""
    if not about.st_mode & 0o400:
        os.chmod(place, 0o600 | (about.st_mode & 0o777))
    fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    try:
        return "file", read_exactly(fd, most + 1)
    finally:
        os.close(fd)


def lay(root: str, index: list[list[Any]], body: bytes) -> None:
    """Files, folders and links of a snapshot's form into a folder."""
    at = 0
    for path, kind, size, executable in index:
        data, at = body[at : at + size], at + size
        place = os.path.join(root, path)
        if kind == "folder":
            os.makedirs(place, exist_ok=True)
        elif kind == "link":
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(os.fsdecode(data), place)
        elif kind == "file":
            write_file(root, path, data, executable)


def file_work(root: str, limits: Limits, header: Header, body: bytes) -> tuple[Header, bytes]:
    """The (answer, body) to a request over files."""
    op, disk = header["op"], int(limits["disk_mib"] * (1 << 20))
    if op == "read":
        most = int(limits["output_kib"] * 1024) if header["text"] else disk
        return {}, read_file(root, header["path"], most, "output_kib" if header["text"] else "disk_mib")
    if op == "write":
        write_file(root, header["path"], body)
        return {}, b""
    if op == "list":
        return {"names": list_folder(root, header["path"])}, b""
    if op == "lay":
        lay(root, header["index"], body)
        return {}, b""
    index, contents = snapshot(root, disk)
    return {"index": index}, contents


def why(error: OSError, path: str, limits: Limits) -> str:
    """An operating system's refusal in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk of the sandbox is full: disk_mib={limits['disk_mib']:g}. Remove files first."
    if error.errno == errno.ENOENT:
        return f"There is no file {path!r}."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path!r} leads through something that is no folder."
    if error.errno == errno.EISDIR:
        return f"{path!r} is a folder. Name a file."
    return f"{path!r}: {error.strerror}."
