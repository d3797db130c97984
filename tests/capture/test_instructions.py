"""What a call asks of its answer is said in the prompt, in one place, and only when it asks for something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agenttrain.capture.instructions import instruction_of, missed, told
from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Parsed, Renderer
from agenttrain.records import ModelCall, ParsedCall

ASK = {"role": "user", "content": "Where is A41?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "Place", "schema": SCHEMA}}
NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(*messages: Any, **asked: Any) -> ModelCall:
    return ModelCall(messages=messages or (ASK,), **asked)


def said(text: str = "", *names: str) -> Parsed:
    calls = tuple(ParsedCall(id="1", name=name, arguments={}) for name in names)
    return Parsed(text=text, reasoning=None, tool_calls=calls, invalid_tool_calls=())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ""),
        ({"tool_choice": "auto"}, ""),
        ({"tool_choice": "none"}, ""),
        ({"tool_choice": "required"}, "Call one of the tools."),
        ({"tool_choice": {"type": "function", "function": {"name": "look_up"}}}, "Call the tool look_up."),
        ({"response_format": {"type": "json_object"}}, "Answer with one JSON object and nothing else."),
        (
            {"response_format": {"type": "json_object"}, "tools": (TOOL,)},
            "Unless you call a tool, answer with one JSON object and nothing else.",
        ),
        (
            {"response_format": JSON_SCHEMA},
            "Answer with one JSON object of this schema and nothing else:\n"
            '{"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}',
        ),
    ],
)
def test_the_sentence_for_what_is_asked(asked: dict[str, Any], expected: str) -> None:
    """None for a call that asks for nothing, so that its prompt stays as it was."""
    assert instruction_of(call(**asked)) == expected


def test_it_ends_the_first_system_message(renderer: Renderer) -> None:
    """And is said once, however long the conversation grows."""
    messages = told(
        renderer, call(SYSTEM, ASK, {"role": "assistant", "content": "There."}, ASK, tool_choice="required")
    )
    assert messages[0] == {"role": "system", "content": "Be brief.\n\nCall one of the tools."}
    assert messages[1:] == (ASK, {"role": "assistant", "content": "There."}, ASK)


def test_it_is_the_system_message_where_there_is_none(renderer: Renderer) -> None:
    """The template of the tests' model knows the role."""
    asked = call(ASK, tool_choice="required")
    assert told(renderer, asked) == ({"role": "system", "content": "Call one of the tools."}, ASK)
    assert asked.messages == (ASK,)


def test_it_stands_before_the_question_where_the_template_refuses_a_system_message(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """As for models that know users and assistants only."""
    renderer = open_renderer(str(make_folder(tmp_path, template=NO_SYSTEM)))
    messages = told(renderer, call(ASK, response_format={"type": "json_object"}))
    assert messages == ({"role": "user", "content": "Answer with one JSON object and nothing else.\n\nWhere is A41?"},)


def test_a_call_that_asks_for_nothing_keeps_its_messages(renderer: Renderer) -> None:
    """The very same object."""
    asked = call(SYSTEM, ASK)
    assert told(renderer, asked) is asked.messages


@pytest.mark.parametrize(
    ("asked", "answer", "expected"),
    [
        ({}, said("No."), ""),
        ({"tool_choice": "required"}, said("", "look_up"), ""),
        ({"tool_choice": "required"}, said("No."), "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, said("", "look_up"), "tool_choice"),
        ({"response_format": {"type": "json_object"}}, said('{"a": 1}'), ""),
        ({"response_format": {"type": "json_object"}}, said("[1]"), "response_format"),
        ({"response_format": {"type": "json_object"}}, said("", "look_up"), ""),
        ({"response_format": JSON_SCHEMA}, said('{"place": "here"}'), ""),
        ({"response_format": JSON_SCHEMA}, said('{"place": 3}'), "response_format"),
        ({"response_format": JSON_SCHEMA}, said("here"), "response_format"),
        ({"response_format": JSON_SCHEMA}, said('{"place": ' + "[" * 2000), "response_format"),
    ],
)
def test_what_an_answer_lacks(asked: dict[str, Any], answer: Parsed, expected: str) -> None:
    """A call of a tool is an answer to whatever form was asked for."""
    assert missed(call(**asked), answer) == expected
