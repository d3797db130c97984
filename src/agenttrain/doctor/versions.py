"""Installed distributions against what they require of each other, and against the versions that the tests ran with.

`tested_versions.txt` is constraints.txt of the repository, word for word (a test compares them).
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from agenttrain.doctor.finding import Finding

OURS = "agenttrain"
NEAR = (
    *("langgraph-prebuilt", "langgraph-checkpoint", "tokenizers", "huggingface-hub"),
    *("verl", "ray", "tensordict", "transferqueue"),
)
"""Not required by name, or by a plugin's extra only, and the code here depends on how they behave."""
IMPORTED = ("langgraph.prebuilt", "langgraph.graph", "langchain_core.language_models", "transformers", "renderers")
"""Modules that fail at import when versions don't fit: langgraph 1.0.0 beside a newer langgraph-prebuilt does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """An installed distribution."""

    name: str
    """Canonical: lower case, "-" between words."""
    version: str
    requires: tuple[str, ...] = ()
    """As its metadata writes them, markers included."""


def installed(roots: Iterable[str] = ()) -> dict[str, Distribution]:
    """agenttrain, the distributions of its plugins, and all that these require, as far as it is installed; by name.

    What the extras of a plugin name counts as required where it is installed: a plugin's engine or trainer often is.

    Args:
        roots: more distributions to begin with.
    """
    entries = metadata.entry_points(group=OURS)
    plugins = {canonicalize_name(entry.dist.name) for entry in entries if entry.dist is not None} - {OURS}
    waiting = [*map(canonicalize_name, (OURS, *roots)), *plugins]
    found: dict[str, Distribution] = {}
    while waiting:
        name = waiting.pop()
        if name in found or (distribution := _distribution(name)) is None:
            continue
        found[name] = distribution
        wanted = _all_requirements(distribution) if name in plugins else requirements(distribution)
        waiting += [canonicalize_name(requirement.name) for requirement in wanted]
    return found


def requirements(distribution: Distribution) -> Iterator[Requirement]:
    """Those that hold here and belong to no extra."""
    for requirement in _all_requirements(distribution):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def tested_versions() -> dict[str, str]:
    """Distribution to the version that the tests ran with."""
    text = files("agenttrain.doctor").joinpath("tested_versions.txt").read_text(encoding="utf-8")
    pairs = (line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def python_findings(seen: str, accepted: str) -> list[Finding]:
    """Whether this Python is one that agenttrain runs on.

    Args:
        accepted: Requires-Python of the distribution, such as ">=3.11,<3.13".
    """
    if Version(seen) in SpecifierSet(accepted):
        return []
    return [
        Finding(
            code="python_version",
            severity="error",
            where="python",
            seen=seen,
            accepted=accepted,
            fix="make an environment with such a Python: python3.11 -m venv .venv",
        )
    ]


def requirement_findings(found: Mapping[str, Distribution], tested: Mapping[str, str]) -> list[Finding]:
    """Requirements of installed distributions that nothing installed fulfils."""
    return [
        _unfulfilled(distribution, requirement, found, tested)
        for distribution in found.values()
        for requirement in requirements(distribution)
        if not _fulfilled(requirement, found)
    ]


def untested_findings(found: Mapping[str, Distribution], tested: Mapping[str, str]) -> list[Finding]:
    """Versions that differ from the tested ones in more than a patch, of what agenttrain builds on directly."""
    direct = {canonicalize_name(r.name) for r in requirements(found[OURS])} if OURS in found else set()
    return [
        Finding(
            code="version_untested",
            severity="warning",
            where=name,
            seen=found[name].version,
            accepted=f"{tested[name]} is tested",
            fix=f"pip install '{name}=={tested[name]}'",
        )
        for name in sorted(direct | set(NEAR))
        if name in found and name in tested and _minor(found[name].version) != _minor(tested[name])
    ]


def import_findings(modules: Sequence[str], tested: Mapping[str, str]) -> list[Finding]:
    """Modules that are installed and can't be imported: versions that don't fit together show there first."""
    findings = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            findings.append(_not_importable(name, error, tested))
    return findings


def requires_python() -> str:
    """Requires-Python of the installed agenttrain; every one when it is not installed as a distribution."""
    try:
        about = metadata.metadata(OURS)
    except metadata.PackageNotFoundError:
        return ""
    return str((about.get_all("Requires-Python") or [""])[0])


def version_table(found: Mapping[str, Distribution]) -> dict[str, Any]:
    """Python and every distribution that was looked at, by name."""
    return {"python": platform.python_version(), **{name: found[name].version for name in sorted(found)}}


def _all_requirements(distribution: Distribution) -> Iterator[Requirement]:
    """Those of every extra and platform too."""
    for text in distribution.requires:
        with suppress(InvalidRequirement):
            yield Requirement(text)


def _distribution(name: str) -> Distribution | None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Distribution(name=name, version=distribution.version, requires=tuple(distribution.requires or ()))


def _fulfilled(requirement: Requirement, found: Mapping[str, Distribution]) -> bool:
    there = found.get(canonicalize_name(requirement.name))
    return there is not None and requirement.specifier.contains(there.version, prereleases=True)


def _unfulfilled(
    by: Distribution, requirement: Requirement, found: Mapping[str, Distribution], tested: Mapping[str, str]
) -> Finding:
    name = canonicalize_name(requirement.name)
    there = found.get(name)
    fits = name in tested and requirement.specifier.contains(tested[name], prereleases=True)
    wanted = f"{name}=={tested[name]}" if fits else f"{name}{requirement.specifier}"
    return Finding(
        code="dependency_missing" if there is None else "dependency_conflict",
        severity="error",
        where=name,
        seen="not installed" if there is None else there.version,
        accepted=f"{requirement.specifier or 'any version'}, by {by.name} {by.version}",
        fix=f"pip install '{wanted}'",
    )


def _not_importable(module: str, error: Exception, tested: Mapping[str, str]) -> Finding:
    name = canonicalize_name(module.replace(".", "-"))
    while name not in tested and "-" in name:
        name = canonicalize_name(name.rpartition("-")[0])
    together = [n for n in tested if n == name or (n.startswith("langgraph") and name.startswith("langgraph"))]
    pins = " ".join(f"'{each}=={tested[each]}'" for each in sorted(together)) or f"'{name}'"
    return Finding(
        code="import_fails",
        severity="error",
        where=module,
        seen=f"{type(error).__name__}: {error}",
        accepted="a module that can be imported",
        fix=f"pip install {pins}",
    )


def _minor(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
