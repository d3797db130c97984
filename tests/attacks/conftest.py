"""The marker `attack(kind, name, tried, outcome)` of each attack, the sandboxes they are tried on, and how they ended.

outcome: "contained" (it reaches nothing), "reported" (it changes nothing, and what it changed is told in words) or
"contained and reported".
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.harness import Prey, Siege, prey

from agenttrain.errors import SandboxError
from agenttrain.sandbox.bubblewrap import BubblewrapBackend
from agenttrain.sandbox.namespaces import NamespacesBackend
from agenttrain.sandbox.plain import SubprocessBackend
from agenttrain.sandbox_protocol import SandboxBackend, SandboxRequest

COUNTED = pytest.StashKey[dict[str, str]]()
SYSTEM_PYTHON = "/usr/bin/python3"
"""Which every user may run."""


def made(name: str) -> SandboxBackend:
    if name == "namespaces":
        return NamespacesBackend()
    if name == "bubblewrap":
        return BubblewrapBackend()
    as_other_user = os.geteuid() == 0 and Path(SYSTEM_PYTHON).exists()
    return SubprocessBackend(python=SYSTEM_PYTHON if as_other_user else None)


def backend_or_skip(name: str) -> SandboxBackend:
    backend = made(name)
    try:
        backend.isolation(SandboxRequest(name="asked"))
    except SandboxError as error:
        pytest.skip(f"{name} does not work here: {error}")
    return backend


@pytest.fixture
def the_prey(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prey]:
    """What may not be touched; this process has a secret in its environment, and a file open that children inherit."""
    with prey() as made:
        monkeypatch.setenv("OPENAI_API_KEY", made.secrets["key"])
        opened = os.open(made.folder / "file.txt", os.O_RDWR)
        os.set_inheritable(opened, True)
        yield made
        os.close(opened)


@pytest.fixture(
    params=[
        "namespaces",
        pytest.param("bubblewrap", marks=pytest.mark.slow),
        pytest.param("subprocess", marks=pytest.mark.long),
    ]
)
def siege(request: pytest.FixtureRequest, the_prey: Prey) -> Siege:
    """A backend that works here, and a prey outside of its sandboxes."""
    return Siege(backend=backend_or_skip(request.param), prey=the_prey)


@pytest.fixture
def backend() -> SandboxBackend:
    """The best one that works here: what verifiers judge in."""
    for name in ("namespaces", "bubblewrap"):
        if name == "bubblewrap" and shutil.which("bwrap") is None:
            continue
        try:
            backend = made(name)
            backend.isolation(SandboxRequest(name="asked"))
        except SandboxError:
            continue
        return backend
    pytest.skip("no backend that holds every boundary works here")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTED] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    marker = item.get_closest_marker("attack")
    if marker is not None and (report.when == "call" or report.outcome != "passed"):
        outcome = marker.kwargs["outcome"] if report.passed else report.outcome
        item.config.stash[COUNTED][item.nodeid] = f"{marker.kwargs['kind']}\0{outcome}"
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The attacks that ran, by kind and how they ended."""
    counted = Counter(config.stash[COUNTED].values())
    kinds: dict[str, list[str]] = {}
    for each, n in sorted(counted.items()):
        kind, outcome = each.split("\0")
        kinds.setdefault(kind, []).append(f"{n} {outcome}")
    if kinds:
        terminalreporter.section(f"{counted.total()} attacks on sandboxes and verifiers")
        for kind, outcomes in kinds.items():
            terminalreporter.line(f"{kind}: {', '.join(outcomes)}")
