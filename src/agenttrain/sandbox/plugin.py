"""The built-in sandbox backends under their names. Imports none until it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from agenttrain.errors import ConfigError
from agenttrain.markers import hookimpl

if TYPE_CHECKING:
    from agenttrain.sandbox_protocol import SandboxBackend, SandboxFactory

_CLASSES = MappingProxyType(
    {
        "namespaces": ("agenttrain.sandbox.namespaces", "NamespacesBackend"),
        "bubblewrap": ("agenttrain.sandbox.bubblewrap", "BubblewrapBackend"),
        "subprocess": ("agenttrain.sandbox.plain", "SubprocessBackend"),
        "docker": ("agenttrain.sandbox.containers", "DockerBackend"),
        "podman": ("agenttrain.sandbox.containers", "PodmanBackend"),
    }
)
"""Name to module and class."""


@hookimpl
def agenttrain_register_sandboxes(register: Callable[[str, SandboxFactory], None]) -> None:
    for name in _CLASSES:
        register(name, partial(built_in, name))


def built_in(name: str) -> SandboxBackend:
    """A new backend of ours.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in _CLASSES:
        raise ConfigError(f"No sandbox backend of agenttrain is named {name!r}. There are: {', '.join(_CLASSES)}.")
    module, kind = _CLASSES[name]
    made: SandboxBackend = getattr(importlib.import_module(module), kind)()
    return made
