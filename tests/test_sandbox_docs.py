"""docs/sandbox.md tells the truth: its Python opens a sandbox, and what it says of runs is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from agenttrain import SandboxLimits, SandboxSpec, open_sandbox
from agenttrain.errors import SandboxError

DOC = (Path(__file__).parents[1] / "docs" / "sandbox.md").read_text(encoding="utf-8")


def test_the_example_of_open_sandbox_runs_outside_of_a_rollout(tmp_path: Path) -> None:
    """Its template lies beside the file, and its function of the task is given the task."""
    block = next(each for each in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL) if "open_sandbox(" in each)
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "greeting.txt").write_text("Hello ")
    (tmp_path / "serve.py").write_text(block)
    try:
        ran = runpy.run_path(str(tmp_path / "serve.py"))
    except SandboxError as error:
        pytest.skip(f"no sandbox of this machine keeps all that is asked: {error}")
    assert ran["said"] == "Hello Ada"


def test_what_a_run_leaves_in_the_background_lives_on() -> None:
    try:
        opened = open_sandbox(SandboxSpec(limits=SandboxLimits(seconds=60.0)))
        with opened as sandbox:
            assert sandbox.run("(until [ -e go ]; do sleep 0.05; done; echo late > came) &").ok
            assert sandbox.run("touch go; until [ -s came ]; do sleep 0.05; done; cat came").text == "late"
    except SandboxError as error:
        pytest.skip(f"no sandbox of this machine keeps all that is asked: {error}")
