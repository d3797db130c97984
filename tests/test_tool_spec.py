"""Declarations that can't be kept are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain import External, SandboxSpec, trainable
from agenttrain.errors import ConfigError
from agenttrain.trainable import trainable_of


def fake(order: str) -> str:
    return order


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ({"x": "readonly"}, r"says 'readonly'\. Accepted: .* Did you mean 'read_only'\?$"),
        ({"x": None}, r"says None\. Accepted: 'read_only', 'sandboxed', or External"),
        ({"x": External()}, r"is external, and nothing says what happens in training\. Write External\(stand_in="),
        ({"x": External(stand_in=fake, permitted=True)}, r"has a stand-in and permitted=True\. Keep one"),
        ({"x": External(stand_in="fake")}, r"has stand_in='fake'\. Name a function"),
        ({"x": External(permitted=True, key_argument="")}, r"has key_argument=''\. Name one argument"),
        ({"x": "sandboxed"}, r"there is no sandbox\. Add sandbox=SandboxSpec"),
        ({"": "read_only"}, r"names no tool\. Write the name"),
        (["x"], r"got tools=\['x'\]\. Write tools="),
    ],
)
def test_refused(tools: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        trainable(object(), tools=tools)


def test_noted() -> None:
    tools = {"a": "read_only", "b": "sandboxed", "c": External(stand_in=fake), "d": External(permitted=True)}
    target = trainable(type("Graph", (), {})(), tools=tools, sandbox=SandboxSpec())
    noted = trainable_of(target)
    assert noted is not None
    assert noted.tools == tools
