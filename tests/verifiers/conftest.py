from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agenttrain import SandboxLimits, SandboxSpec, Task, open_sandbox
from agenttrain.errors import SandboxError


@pytest.fixture
def judged() -> Callable[..., dict[str, Any]]:
    """What a verifier answers on initial files that an agent changed: judged(verifier, initial, written, reference).

    A file that is written as None is removed.
    """

    def answer(verifier, initial, written=None, reference=None, limits=None) -> dict[str, Any]:
        task = Task(id="repair-1", input={}, reference=reference)
        spec = SandboxSpec(files=initial, limits=limits or SandboxLimits(seconds=60.0))
        try:
            opened = open_sandbox(spec)
            sandbox = opened.__enter__()
        except SandboxError as error:
            pytest.skip(f"no sandbox of this machine keeps all that is asked: {error}")
        try:
            for path, content in (written or {}).items():
                if content is None:
                    sandbox.run(["rm", path])
                else:
                    sandbox.write(path, content)
            sandbox.settle()
            return verifier(task=task, sandbox=sandbox)
        finally:
            opened.__exit__(None, None, None)

    return answer
