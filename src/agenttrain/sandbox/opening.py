"""A sandbox outside of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agenttrain.records import Task
from agenttrain.sandbox.making import SandboxMaker
from agenttrain.sandbox.plugin import built_in
from agenttrain.sandbox_protocol import Sandbox
from agenttrain.sandbox_spec import SandboxSpec
from agenttrain.trainable import current_sandbox_is


@contextmanager
def open_sandbox(spec: SandboxSpec, *, task: Task | None = None, folder: str | Path = ".") -> Iterator[Sandbox]:
    """A sandbox outside of rollouts, for tests and servers; `current_sandbox()` gives it inside the block.

    Args:
        task: what functions of the spec are given. None: a task without content.
        folder: that relative paths of the spec begin at.

    Raises:
        ConfigError: the template or a file of the spec can't be used.
        SandboxError: none can be made here as it was asked for.
    """
    maker = SandboxMaker(spec=spec, folder=Path(folder).absolute(), backend_of=built_in)
    sandbox = maker.open(task or Task(id="none", input={}), name="open")
    try:
        with current_sandbox_is(sandbox):
            yield sandbox
    finally:
        sandbox.close()
