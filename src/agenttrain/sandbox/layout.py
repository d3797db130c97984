"""What of this machine a sandbox sees: its system and this Python read-only, made-up users, and nothing else.

Shared by the backends that show parts of the machine's own file system. Changes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from agenttrain.errors import SandboxError

ROOM = "/sandbox"
"""Of what is the sandbox's own. Nothing of the machine is seen in it."""
WORK = f"{ROOM}/work"
"""The working directory."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_OF_ETC = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ca-certificates", "/etc/mime.types"),
    *("/etc/protocols", "/etc/services"),
)
_MADE_UP = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "/etc/group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_PYTHON_LINKS = "/python"
"""A folder for the name `python` where this interpreter's own folder lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Of one kind of sandbox."""

    binds: tuple[tuple[str, str], ...]
    """(what it is on the machine, links resolved; where it is seen), outer ones first."""
    links: tuple[tuple[str, str], ...]
    """(where it stands, where it leads)."""
    files: tuple[tuple[str, str], ...]
    """(path, text) of what is made up."""
    env: dict[str, str]
    """PATH, HOME, LANG and TMPDIR."""
    python: str
    """What "python" is."""


@lru_cache(maxsize=64)
def layout(visible: tuple[str, ...] = (), *, network: bool = False) -> Layout:
    """What is seen, where a request names these paths too.

    Args:
        visible: absolute paths; what isn't there is left out.
        network: whether names are looked up as the machine does it.

    Raises:
        SandboxError: what is to be seen lies in the sandbox's own room, or holds it.
    """
    links = [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
    system = [path for path in _SYSTEM if path not in dict(links)]
    resolver = ["/etc/resolv.conf"] if network else []
    python, python_links = _this_python()
    seen = _outermost([*system, *python, *visible, *_OF_ETC, *resolver])
    for path in seen:
        if _is_in(path, [ROOM]) or _is_in(ROOM, [path]):
            raise SandboxError(
                f"{path} can't be seen in a sandbox, whose own files are in {ROOM}. Move it, or name what is in it."
            )
    linked = [link for link in python_links if not _is_in(link[0], seen)]
    folder = os.path.dirname(sys.executable)
    own = [folder] if os.path.exists(f"{folder}/python") else [_PYTHON_LINKS, folder]
    if own[0] == _PYTHON_LINKS:
        linked.append((f"{_PYTHON_LINKS}/python", sys.executable))
    return Layout(
        binds=tuple((os.path.realpath(path), path) for path in seen),
        links=tuple(dict.fromkeys((*links, *linked))),
        files=tuple(_MADE_UP.items()),
        env={
            "PATH": ":".join((*own, "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
        },
        python=sys.executable,
    )


def _this_python() -> tuple[list[str], list[tuple[str, str]]]:
    """Folders that this interpreter needs, and the links that lead to it from outside of them."""
    folders = [sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)]
    links: list[tuple[str, str]] = []
    place = sys.executable
    while os.path.islink(place):
        leads_to = os.readlink(place)
        links.append((place, leads_to))
        place = os.path.normpath(os.path.join(os.path.dirname(place), leads_to))
    if not _is_in(os.path.realpath(place), folders):
        folders.append(os.path.dirname(os.path.dirname(os.path.realpath(place))))
    return folders, links


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those that are there, shortest first, without what lies in another."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}, key=lambda path: (path.count("/"), path)):
        if os.path.exists(path) and not _is_in(path, kept):
            kept.append(path)
    return kept


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
