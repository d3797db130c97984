"""The row fixture of the matrix, and its results: one row a test, named by the marker
`row(section, name, outcome="trains", note="")`.

A row's outcome is "trains" (its calls are recorded and trained as they should be), "refused" (it ends with an error
that names the fix) or "not seen" (agenttrain can't see the call, and an alarm tells). With AGENTTRAIN_MATRIX=FILE the
session writes its rows there; `scripts/matrix.py` makes the tables from that.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from matrix.harness import Roll, Rolled, roll_graph
from matrix.oldest import IS_OLDEST, LACKS
from matrix.results import Row, write

from agenttrain.testing import tiny_model

ROLLED = pytest.StashKey[list[Rolled]]()
ROWS = pytest.StashKey[dict[str, Row]]()
COLLECTED = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose tokenizer and template are used."""
    return tiny_model(tmp_path_factory.mktemp("matrix") / "model")


@pytest.fixture
def roll(model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Roll:
    """Rolls a graph out by a script, see `harness.roll_graph`; each time into a folder of its own."""
    rolled: list[Rolled] = request.node.stash.setdefault(ROLLED, [])

    @functools.wraps(roll_graph)
    def roll_and_note(*args: Any, **kwargs: Any) -> Rolled:
        folder = tmp_path / f"rolled-{len(rolled)}"
        rolled.append(roll_graph(*args, model=model_folder, folder=folder, **kwargs))
        return rolled[-1]

    return roll_and_note


@pytest.fixture(scope="session")
def chat() -> Callable[..., ChatOpenAI]:
    """Makes the chat model of a user who has no server: any call that reaches it fails."""

    def make(model: str = "gpt-4o", **settings: Any) -> ChatOpenAI:
        return ChatOpenAI(**{"model": model, "api_key": "unused", "base_url": "http://127.0.0.1:9/v1"} | settings)

    return make


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = {}
    config.stash[COLLECTED] = set()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every row there is, before any is left out by -k or -m."""
    if (marker := item.get_closest_marker("row")) is not None:
        item.config.stash[COLLECTED].add(item.nodeid)
        Row.named(marker.args, marker.kwargs)


def is_row(item: pytest.Item) -> bool:
    return item.get_closest_marker("row") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the oldest column lacks is left out there; what holds the rows against docs/matrix comes after them."""
    for item in items if IS_OLDEST else ():
        if (why := LACKS.get(item.name) or LACKS.get(getattr(item, "originalname", ""))) and is_row(item):
            item.add_marker(pytest.mark.skip(reason=why))
    items.sort(key=lambda item: item.path.name == "test_documented.py" and item.path.parent == Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    marker = item.get_closest_marker("row")
    if marker is not None and (report.when == "call" or report.outcome != "passed"):
        row = Row.named(marker.args, marker.kwargs)
        if report.skipped:
            row = row.left_out(str(report.longrepr[2]).removeprefix("Skipped: "))
        elif report.failed:
            row = row.failed()
        rolled = item.stash.get(ROLLED, [])
        turns = Counter(turn.role for each in rolled for turn in each.turns)
        item.config.stash[ROWS][item.nodeid] = row.with_turns(turns)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if target := os.environ.get("AGENTTRAIN_MATRIX"):
        write(Path(target), session.config.stash[ROWS])


@pytest.fixture
def rows_run(request: pytest.FixtureRequest) -> dict[str, Row]:
    """The rows that ran in this session so far, by test."""
    return request.config.stash[ROWS]


@pytest.fixture
def rows_collected(request: pytest.FixtureRequest) -> set[str]:
    """The tests of this session that are rows, run or not."""
    return request.config.stash[COLLECTED]
