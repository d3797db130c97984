"""Calls that a tool will refuse are counted; calls of which nothing is known are not."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.capture.tool_calls import n_misfits
from agenttrain.records import ParsedCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


def call(name: str = "add", **arguments: Any) -> ParsedCall:
    return ParsedCall(id="call_1", name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("made", "misfits"),
    [
        (call(a=1), 0),
        (call(a=1, b=2), 0),
        (call(b=2), 1),
        (call(a="1"), 1),
        (call("fly"), 1),
    ],
)
def test_a_call_fits_its_tools_schema_or_counts(made: ParsedCall, misfits: int) -> None:
    assert n_misfits([made], [ADD]) == misfits


def test_each_call_of_a_reply_counts_by_itself() -> None:
    assert n_misfits([call(a=1), call(), call("fly")], [ADD]) == 2


def test_without_tools_nothing_is_known() -> None:
    assert n_misfits([call("fly")], []) == 0


def test_a_tool_without_parameters_takes_anything() -> None:
    assert n_misfits([call("go", to=3)], [{"type": "function", "function": {"name": "go"}}]) == 0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/$defs/Missing"}}},
        {"properties": {"a": {"type": "string", "pattern": "("}}},
    ],
)
def test_a_schema_that_is_wrong_itself_refuses_nothing(schema: dict[str, Any]) -> None:
    """Also one that shows it only when it is applied."""
    wrong = {"type": "function", "function": {"name": "add", "parameters": schema}}
    assert n_misfits([call(a="x")], [wrong]) == 0
