"""What is installed is held against what is supported."""

from __future__ import annotations

import pytest
from agenttrain.errors import PluginError
from packaging.specifiers import SpecifierSet

from agenttrain_verl import versions


def test_the_installed_versions_are_supported() -> None:
    versions.check_versions()


def test_the_tested_versions_are_supported() -> None:
    for name, version in versions.TESTED.items():
        assert version in versions.SUPPORTED[name]


def test_all_that_is_wrong_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing, and one of another version."""
    monkeypatch.setitem(versions.SUPPORTED, "not-there", SpecifierSet(">=1"))
    monkeypatch.setitem(versions.SUPPORTED, "ray", SpecifierSet("==0.1"))
    with pytest.raises(PluginError) as error:
        versions.check_versions()
    assert "ray is " in str(error.value)
    assert "not-there is not installed (>=1 is needed)" in str(error.value)
    assert 'pip install "agenttrain-verl[verl]"' in str(error.value)
    assert 'pip install -c constraints.txt -e . -e "integrations/agenttrain-verl[verl]"' in str(error.value)
