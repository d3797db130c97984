"""The bytes of requests and answers: a header that is JSON, and a body."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

Header = dict[str, Any]

HEAD = struct.Struct(">II")
"""Of a frame: bytes of its header, and of its body."""
CHUNK = 1 << 16


def frame(header: Header, body: bytes = b"") -> bytes:
    """The bytes of one."""
    head = json.dumps(header).encode()
    return HEAD.pack(len(head), len(body)) + head + body


def read_exactly(fd: int, n: int) -> bytes:
    """That many bytes; fewer only at the end of file."""
    parts: list[bytes] = []
    left = n
    while left:
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> tuple[Header, bytes] | None:
    """The next (header, body). None: the other side is gone."""
    head = read_exactly(fd, HEAD.size)
    if len(head) < HEAD.size:
        return None
    n_header, n_body = HEAD.unpack(head)
    content = read_exactly(fd, n_header + n_body)
    if len(content) < n_header + n_body:
        return None
    return json.loads(content[:n_header]), content[n_header:]


def write_all(fd: int, data: bytes) -> None:
    """Every byte, however long it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_all_there_is(fd: int) -> None:
    """Empty a pipe."""
    try:
        while os.read(fd, CHUNK):
            pass
    except BlockingIOError:
        pass
