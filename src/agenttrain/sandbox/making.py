"""A user's SandboxSpec and a task become an open Sandbox, made by a backend that enforces what was asked for.

What no backend of this machine enforces is refused by name before anything runs, unless the user allowed it. Knows
nothing of how a backend works.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agenttrain.config import SandboxTable
from agenttrain.errors import ConfigError, SandboxError
from agenttrain.records import Isolation, Task
from agenttrain.sandbox_protocol import Sandbox, SandboxBackend, SandboxFile, SandboxRequest
from agenttrain.sandbox_spec import Files, SandboxSpec

BEST_FIRST = ("namespaces", "bubblewrap", "subprocess")
"""Backends that are tried where none is named."""


@dataclass(kw_only=True)
class SandboxMaker:
    """Makes the sandboxes of one graph."""

    spec: SandboxSpec
    folder: Path
    """That relative paths of the spec begin at."""
    backend_of: Callable[[str], SandboxBackend]
    """A new backend by its name; raises where there is none."""
    table: SandboxTable = field(default_factory=SandboxTable)
    _chosen: SandboxBackend | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, task: Task, *, name: str) -> Sandbox:
        """A sandbox for one rollout of a task; blocks until it can run programs.

        Raises:
            ConfigError: the template or a file of the spec can't be used.
            SandboxError: none can be made here as it was asked for.
        """
        request = self.request(task, name=name)
        return self._backend(request).open(request)

    def isolation(self, task: Task) -> Isolation:
        """What a sandbox of this task would be kept apart by; nothing is started but a backend's own trial.

        Raises:
            ConfigError: the template or a file of the spec can't be used.
            SandboxError: none can be made here as it was asked for.
        """
        request = self.request(task, name="check")
        return self._backend(request).isolation(request)

    def request(self, task: Task, *, name: str) -> SandboxRequest:
        """What the spec says for a task."""
        spec = self.spec
        template = spec.template(task) if callable(spec.template) else spec.template
        files = spec.files(task) if callable(spec.files) else spec.files
        return SandboxRequest(
            name=name,
            files={**self._template(template), **sandbox_files(files)},
            env=dict(spec.env(task) if callable(spec.env) else spec.env),
            visible=tuple(str(self._at(path)) for path in spec.visible),
            network=spec.network,
            limits=spec.limits,
            image=self.table.image or spec.image,
        )

    def _backend(self, request: SandboxRequest) -> SandboxBackend:
        with self._lock:
            if self._chosen is None:
                self._chosen = self._choose(request)
            return self._chosen

    def _choose(self, request: SandboxRequest) -> SandboxBackend:
        named = self.table.backend or self.spec.backend
        allowed = {*self.spec.allow_unenforced, *self.table.allow_unenforced}
        refused: list[str] = []
        lacking: list[str] = []
        for name in (named,) if named else BEST_FIRST:
            backend = self.backend_of(name)
            try:
                missing = [each for each in backend.isolation(request).unenforced if each not in allowed]
            except SandboxError as error:
                refused.append(f"{name}: {error}")
                continue
            if not missing:
                return backend
            refused.append(f"{name}: does not enforce {', '.join(missing)} here")
            lacking = lacking or missing
        allow = f", or allow it: --set 'sandbox.allow_unenforced={json.dumps(lacking)}'" if lacking else ""
        raise SandboxError(
            "No sandbox can be made as sandbox= of @trainable asks. "
            f"{'. '.join(each.rstrip('.') for each in refused)}. "
            f"Name a backend that can (--set sandbox.backend=…; agenttrain doctor tells what this machine has){allow}."
        )

    def _template(self, template: str | None) -> Mapping[str, SandboxFile]:
        if template is None:
            return {}
        folder = self._at(template)
        if not folder.is_dir():
            raise ConfigError(
                f"sandbox= of @trainable names the template {folder}, and that is no folder. Make it, or name another."
            )
        return folder_files(folder)

    def _at(self, path: str) -> Path:
        return Path(os.path.normpath(self.folder / path))


def folder_files(folder: Path) -> dict[str, SandboxFile]:
    """All that stands in a folder of the machine and below it, links not followed; caches of Python left out."""
    found: dict[str, SandboxFile] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if "__pycache__" in name.parts:
            continue
        if path.is_symlink():
            found[str(name)] = SandboxFile(kind="link", data=os.fsencode(os.readlink(path)))
        elif path.is_dir():
            found[str(name)] = SandboxFile(kind="folder")
        elif path.is_file():
            executable = bool(path.stat().st_mode & 0o100)
            found[str(name)] = SandboxFile(data=path.read_bytes(), executable=executable)
    return found


def sandbox_files(files: Files | Mapping[str, SandboxFile]) -> dict[str, SandboxFile]:
    """Paths and contents as files of a sandbox.

    Raises:
        ConfigError: a path that leads out of the working directory, or content that is no text and no bytes.
    """
    found: dict[str, SandboxFile] = {}
    for path, content in files.items():
        name = os.path.normpath(path)
        if os.path.isabs(path) or name.split("/")[0] in ("..", "."):
            raise ConfigError(f"A file of a sandbox is named {path!r}. Give a path within its working directory.")
        if isinstance(content, str):
            content = content.encode()
        if isinstance(content, bytes):
            content = SandboxFile(data=content)
        if not isinstance(content, SandboxFile):
            raise ConfigError(f"The file {path!r} of a sandbox is {content!r}. Give a text or bytes.")
        found[name] = content
    return found


def without_network(request: SandboxRequest) -> SandboxRequest:
    """The same, with no network."""
    return replace(request, network=False)
