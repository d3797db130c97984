"""Our own capture keeps every scenario, on the tiny model and on the order desk's policy; engines sample in some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttrain.local.engine import LocalEngine
from agenttrain.protocols import Engine
from agenttrain.testing import ScenarioContract, tiny_model


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return tiny_model(tmp_path_factory.mktemp("scenarios") / "model", max_length=4096)


@pytest.fixture(scope="module")
def tiny_engine(tiny_folder: Path) -> Iterator[Engine]:
    """What samples from it."""
    engine = LocalEngine(tiny_folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def desk_engine(policy_folder: Path) -> Iterator[Engine]:
    """What samples from the order desk's policy."""
    engine = LocalEngine(policy_folder)
    yield engine
    engine.close()


class TestTinyModel(ScenarioContract):
    """Its template, with what was sampled kept."""

    @pytest.fixture
    def model_folder(self, tiny_folder: Path) -> Path:
        return tiny_folder

    @pytest.fixture
    def engine(self, tiny_engine: Engine) -> Engine:
        return tiny_engine


class TestTinyModelWithTemplateHistory(ScenarioContract):
    """Its template, with thinking dropped as a template would."""

    history = "template"

    @pytest.fixture
    def model_folder(self, tiny_folder: Path) -> Path:
        return tiny_folder


class TestOrderDesk(ScenarioContract):
    """The example's policy, which was taught to call tools."""

    @pytest.fixture
    def model_folder(self, policy_folder: Path) -> Path:
        return policy_folder

    @pytest.fixture
    def engine(self, desk_engine: Engine) -> Engine:
        return desk_engine
