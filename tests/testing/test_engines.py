"""Our own engines keep the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agenttrain.config import Config
from agenttrain.local.engine import LocalEngine
from agenttrain.local.process import ProcessEngine
from agenttrain.protocols import Engine, EngineContext
from agenttrain.records import Ids
from agenttrain.testing import EngineContract, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return tiny_model(tmp_path_factory.mktemp("engines") / "model")


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Sequence[tuple[str, Any]]:
    """Of the same architecture, with another seed."""
    from agenttrain.local.policy import read_weights

    return list(read_weights(tiny_model(tmp_path_factory.mktemp("engines") / "other", seed=1)).items())


class TestLocalEngine(EngineContract):
    """In this process."""

    @pytest.fixture
    def engine(self, model: Path) -> Iterator[Engine]:
        engine = LocalEngine(model)
        yield engine
        engine.close()

    @pytest.fixture
    def new_weights(self, other_weights: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
        return other_weights

    def test_the_distribution_is_the_models(self, engine: LocalEngine, prompt: Ids) -> None:
        """What the contract takes from draws alone holds against the model's own logits too."""
        with torch.no_grad():
            expected = engine.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        for id, (_, logprob) in self._drawn(engine, prompt, 1.0).items():
            assert logprob == pytest.approx(float(expected[id]), abs=1e-4)


@pytest.mark.slow
class TestProcessEngine(EngineContract):
    """In a process of its own."""

    n_draws = 300

    @pytest.fixture
    def engine(self, model: Path) -> Iterator[Engine]:
        engine = ProcessEngine(EngineContext(config=Config(), model=str(model)))
        yield engine
        engine.close()

    @pytest.fixture
    def new_weights(self, other_weights: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
        return other_weights
