"""langchain-tests' standard unit suite on `chat_model()`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumpd, load
from langchain_tests.unit_tests import ChatModelUnitTests

from agenttrain.graph.chat_model import ChatPolicy

pytestmark = pytest.mark.filterwarnings("ignore:.*in beta")


class TestChatModel(ChatModelUnitTests):
    """All of it, on the class that `agenttrain.chat_model` makes."""

    @property
    def chat_model_class(self) -> type[ChatPolicy]:
        return ChatPolicy

    @property
    def supports_model_override(self) -> bool:
        """One policy serves; a call can't name another."""
        return False

    @pytest.mark.xfail(reason="langchain-core loads only the classes of its own list", strict=True)
    def test_serdes(self, model: Any, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


def test_it_is_loaded_again_where_its_class_is_allowed() -> None:
    """What the suite's own test asks, with the class named."""
    model = ChatPolicy(temperature=0.5, stop=["END"], default=None)
    loaded = load(dumpd(model), valid_namespaces=["agenttrain"], allowed_objects=[ChatPolicy])
    assert loaded == model
