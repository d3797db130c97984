"""Our renderer of chat templates keeps the contract of renderers, on a tiny model and on the order desk's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Renderer
from agenttrain.testing import RendererContract, tiny_model


class TestTinyModel(RendererContract):
    """The template that `tiny_model` writes."""

    @pytest.fixture
    def renderer(self, tmp_path: Path) -> Renderer:
        return open_renderer(str(tiny_model(tmp_path)), family="default")


class TestOrderDesk(RendererContract):
    """The template of the example's policy."""

    @pytest.fixture
    def renderer(self, policy_folder: Path) -> Renderer:
        return open_renderer(str(policy_folder), family="default")
