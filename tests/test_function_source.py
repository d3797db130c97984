"""function_source.py: a function becomes text that changes with what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agenttrain.function_source import source_of
from agenttrain.verifiers import numeric_answer


def made(limit: Any) -> Callable[[], Any]:
    def verifier() -> Any:
        return limit

    return verifier


def double(n: int, factor: int = 2) -> int:
    return n * factor


def test_what_a_factory_was_given_tells_its_functions_apart() -> None:
    """Their source is the same."""
    assert source_of(made(1)) == ("    def verifier() -> Any:\n        return limit\n", "limit=1")
    assert source_of(made({"a": [1, None]}))[1] == "limit={'a': [1, None]}"
    assert source_of(numeric_answer(tolerance=0.5)) != source_of(numeric_answer(tolerance=0.25))
    assert source_of(numeric_answer(tolerance=0.5)) == source_of(numeric_answer(tolerance=0.5))


def test_a_function_within_goes_by_its_source() -> None:
    """Never by its address."""
    assert source_of(made(double))[1].startswith("limit=def double(n: int, factor: int = 2) -> int:")


def test_a_partial_goes_by_its_function_and_what_it_holds() -> None:
    assert source_of(functools.partial(double, factor=3))[1:] == ("factor=3",)


def test_what_has_no_source_goes_by_its_type() -> None:
    assert source_of(object()) == ("builtins.object",)
    assert source_of(made(object()))[1] == "limit=builtins.object"


def test_functions_that_hold_each_other_come_to_an_end() -> None:
    def one() -> Any:
        return other

    def other() -> Any:
        return one

    assert len(source_of(one)) == 2
