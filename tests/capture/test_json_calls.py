"""A whole reply that is one JSON object with a name and arguments is a call, where the template writes calls so."""

from __future__ import annotations

import pytest

from agenttrain.capture.json_calls import with_json_call, writes_json_calls
from agenttrain.protocols import Parsed


def read(text: str) -> Parsed:
    parsed = Parsed(text=text, reasoning=None, tool_calls=(), invalid_tool_calls=())
    return with_json_call(parsed, id="call_1")


@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_a_whole_object_is_a_call(key: str) -> None:
    parsed = read(f' {{"name": "look_up", "{key}": {{"id": "A41"}}}}\n')
    assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [
        ("call_1", "look_up", {"id": "A41"})
    ]
    assert parsed.text == ""


@pytest.mark.parametrize(
    "text",
    [
        'I call {"name": "look_up", "parameters": {}}',
        '{"name": "look_up", "parameters": {}} Done.',
        '{"name": "Ann", "age": 3}',
        '{"name": "look_up", "parameters": [1]}',
        '{"parameters": {}}',
        '{"name": 3, "parameters": {}}',
        '[{"name": "look_up", "parameters": {}}]',
        "{not json}",
        "",
    ],
)
def test_anything_else_is_text(text: str) -> None:
    parsed = read(text)
    assert (parsed.text, parsed.tool_calls, parsed.invalid_tool_calls) == (text, (), ())


@pytest.mark.parametrize("value", ['"id": }', '"id": ' + "[" * 2000 + "}", '"id": ' + "9" * 5000 + "}"])
def test_what_begins_as_a_call_and_cant_be_read_is_invalid(value: str) -> None:
    text = '{"name": "look_up", "parameters": {' + value + "}"
    (call,) = read(text).invalid_tool_calls
    assert (call.name, call.arguments, call.error[:24]) == (None, text, "The tool call is no JSON")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('{"name": "look_up", "parameters": {}}', True),
        ('<tool_call>{"name": "look_up", "arguments": {}}', False),
        ("look_up()", False),
    ],
)
def test_a_template_is_known_by_how_it_writes_a_call(call: str, expected: bool) -> None:
    def write(messages: object, opens: bool) -> str:
        return "Q: a\nA: " + ("" if opens else f"{call}\nT: b\n")

    assert writes_json_calls(write) is expected


def test_a_template_that_refuses_calls_writes_none() -> None:
    def write(messages: object, opens: bool) -> str:
        raise ValueError("no tools")

    assert writes_json_calls(write) is False
