"""How langchain-tests' suites run here: coroutine tests by asyncio.run, and a record of what was skipped and why."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agenttrain

POLICY = Path(__file__).parent / "policy"
"""Made by learn.py: it has learned what the integration suite asks."""
OUTCOMES = pytest.StashKey[dict[tuple[str, str], str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test, so that no plugin with an event loop of its own is needed."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep (class, test) -> why it was skipped, "" when it ran."""
    report = yield
    if isinstance(item, pytest.Function) and item.cls is not None and (report.when == "call" or report.skipped):
        item.config.stash[OUTCOMES][item.cls.__name__, item.originalname] = _reason(report) if report.skipped else ""
    return report


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped, or was expected to fail."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(getattr(report, "wasxfail", "")).removeprefix("reason: ")


@pytest.fixture
def benchmark(benchmark: Any) -> Any:
    """Runs what is to be timed once: speed is measured elsewhere."""
    benchmark.disabled = True
    return benchmark


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], str]:
    """(class, test) of the suites that ran before, with why it was skipped; "" when it ran."""
    return request.config.stash[OUTCOMES]


@pytest.fixture(scope="class")
def policy_serves() -> Iterator[None]:
    """The policy that has learned the suite answers, on the real engine in its own process, until the class ends."""
    with agenttrain.use(POLICY):
        yield
