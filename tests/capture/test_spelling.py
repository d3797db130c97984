"""A reply that the template would write otherwise than it was sampled is told, with what of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agenttrain.capture.render import open_renderer
from agenttrain.protocols import Renderer, TellsSpelling
from agenttrain.records import Ids

Encode = Callable[[str], Ids]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"id": "A41", "n": 2}}\n</tool_call><|im_end|>'
SPACED = CALL.replace(": ", ":")
SWAPPED = CALL.replace('{"id": "A41", "n": 2}', '{"n": 2, "id": "A41"}')
THOUGHT = "<think>\nHm.\n</think>\n\n"
RESULT = [{"role": "tool", "content": "lamp", "tool_call_id": "call_1"}]
USER = [{"role": "user", "content": "And B7?"}]


def says(content: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}] if arguments else []
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def told(renderer: Renderer, ids: Ids, message: Any, new: Any) -> tuple[str, ...]:
    assert isinstance(renderer, TellsSpelling)
    return renderer.respelled(ids, message, new)


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (CALL, ()),
        (SPACED, ("arguments_respelled",)),
        (CALL.replace("A41", "\\u00e9"), ("arguments_respelled",)),
        (THOUGHT + CALL, ("thinking_dropped",)),
        (THOUGHT + SPACED, ("thinking_dropped", "arguments_respelled")),
        (f"I look.\n{CALL}", ()),
        (f"I look.\n\n{CALL}", ("text_respelled",)),
        (f" I look.\n{SPACED}", ("text_respelled", "arguments_respelled")),
    ],
)
def test_what_of_a_call_is_written_otherwise(
    renderer: Renderer, encode: Encode, sampled: str, expected: tuple[str, ...]
) -> None:
    """As the graph hands the call back: its text without the white space around it, its arguments as data."""
    message = says("I look." if "I look" in sampled else "", id="é" if "u00e9" in sampled else "A41", n=2)
    assert told(renderer, encode(sampled), message, RESULT) == expected


def test_keys_stay_in_their_order_as_data(renderer: Renderer, encode: Encode) -> None:
    """The order is kept by JSON, so the template writes the same; a graph that sorts them makes it another."""
    assert told(renderer, encode(SWAPPED), says("", n=2, id="A41"), RESULT) == ()
    assert told(renderer, encode(SWAPPED), says("", id="A41", n=2), RESULT) == ("arguments_respelled",)


@pytest.mark.parametrize(
    ("sampled", "content", "expected"),
    [
        ("A lamp.<|im_end|>", "A lamp.", ()),
        ("A lamp. <|im_end|>", "A lamp.", ("text_respelled",)),
        ("A lamp", "A lamp", ()),
        ("A lamp.<|endoftext|>", "A lamp.", ("tokens_respelled",)),
        (f"{THOUGHT}A lamp.<|im_end|>", "A lamp.", ("thinking_dropped",)),
        (f"{THOUGHT}A lamp. <|im_end|>", "A lamp.", ("thinking_dropped", "text_respelled")),
    ],
)
def test_what_of_a_text_is_written_otherwise(
    renderer: Renderer, encode: Encode, sampled: str, content: str, expected: tuple[str, ...]
) -> None:
    assert told(renderer, encode(sampled), says(content), USER) == expected


def test_another_split_of_the_same_text(renderer: Renderer, encode: Encode) -> None:
    """`order` is one id to the tokenizer, and the policy sampled its letters."""
    letters = tuple(id for letter in "order" for id in encode(letter))
    assert len(letters) > len(encode("order"))
    assert told(renderer, letters, says("order"), USER) == ("tokens_respelled",)


def encoded(folder: Path, text: str) -> Ids:
    return tuple(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def test_a_template_that_keeps_thinking_until_a_user_speaks(tmp_path: Path, make_folder: Any) -> None:
    """What follows the reply decides; here the graph hands the thinking back inside of the text."""
    keeps = Path(__file__).with_name("hermes.jinja").read_text()
    drops = keeps.replace(
        "'<|im_start|>assistant\\n' + message.content }}",
        "'<|im_start|>assistant\\n' + (message.content if messages[-1].role == 'tool' "
        "else message.content.split('</think>')[-1].strip()) }}",
    )
    assert drops != keeps
    opened = open_renderer(str(make_folder(tmp_path, template=drops)))
    message = says(THOUGHT.strip(), id="A41", n=2)
    ids = encoded(tmp_path, f"{THOUGHT.strip()}\n{CALL}")
    assert told(opened, ids, message, RESULT) == ()
    assert told(opened, ids, message, USER)[0] == "thinking_dropped"
    assert told(opened, ids, message, [*RESULT, *USER])[0] == "thinking_dropped"


def test_an_empty_thought_in_the_place_of_a_dropped_one(tmp_path: Path, make_folder: Any) -> None:
    """As Qwen3's template writes it: the text behind is held against what was sampled, and nothing else of it."""
    keeps = Path(__file__).with_name("hermes.jinja").read_text()
    empties = keeps.replace(
        "'<|im_start|>assistant\\n' + message.content }}",
        "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content }}",
    )
    assert empties != keeps
    opened = open_renderer(str(make_folder(tmp_path, template=empties)))
    assert told(opened, encoded(tmp_path, f"{THOUGHT}A lamp.<|im_end|>"), says("A lamp."), USER) == (
        "thinking_dropped",
    )


def test_a_call_id_that_the_model_itself_writes(tmp_path: Path, make_folder: Any) -> None:
    """It is the reply's own, and not one that a rollout gave."""
    keeps = Path(__file__).with_name("hermes.jinja").read_text()
    names = keeps.replace("""{{- '}\\n</tool_call>' }}""", """{{- ', "id": "' + call.id + '"}\\n</tool_call>' }}""")
    assert names != keeps
    opened = open_renderer(str(make_folder(tmp_path, template=names)))
    message = says("", id="A41", n=2)
    message["tool_calls"][0]["id"] = "x9"
    results = [{**RESULT[0], "tool_call_id": "x9"}]
    for id, expected in (("x9", ()), ("y9", ("arguments_respelled",))):
        sampled = CALL.replace("}}\n</tool_call>", f'}}, "id": "{id}"}}\n</tool_call>')
        assert told(opened, encoded(tmp_path, sampled), message, results) == expected


def test_a_template_that_fails_tells_nothing(tmp_path: Path, make_folder: Any) -> None:
    """It was admitted on the probe's conversations and raises on this reply: nothing is known."""
    answers = '{%- elif message.role == "assistant" %}'
    raises = answers + '{%- if "lamp?" in message.content %}{{ raise_exception("no") }}{% endif %}'
    template = Path(__file__).with_name("hermes.jinja").read_text().replace(answers, raises)
    opened = open_renderer(str(make_folder(tmp_path, template=template)))
    assert told(opened, encoded(tmp_path, "A lamp? <|im_end|>"), says("A lamp?"), USER) == ()
    assert told(opened, encoded(tmp_path, "A desk. <|im_end|>"), says("A desk."), USER) == ("text_respelled",)
