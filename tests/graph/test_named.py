"""What a user's function is called with, by what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agenttrain.errors import GraphError
from agenttrain.graph.named import call_with, check_call

VALUES = {"task": 1, "interrupt": 2, "state": 3}
POSITIONAL = ("task", "interrupt")


def everything(*args: Any, **named: Any) -> tuple[Any, ...]:
    return args, named


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda: "nothing", "nothing"),
        (lambda interrupt: interrupt, 2),
        (lambda state, task: (state, task), (3, 1)),
        (lambda job, question: (job, question), (1, 2)),
        (lambda task, other=9: (task, other), (1, 9)),
        (lambda *args: args, (1, 2)),
        (lambda **named: named, VALUES),
        (lambda task, **named: (task, named), (1, {"interrupt": 2, "state": 3})),
        (everything, ((1, 2), {})),
    ],
)
def test_a_function_gets_what_it_asks_for(function: Callable[..., Any], given: Any) -> None:
    assert call_with(function, VALUES, positional=POSITIONAL, what="on_interrupt=human")() == given


def test_an_argument_that_nothing_fills_is_named() -> None:
    with pytest.raises(GraphError, match="on_interrupt=human asks for 'value', which nothing fills"):
        check_call(lambda value: value, tuple(VALUES), positional=POSITIONAL, what="on_interrupt=human")
