"""examples/agenttrain-example-plugin: built and installed as a user does, aside, and its own tests run there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "examples" / "agenttrain-example-plugin"


def python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    environment.pop("AGENTTRAIN_PLUGINS", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution in it, as pip makes it."""
    pytest.importorskip("hatchling", reason="the dev extra installs it; it builds the plugin")
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    done = python("-m", "pip", "install", *options, "--target", str(target), str(PLUGIN), cwd=target)
    assert done.returncode == 0, done.stdout
    return target


@pytest.mark.slow
def test_its_own_tests_pass(installed: Path) -> None:
    """With the contracts of agenttrain.testing, and whole runs by its trainer and engine."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = python(
        "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", cwd=PLUGIN, PYTHONPATH=path, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_command_line_lists_it(installed: Path, tmp_path: Path) -> None:
    """Its parts and its command, and nothing heavy is imported for that."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    listed = python("-m", "agenttrain", "plugins", "--json", cwd=tmp_path, PYTHONPATH=path).stdout
    for word in ('"name": "example"', '"shallow"', '"reinforce"', '"ranks"'):
        assert word in listed
    code = "import sys, agenttrain_example_plugin.plugin; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert python("-c", code, cwd=tmp_path, PYTHONPATH=path).stdout == "[]\n"
    helped = python("-m", "agenttrain", "--help", cwd=tmp_path, PYTHONPATH=path).stdout
    assert "longest  The rollouts of a run that sampled most (example plugin)." in helped
