"""Sandboxes as containers: `docker run` or `podman run` starts `inside` in an image that has Python 3.

The engine's own answer is the reason wherever it does not do what it is asked for.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import ExitStack, suppress

from agenttrain.errors import SandboxError
from agenttrain.records import Isolation
from agenttrain.sandbox import uids
from agenttrain.sandbox.launch import OVERHEAD_MIB, OVERHEAD_PROCESSES, launch
from agenttrain.sandbox.layout import ROOM, WORK
from agenttrain.sandbox.owners import is_left_behind, owned_name
from agenttrain.sandbox.seccomp import filter_program
from agenttrain.sandbox.served import INSIDE, Begin, ServedSandbox
from agenttrain.sandbox_protocol import Sandbox, SandboxRequest

_INSIDE = "/agenttrain/inside"
_BEGIN = f"""import os, runpy
for name in ("work", "tmp"):
    os.mkdir("{ROOM}/" + name)
runpy.run_path("{_INSIDE}", run_name="__main__")"""
_ANSWER_S = 60.0
"""An engine that answers nothing by then counts as not there."""
_KILLED = 137
"""What an engine's `run` ends with where something killed the first process: unless we did, the control group."""
_SHARED_MIB = 1
"""Of /dev/shm, which an engine always makes; it is taken from disk_mib."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class _ContainerBackend:
    """What docker and podman have in common."""

    name: str
    version: tuple[str, ...]
    """Arguments that make the engine tell its version, and fail where it does not work."""
    extra: tuple[str, ...] = ()
    """Arguments of `run` that only this one needs."""
    next_step: str
    """What makes it answer."""

    def __init__(self, *, image: str | None = None) -> None:
        """Make a backend; the engine is asked when it is first needed.

        Args:
            image: where a request names none.
        """
        self._default_image = image
        self._engines: dict[str, str] = {}
        """Image that a container was made of, to the engine's name and version."""
        self._lock = threading.Lock()

    def isolation(self, request: SandboxRequest) -> Isolation:
        """What a container of the image is kept apart by; one is made once to find out."""
        engine = self._tried(self._image(request))
        enforced = {
            "filesystem": f"read-only container of {engine}",
            "processes_end": f"process namespace of {engine}",
            "privileges": f"a user of its own, no capabilities, no_new_privs by {engine}",
            "seconds": "clock of its first process",
            "memory_mib": f"control group of {engine}",
            "processes": f"control group of {engine}",
            "disk_mib": "tmpfs of that size",
            "output_kib": "its first process",
        }
        if not request.network:
            enforced["network"] = f"network namespace of {engine}"
        return Isolation(backend=self.name, enforced=enforced)

    def open(self, request: SandboxRequest) -> Sandbox:
        """Make one."""
        return self._opened(request, self.isolation(request))

    def engine(self) -> str:
        """Its name and version.

        Raises:
            SandboxError: it is not there, or does not answer.
        """
        return f"{self.name} {self._ask(*self.version)}"

    def left_behind(self) -> list[tuple[str, str]]:
        """(id, name) of each container of ours whose process has ended.

        Raises:
            SandboxError: the engine does not answer.
        """
        listed = self._ask("ps", "--all", "--no-trunc", "--filter=name=agenttrain-", "--format={{.ID}} {{.Names}}")
        found = [line.split(maxsplit=1) for line in listed.splitlines()]
        return [(id, name) for id, name in found if is_left_behind(name)]

    def remove_left_behind(self) -> None:
        """End and remove containers of ours whose process has ended, by their ids."""
        for id, _ in self.left_behind():
            self._remove(id)

    def _opened(self, request: SandboxRequest, isolation: Isolation) -> ServedSandbox:
        name = owned_name(request.name)
        filters = filter_program(sockets=True)
        with ExitStack() as made:
            own = uids.lease()
            made.callback(own.close)
            made.callback(self._remove, name)
            launched = launch(self._command(request, name, own.uid), request, made, grouped=False)
            begin = Begin(
                path=WORK,
                env={"PATH": _PATH, "HOME": f"{ROOM}/tmp", "TMPDIR": f"{ROOM}/tmp", "LANG": "C.UTF-8"},
                watch_memory=True,  # says by which limit a run was ended; the engine's own limit stands behind it
                filter=filters.hex() if filters else None,
            )
            served = launched.begun(request, begin)
            release = made.pop_all()
        return ServedSandbox(
            request=request,
            isolation=isolation,
            path=begin.path,
            served=served,
            reopen=self.open,
            release=release.close,
            first_ended_by_memory=lambda: launched.exit_code() == _KILLED,
        )

    def _command(self, request: SandboxRequest, name: str, uid: int) -> list[str]:
        limits = request.limits
        memory = f"{int(limits.memory_mib) + OVERHEAD_MIB}m"
        size = max(1, int(limits.disk_mib) - _SHARED_MIB)
        words = [self._program(), "run", "--interactive", "--rm", "--pull=never", "--log-driver=none", f"--name={name}"]
        words += ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={uid}:{uid}"]
        words += [f"--memory={memory}", f"--memory-swap={memory}", "--ulimit=nofile=1024:1024", "--ulimit=core=0:0"]
        n_processes = int(limits.processes) + OVERHEAD_PROCESSES
        words += [f"--pids-limit={n_processes}", f"--ulimit=nproc={n_processes}:{n_processes}"]
        words += [f"--tmpfs={ROOM}:rw,exec,nosuid,nodev,mode=1777,size={size}m", f"--shm-size={_SHARED_MIB}m"]
        words += [] if request.network else ["--network=none"]
        for source, where in ((str(INSIDE), _INSIDE), *((path, path) for path in request.visible)):
            words.append(f"--mount=type=bind,source={source},destination={where},readonly")
        words += [*self.extra, "--workdir=/", "--entrypoint=python3", self._image(request)]
        return [*words, "-I", "-S", "-B", "-c", _BEGIN]

    def _image(self, request: SandboxRequest) -> str:
        image = request.image or self._default_image
        if image is None:
            raise SandboxError(
                f"The backend {self.name!r} makes containers, and no image is named. Name one that has Python 3: "
                "SandboxSpec(image='python:3.12-slim'), or --set sandbox.image=python:3.12-slim."
            )
        return image

    def _tried(self, image: str) -> str:
        with self._lock:
            if image not in self._engines:
                engine = self.engine()
                self.remove_left_behind()
                self._try(image)
                self._engines[image] = engine
            return self._engines[image]

    def _try(self, image: str) -> None:
        request = SandboxRequest(name="trial", image=image)
        try:
            sandbox = self._opened(request, Isolation(backend=self.name, enforced={}))
        except SandboxError as error:
            raise SandboxError(
                f"{self.name} makes no sandbox of the image {image!r} here: {error} See that it is there "
                f"({self.name} pull {image}) and has Python 3."
            ) from error
        try:
            execution = sandbox.run(["python3", "-I", "-S", "-c", ""])
        finally:
            sandbox.close()
        if not execution.ok:
            raise SandboxError(f"In a container of {image!r} python3 does not run: {execution.text}")

    def _program(self) -> str:
        program = shutil.which(self.name)
        if program is None:
            raise SandboxError(f"No program {self.name!r} is on the PATH. Install it, or name another backend.")
        return program

    def _ask(self, *argv: str) -> str:
        """What the engine answers.

        Raises:
            SandboxError: it does not, with what it wrote.
        """
        try:
            asked = subprocess.run(
                [self._program(), *argv],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"{self.name} did not answer within {_ANSWER_S:g} s. {self.next_step}") from error
        except subprocess.CalledProcessError as error:
            wrote = error.stderr.strip() or f"exit code {error.returncode}"
            raise SandboxError(f"{self.name} does not answer: {wrote} {self.next_step}") from error
        return asked.stdout.strip()

    def _remove(self, container: str) -> None:
        """End and remove a container by its id or its own name, if it is still there."""
        with suppress(SandboxError):
            self._ask("rm", "--force", container)


class DockerBackend(_ContainerBackend):
    """Containers of Docker."""

    name = "docker"
    version = ("version", "--format={{.Server.Version}}")
    next_step = "Start its daemon (systemctl start docker), or name another backend."


class PodmanBackend(_ContainerBackend):
    """Containers of Podman."""

    name = "podman"
    version = ("info", "--format={{.Version.Version}}")
    extra = ("--read-only-tmpfs=false",)
    next_step = "See what `podman info` says, or name another backend."
