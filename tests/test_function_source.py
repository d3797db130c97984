"""function_source.py: a function becomes text that changes with what it does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from agenttrain.function_source import functions_in, source_of
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.verifiers import (
    command_exits,
    hidden_cases,
    hidden_tests,
    json_answer,
    numeric_answer,
    tool_trajectory,
    turns_used,
)
from agenttrain.verifiers.suites import Suite

SUITE = Suite(
    include=("*.py",),
    expected=None,
    modules=(),
    roots=(".",),
    options=(),
    strict=True,
    seconds=None,
    call_seconds=5.0,
    limits=None,
)


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


TEST = {"test_a.py": "def test_a(): pass"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (json_answer(schema={"type": "object"}), json_answer(schema={"type": "array"})),
        (numeric_answer(pattern="a(.)"), numeric_answer(pattern="b(.)")),
        (numeric_answer(units=("km",)), numeric_answer(units=("m",))),
        (tool_trajectory(mode="strict"), tool_trajectory(mode="subset")),
        (hidden_tests(files=TEST), hidden_tests(files=TEST, strict=False)),
        (hidden_tests(files=TEST), hidden_tests(files=TEST, include=["a.py"])),
        (hidden_tests(files=TEST), hidden_tests(files=TEST, apart=False)),
        (hidden_tests(folder="a"), hidden_tests(folder="b")),
        (hidden_cases(), hidden_cases(tolerance=0.1)),
        (command_exits(["a"]), command_exits(["a"], limits=SandboxLimits(seconds=1.0))),
        (turns_used(limit=1), turns_used(limit=2)),
    ],
)
def test_every_setting_of_a_built_in_verifier_tells(one: Any, other: Any) -> None:
    assert source_of(one) != source_of(other)


def test_what_a_verifier_remembers_does_not_tell() -> None:
    """Nor does a set's order."""
    suite = dataclasses.replace(SUITE, _ids={"hash": ("a",)})
    assert source_of(made(suite)) == source_of(made(SUITE))
    assert source_of(made({"b", "a"}))[1] == "limit={'a', 'b'}"


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


def of_the_module(n: int) -> int:
    return double(n)


def test_a_function_is_made_with_what_it_holds_and_names() -> None:
    """By a partial, a closure or its module, also within those; a loop comes to an end."""
    held = made(functools.partial(of_the_module, 1))
    assert list(functions_in(held)) == [held, of_the_module, double]
    assert list(functions_in(double)) == [double]
    assert list(functions_in(len)) == []
