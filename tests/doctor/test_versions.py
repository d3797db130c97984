"""Distributions against their requirements, and against the tested versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agenttrain.doctor import versions
from agenttrain.doctor.finding import Finding
from agenttrain.doctor.versions import (
    Distribution,
    import_findings,
    installed,
    python_findings,
    requirement_findings,
    untested_findings,
)

ROOT = Path(__file__).parents[2]
TESTED = {"agenttrain": "0.1.0", "langgraph": "1.2.24", "langgraph-prebuilt": "1.1.3", "numpy": "2.4.6"}


def found(*distributions: tuple[str, str, *tuple[str, ...]]) -> dict[str, Distribution]:
    return {name: Distribution(name=name, version=version, requires=rest) for name, version, *rest in distributions}  # type: ignore[misc]


def codes(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.where, finding.fix) for finding in findings]


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    """Word for word; when this fails: cp constraints.txt src/agenttrain/doctor/tested_versions.txt"""
    shipped = Path(versions.__file__).with_name("tested_versions.txt")
    assert shipped.read_bytes() == (ROOT / "constraints.txt").read_bytes()
    assert versions.tested_versions()["langgraph-prebuilt"] == "1.1.3"
    assert {"torch", "huggingface-hub", "tomli-w"} <= versions.tested_versions().keys()


def test_an_older_python_is_an_error() -> None:
    """Against Requires-Python; without one all are taken."""
    assert python_findings("3.11.7", ">=3.11,<3.13") == []
    assert python_findings("3.9.1", "") == []
    (finding,) = python_findings("3.13.0", ">=3.11,<3.13")
    assert (finding.code, finding.severity, finding.accepted) == ("python_version", "error", ">=3.11,<3.13")


def test_what_is_installed_here_fits() -> None:
    """The environment of the tests, read from its metadata down to the last requirement."""
    here = installed()
    assert {"agenttrain", "torch", "langgraph", "langgraph-checkpoint", "tokenizers"} <= here.keys()
    assert requirement_findings(here, versions.tested_versions()) == []


def distribute(folder: Path, name: str, version: str, *lines: str, entry_points: str = "") -> None:
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (about / "METADATA").write_text(f"{text}\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def test_what_the_extra_of_a_plugin_names_is_looked_at_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what that requires; a plugin of another group has no say."""
    needs = ('Requires-Dist: odd_engine>=2; extra == "engine"', 'Requires-Dist: absent; extra == "engine"')
    distribute(tmp_path, "odd_plugin", "1.0", *needs, entry_points="[agenttrain]\nodd = odd\n")
    distribute(tmp_path, "other_plugin", "1.0", 'Requires-Dist: other_engine; extra == "engine"')
    distribute(tmp_path, "odd_engine", "2.1", "Requires-Dist: numpy>=99")
    distribute(tmp_path, "other_engine", "1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    here = installed(["other-plugin"])
    assert {"odd-plugin", "odd-engine", "other-plugin"} <= here.keys()
    assert not {"absent", "other-engine"} & here.keys()
    (finding,) = requirement_findings(here, versions.tested_versions())
    assert (finding.code, finding.where, finding.accepted) == (
        "dependency_conflict",
        "numpy",
        ">=99, by odd-engine 2.1",
    )


def test_a_conflict_names_who_asks_and_what_to_install() -> None:
    """The tested version where it fulfils the requirement, else the requirement itself."""
    here = found(
        ("langgraph", "1.2.24", "langgraph-prebuilt<1.2,>=1.1", "numpy>=3; python_version > '3'", 'x; extra == "y"'),
        ("langgraph-prebuilt", "1.0.2"),
        ("numpy", "2.4.6"),
    )
    first, second = requirement_findings(here, TESTED)
    assert (first.code, first.severity, first.where, first.seen) == (
        "dependency_conflict",
        "error",
        "langgraph-prebuilt",
        "1.0.2",
    )
    assert first.accepted == "<1.2,>=1.1, by langgraph 1.2.24"
    assert first.fix == "pip install 'langgraph-prebuilt==1.1.3'"
    assert second.fix == "pip install 'numpy>=3'"


def test_a_missing_one_is_told_apart() -> None:
    """Optional ones, behind an extra or a marker that doesn't hold, are not missed."""
    here = found(("langgraph", "1.2.24", "langgraph_prebuilt>=1.1", "colorama; sys_platform == 'never'"))
    assert codes(requirement_findings(here, TESTED)) == [
        ("dependency_missing", "langgraph-prebuilt", "pip install 'langgraph-prebuilt==1.1.3'")
    ]


def test_another_minor_version_is_a_warning() -> None:
    """Of what agenttrain requires itself; a patch is none, nor is what others bring along."""
    here = found(
        ("agenttrain", "0.1.0", "langgraph>=1.0", "numpy>=1.26"),
        ("langgraph", "1.3.0"),
        ("numpy", "2.4.1"),
        ("langgraph-prebuilt", "1.2.0"),
        ("attrs", "1.0"),
    )
    findings = untested_findings(here, TESTED | {"attrs": "26.1.0"})
    assert codes(findings) == [
        ("version_untested", "langgraph", "pip install 'langgraph==1.2.24'"),
        ("version_untested", "langgraph-prebuilt", "pip install 'langgraph-prebuilt==1.1.3'"),
    ]
    assert {finding.severity for finding in findings} == {"warning"}


def test_a_module_that_can_not_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As langgraph 1.0.0 can't beside a newer langgraph-prebuilt; both are to be installed anew together."""
    package = tmp_path / "langgraph_prebuilt"
    package.mkdir()
    (package / "__init__.py").write_text("from langgraph.runtime import NoSuchNameOfTest\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = import_findings(["json", "langgraph_prebuilt"], TESTED)
    sys.modules.pop("langgraph_prebuilt", None)
    assert (finding.code, finding.severity, finding.where) == ("import_fails", "error", "langgraph_prebuilt")
    assert finding.seen.startswith("ImportError: cannot import name 'NoSuchNameOfTest'")
    assert finding.fix == "pip install 'langgraph==1.2.24' 'langgraph-prebuilt==1.1.3'"
