"""`agenttrain doctor`: one object or a table, and an exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agenttrain import __version__
from agenttrain.testing import tiny_model


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no run was made."""
    monkeypatch.chdir(tmp_path)


def codes(examined: Any, severity: str) -> list[str]:
    return [finding["code"] for finding in examined["findings"] if finding["severity"] == severity]


def test_what_is_installed_here_fits(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, and exit 0; every finding is whole."""
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local")
    done = command("doctor", "--json")
    assert done.code == 0
    assert done.json.keys() == {"ok", "findings", "versions", "machine", "plugins", "policy"}
    assert done.json["ok"] is True
    assert codes(done.json, "error") == []
    assert done.json["versions"]["agenttrain"] == __version__
    assert done.json["plugins"]["loaded"] == [f"local {__version__}"]
    for finding in done.json["findings"]:
        assert finding.keys() == {"code", "severity", "where", "seen", "accepted", "fix"}


def test_a_model_is_tried_too(command: Any, tmp_path: Path) -> None:
    """In words, with the fix under each finding."""
    tiny_model(tmp_path / "model")
    done = command("doctor", "--model", "model")
    assert done.code == 0
    assert re.search(r"^parameters +9824\b", done.out, re.MULTILINE)
    assert "warning family_guessed, " in done.out
    assert '  fix: write into agenttrain.toml: renderer.family = "default"\n' in done.out
    assert done.out.endswith("warnings.\n")


def test_an_error_ends_with_1(command: Any, tmp_path: Path) -> None:
    """Errors stand first, and the object is whole all the same."""
    done = command("doctor", "no_graph.py", "--json")
    assert done.code == 1
    assert done.json["ok"] is False
    assert done.json["findings"][0]["code"] == "graph_refused"
    said = command("doctor", "no_graph.py")
    assert said.code == 1
    assert "error graph_refused, no_graph.py\n" in said.out


def test_a_broken_plugin_is_named(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out with its reason; what AGENTTRAIN_PLUGINS names and nobody installed is an error."""
    (tmp_path / "broken_of_test.py").write_text("import no_such_module_of_test\n")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken\nVersion: 1.0\nRequires-Dist: missing-of-test>=2\n"
    )
    (info / "entry_points.txt").write_text("[agenttrain]\nbroken = broken_of_test\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    examined = command("doctor", "--json").json
    assert "plugin_left_out" in codes(examined, "warning")
    assert examined["findings"][0]["code"] == "dependency_missing"
    assert examined["findings"][0]["fix"] == "pip install 'missing-of-test>=2'"
    assert examined["findings"][0]["accepted"] == ">=2, by broken 1.0"
    monkeypatch.setenv("AGENTTRAIN_PLUGINS", "local,absent")
    assert "plugins_refused" in codes(command("doctor", "--json").json, "error")
