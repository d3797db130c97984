from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_modules_import_only_what_lies_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The contracts of pyproject.toml hold: the layers, who knows LangGraph, who knows torch."""
    status = lint_imports(config_filename=str(PYPROJECT), no_cache=True, no_logo=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out
