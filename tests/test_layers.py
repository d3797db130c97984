import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"


def test_modules_import_only_what_lies_below_them() -> None:
    """The contracts of pyproject.toml hold: the layers, who knows LangGraph, who knows torch.

    In a process of its own: import-linter turns off the loggers of the one it runs in.
    """
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
