"""What all tests share: veRL on the CPU, plans made from tables, and which warnings of upstreams are no errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agenttrain.config import resolve
from agenttrain.testing import tiny_model
from agenttrain.trainer.algorithms import with_algorithm

from agenttrain_verl.cpu import environment_variables
from agenttrain_verl.plan import Plan, plan_of

os.environ.update(environment_variables())  # before any test imports verl
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # whose harness some tests run

OF_UPSTREAMS = (
    r"ignore:.* engine is not available:UserWarning:verl\.workers\.engine",
    # veRL reads a critic's values and changes none of them in place.
    r"ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning",
    r"ignore:Ray state API is no longer experimental:DeprecationWarning",
    r"ignore:set sequence parallel to false as TP size is 1:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in OF_UPSTREAMS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of few parameters."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def plan_with(model: Path) -> Callable[..., Plan]:
    """A plan on the CPU from tables as in agenttrain.toml: plan_with(trainer={"steps": 3})."""

    def make(*, n_tasks: int = 100, model: Path = model, **tables: Any) -> Plan:
        tables["trainer"] = {"name": "verl", **tables.get("trainer", {})}
        tables["verl"] = {"device": "cpu", **tables.get("verl", {})}
        config = with_algorithm(resolve(("the test", tables), plugin_tables=["verl"]))
        return plan_of(config, model, n_tasks=n_tasks)

    return make
