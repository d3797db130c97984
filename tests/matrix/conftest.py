"""The row fixture of the matrix, and its results: one row a test, named by the marker `row(section, name)`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from matrix.harness import Roll, roll_graph

from agenttrain.testing import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose tokenizer and template are used."""
    return tiny_model(tmp_path_factory.mktemp("matrix") / "model")


@pytest.fixture
def roll(model_folder: Path, tmp_path: Path) -> Roll:
    """Rolls a graph out by a script, see `harness.roll_graph`."""
    return functools.partial(roll_graph, model=model_folder, folder=tmp_path)


@pytest.fixture(scope="session")
def chat() -> Any:
    """Makes the chat model of a user who has no server: any call that reaches it fails."""

    def make(model: str = "gpt-4o", **settings: Any) -> ChatOpenAI:
        return ChatOpenAI(**{"model": model, "api_key": "unused", "base_url": "http://127.0.0.1:9/v1"} | settings)

    return make
