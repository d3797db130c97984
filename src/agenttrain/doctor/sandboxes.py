"""Which kinds of sandboxes this machine makes, what each leaves unenforced, and what killed runs left of theirs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote

from agenttrain.doctor.finding import Finding
from agenttrain.errors import SandboxError
from agenttrain.sandbox import cgroups, plain, uids
from agenttrain.sandbox.containers import DockerBackend, PodmanBackend
from agenttrain.sandbox.making import BEST_FIRST
from agenttrain.sandbox.plugin import built_in
from agenttrain.sandbox_protocol import SandboxRequest

EVERYTHING = "enforces everything"
_ENGINES = (DockerBackend, PodmanBackend)


def what_works() -> dict[str, str]:
    """Each backend of ours to what it does here, in words; those of this machine make a sandbox to find out."""
    with ThreadPoolExecutor() as threads:  # engines take their time to answer
        engines = {kind.name: threads.submit(_of_an_engine, kind()) for kind in _ENGINES}
        found = {name: _of_this_machine(name) for name in BEST_FIRST}
        return found | {name: answer.result() for name, answer in engines.items()}


def _of_this_machine(name: str) -> str:
    try:
        isolation = built_in(name).isolation(SandboxRequest(name="doctor"))
    except SandboxError as error:
        return str(error)
    return f"leaves {', '.join(isolation.unenforced)} unenforced" if isolation.unenforced else EVERYTHING


def _of_an_engine(backend: DockerBackend | PodmanBackend) -> str:
    try:
        return f"{backend.engine()} answers; an image has to be named"
    except SandboxError as error:
        return str(error)


def sandbox_findings(made_here: Mapping[str, str]) -> list[Finding]:
    """Whether an agent that needs a sandbox gets one without allowing anything.

    Args:
        made_here: as `what_works` gives it.
    """
    if EVERYTHING in made_here.values():
        return []
    return [
        Finding(
            code="sandbox_unenforced",
            severity="warning",
            where="machine",
            seen="no backend keeps a sandbox wholly apart: "
            + "; ".join(f"{name}: {made_here[name]}" for name in BEST_FIRST if name in made_here),
            accepted="one that enforces everything; agents without sandbox= need none",
            fix="let users make namespaces (sysctl -w kernel.unprivileged_userns_clone=1), install bubblewrap, or give "
            "an image to docker or podman",
        )
    ]


def left_findings() -> list[Finding]:
    """What sandboxes of processes that have ended left: folders, control groups, processes, containers."""
    return [
        *_left_folders(Path(tempfile.gettempdir())),
        *_left_groups(),
        *_left_processes(),
        *(finding for kind in _ENGINES for finding in _left_containers(kind())),
    ]


def _left_folders(parent: Path) -> Iterator[Finding]:
    for folder in plain.left_folders(parent):
        yield _left(str(folder), "a sandbox's folder whose run is gone", f"rm -r {quote(str(folder))}")


def _left_groups() -> Iterator[Finding]:
    for folder in cgroups.left_behind():
        members = quote(str(folder / "cgroup.procs"))
        yield _left(
            str(folder),
            "a sandbox's control group whose run is gone",
            f"xargs -r kill -9 < {members}; rmdir {quote(str(folder))}",
        )


def _left_processes() -> Iterator[Finding]:
    for uid, pids in sorted(uids.running_uids().items()):
        if uid not in uids.RANGE:
            continue
        with uids.held(uid) as is_nobodys:
            if is_nobodys:
                words = " ".join(map(str, sorted(pids)))
                yield _left(f"user {uid}", f"processes {words} of a sandbox whose run is gone", f"kill -9 {words}")


def _left_containers(backend: DockerBackend | PodmanBackend) -> Iterator[Finding]:
    try:
        found = backend.left_behind()
    except SandboxError:
        return
    for id, name in found:
        yield _left(f"container {name}", "a sandbox's container whose run is gone", f"{backend.name} rm --force {id}")


def _left(where: str, seen: str, fix: str) -> Finding:
    return Finding(code="sandbox_left", severity="warning", where=where, seen=seen, accepted="none", fix=fix)
