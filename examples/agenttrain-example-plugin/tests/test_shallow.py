"""The engine keeps the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain_example_plugin.shallow import ShallowEngine

from agenttrain.errors import EngineError, ModelError
from agenttrain.testing import EngineContract, tiny_model


class TestShallow(EngineContract):
    """On a tiny model; its new weights are another embedding."""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[ShallowEngine]:
        engine = ShallowEngine(tiny_model(tmp_path / "model"))
        yield engine
        engine.close()

    @pytest.fixture
    def new_weights(self) -> Sequence[tuple[str, Any]]:
        torch.manual_seed(1)
        return [("model.embed_tokens.weight", torch.randn(320, 16)), ("model.norm.weight", torch.ones(16))]

    def test_only_the_last_id_is_read(self, engine: ShallowEngine) -> None:
        """Two prompts with one end have one answer."""
        first, second = (self._answer(engine, (a, 7), temperature=0.0, max_tokens=3) for a in (5, 200))
        assert first == second

    def test_an_embedding_of_another_shape_is_refused(self, engine: ShallowEngine) -> None:
        """And the old one goes on answering."""
        with pytest.raises(EngineError, match="another shape"):
            engine.update_weights([("model.embed_tokens.weight", torch.zeros(2, 2))], 1)
        assert engine.weight_version == 0


def test_a_folder_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """By name, with what to do."""
    folder = tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="take --engine local"):
        ShallowEngine(folder)
