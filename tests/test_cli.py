"""The command line: what it lists, and what starting it costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agenttrain import __version__

HELP = """\
Usage: agenttrain [OPTIONS] COMMAND [ARGS]...

  Reinforcement-learning training for the LangGraph agents you already have.

Options:
  --version  Print the version.
  --help     Show this message and exit.

Commands:
  check    Try a graph before it is trained.
  fit      Measure a baseline, train, measure again.
  eval     Roll out tasks once more, and report.
  compare  Hold evaluations against each other, with intervals.
  inspect  Look at a run's rollouts, token by token.
  export   A policy as a Hugging Face folder, with proof of its answers.
  promote  Let a policy serve, if it passes every rule; the way back.
  serve    An OpenAI-compatible address over a policy.
  plugins  List plugins, and why some were left out.
  doctor   Check that versions, machine and model fit together.
  cases    The regression set: add, list, remove.
"""
HEAVY = ("torch", "transformers", "langgraph", "langchain_core", "renderers", "openai", "sqlite3")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_the_commands_without_importing_anything_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, as a shell starts it; what is slow to import stays inside the commands."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local")
    code = f"""
import sys
from agenttrain.cli import main
try:
    main(["--help"])
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = python(code)
    assert (done.stdout, done.stderr, done.returncode) == (HELP, "[]\n", 0)


def test_without_a_command_it_shows_its_help(command: Any) -> None:
    """And exits with 2, as for any wrong use."""
    done = command()
    assert done.code == 2
    assert "Commands:" in done.out + done.err


def test_version(command: Any) -> None:
    """The package's own."""
    assert command("--version").out == f"agenttrain {__version__}\n"


@pytest.mark.parametrize("name", ["check", "fit", "eval", "inspect", "plugins", "doctor"])
def test_every_command_explains_its_options(command: Any, name: str) -> None:
    """Each option has a line of help."""
    done = command(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: agenttrain {name} ")
    assert "--json" in done.out
