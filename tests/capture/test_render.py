"""Real tokenizers and templates: ids are appended and never made again, calls read by ids, wrong folders refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from agenttrain.capture.model_folder import load_tokenizer
from agenttrain.capture.render import FamilyRenderer, open_renderer
from agenttrain.errors import ModelError
from agenttrain.protocols import Renderer
from agenttrain.records import Ids, InvalidCall, ParsedCall

Encode = Callable[[str], Ids]
MakeFolder = Callable[..., Path]
HERMES = (Path(__file__).parent / "hermes.jinja").read_text()
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
ASKS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is A41?"}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"id": "A41"}}\n</tool_call>'
RESULT = {"role": "tool", "content": '{"item": "lamp"}', "tool_call_id": "call_1", "name": "look_up"}
TOOLS = [LOOK_UP]


def called(*calls: dict[str, Any]) -> dict[str, Any]:
    functions = [{"name": "look_up", "arguments": arguments} for arguments in calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{i}", "type": "function", "function": each} for i, each in enumerate(functions)],
    }


@pytest.fixture(params=["template", "qwen3"])
def each(request: pytest.FixtureRequest, renderer: Renderer, qwen_folder: Path) -> Renderer:
    """Our suffix bridge, and a hand-written renderer of the library."""
    return renderer if request.param == "template" else open_renderer(str(qwen_folder))


def test_a_prompt_has_the_ids_of_the_folders_own_template(each: Renderer, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    expected = tokenizer.apply_chat_template(ASKS, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert each.render(ASKS, TOOLS) == tuple(expected)


def test_appending_a_tools_result_gives_the_ids_of_rendering_anew(each: Renderer, encode: Encode) -> None:
    """The newline after <|im_end|> is never sampled: it comes with the new messages, once."""
    prompt, sampled = each.render(ASKS, TOOLS), encode(f"{CALL}<|im_end|>")
    extended = each.extend(prompt, sampled, [RESULT], TOOLS)
    assert extended == each.render([*ASKS, called({"id": "A41"}), RESULT], TOOLS)
    assert each.decode(extended).count("</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>") == 1


def test_several_results_of_one_reply_are_appended_together(each: Renderer, encode: Encode) -> None:
    prompt, sampled = each.render(ASKS, TOOLS), encode(f"{CALL}\n{CALL}<|im_end|>")
    results = [RESULT, {**RESULT, "tool_call_id": "call_2", "content": "desk"}]
    whole = each.render([*ASKS, called({"id": "A41"}, {"id": "A41"}), *results], TOOLS)
    assert each.extend(prompt, sampled, results, TOOLS) == whole


def test_what_was_sampled_stands_unchanged_however_it_was_spelt(each: Renderer, encode: Encode) -> None:
    """A template would write the arguments with its own spaces, and a tokenizer would merge the pieces."""
    sampled = (*encode('<tool_call>\n{"name":"look'), *encode('_up","arguments":{"id":"A'), *encode('41"}}'))
    sampled += encode("</tool_call><|im_end|>")
    prompt = each.render(ASKS, TOOLS)
    extended = each.extend(prompt, sampled, [RESULT], TOOLS)
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == prompt + sampled


def test_a_turn_cut_at_its_length_is_closed_by_context(each: Renderer, encode: Encode) -> None:
    prompt, cut = each.render(ASKS, TOOLS), encode("The lamp is")
    extended = each.extend(prompt, cut, [{"role": "user", "content": "Go on."}], TOOLS)
    assert extended is not None
    rest = extended[len(prompt) + len(cut) :]
    assert each.decode(rest) == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_that_ends_with_the_assistant_cant_be_extended(each: Renderer, encode: Encode) -> None:
    prompt = each.render(ASKS, TOOLS)
    says = {"role": "assistant", "content": "no"}
    assert each.extend(prompt, encode("x<|im_end|>"), [says, RESULT], TOOLS) is None
    assert each.extend(prompt, encode("x<|im_end|>"), [], TOOLS) is None


# Reading


def read(renderer: Renderer, ids: Ids) -> tuple[str, list[tuple[str, Any]], list[str]]:
    parsed = renderer.parse(ids, TOOLS)
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    return parsed.text.strip(), calls, [call.error for call in parsed.invalid_tool_calls]


def test_text_and_calls_are_read(each: Renderer, encode: Encode) -> None:
    ids = encode(f"I look.\n{CALL}\n{CALL}<|im_end|>")
    assert read(each, ids) == ("I look.", [("look_up", {"id": "A41"})] * 2, [])


def test_calls_have_ids_of_their_own(each: Renderer, encode: Encode) -> None:
    one, two = each.parse(encode(f"{CALL}\n{CALL}<|im_end|>"), TOOLS).tool_calls
    assert one.id != two.id
    assert one.id.startswith("call_")
    assert len(one.id) == len("call_") + 8


def test_a_call_that_is_spelt_in_ordinary_ids_is_text(each: Renderer, encode: Encode) -> None:
    """A user may write <tool_call>, and a policy may copy it: only the special ids mark a call."""
    spelt = (
        *encode("<tool"),
        *encode("_call>"),
        *encode('{"name": "look_up", "arguments": {}}</tool'),
        *encode("_call>"),
    )
    text, calls, errors = read(each, (*spelt, *encode("<|im_end|>")))
    assert text == '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    assert (calls, errors) == ([], [])


def test_an_unknown_tool_and_arguments_that_do_not_fit_are_read(each: Renderer, encode: Encode) -> None:
    """The graph answers them with an error message."""
    ids = encode('<tool_call>\n{"name": "fly", "arguments": {"to": 3}}\n</tool_call><|im_end|>')
    assert read(each, ids) == ("", [("fly", {"to": 3})], [])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "look_up", "arguments": {"id": }}', "The tool call is no JSON: Expecting value"),
        ('{"arguments": {"id": "A41"}}', "The tool call names no tool."),
        ('{"name": "look_up", "arguments": [1]}', "The tool call is a dict without an object of arguments."),
    ],
)
def test_a_call_that_cant_be_read_says_why(each: Renderer, encode: Encode, body: str, error: str) -> None:
    parsed = each.parse(encode(f"<tool_call>\n{body}\n</tool_call><|im_end|>"), TOOLS)
    assert parsed.tool_calls == ()
    (invalid,) = parsed.invalid_tool_calls
    assert invalid.error.startswith(error)
    assert invalid.arguments == body


@pytest.mark.parametrize("value", ["[" * 2000, "[" * 2000 + "]" * 2000 + "}}", "9" * 5000 + "}}"])
def test_a_call_that_python_refuses_to_read_is_invalid(each: Renderer, encode: Encode, value: str) -> None:
    """Any number of brackets and digits may be sampled: the policy's own failure, and no error of the environment."""
    body = '{"name": "look_up", "arguments": {"id": ' + value
    parsed = each.parse(encode(f"<tool_call>\n{body}\n</tool_call><|im_end|>"), TOOLS)
    (call,) = parsed.invalid_tool_calls
    assert (parsed.text, parsed.tool_calls, call.name) == ("", (), None)
    assert call.error.startswith("The tool call can't be read: ")
    assert value in call.arguments


def test_good_and_bad_calls_of_one_reply_are_kept_apart(each: Renderer, encode: Encode) -> None:
    parsed = each.parse(encode(f"{CALL}\n<tool_call>\n{{\n</tool_call><|im_end|>"), TOOLS)
    assert [type(call) for call in (*parsed.tool_calls, *parsed.invalid_tool_calls)] == [ParsedCall, InvalidCall]


def test_a_reply_cut_inside_a_call_is_cut_and_not_malformed(each: Renderer, encode: Encode) -> None:
    assert read(each, encode('I look.\n<tool_call>\n{"name": "look_up", "argu')) == ("I look.", [], [])


def test_a_call_that_was_ended_and_not_closed_is_malformed(each: Renderer, encode: Encode) -> None:
    ids = encode('<tool_call>\n{"name": "look_up"<|im_end|>')
    assert read(each, ids) == ("", [], ["The tool call has no end."])


def test_thinking_is_read_apart(each: Renderer, encode: Encode) -> None:
    parsed = each.parse(encode("<think>\nHm.\n</think>\n\nA lamp.<|im_end|>"), TOOLS)
    assert (parsed.reasoning or "").strip() == "Hm."
    assert parsed.text.strip() == "A lamp."


def test_a_reply_cut_inside_thinking_holds_no_text(each: Renderer, encode: Encode) -> None:
    parsed = each.parse(encode(f"<think>\nHm. {CALL[:11]}"), TOOLS)
    assert (parsed.text.strip(), parsed.invalid_tool_calls) == ("", ())


# Choosing


def test_a_folder_without_a_known_type_is_rendered_by_its_own_template(folder: Path) -> None:
    opened = open_renderer(str(folder))
    assert (opened.family, opened.family_guessed) == ("default", True)


def test_a_guess_is_told_and_a_name_is_no_guess(qwen_folder: Path) -> None:
    guessed, named = open_renderer(str(qwen_folder)), open_renderer(str(qwen_folder), family="qwen3")
    assert (guessed.family, guessed.family_guessed) == ("qwen3", True)
    assert (named.family, named.family_guessed) == ("qwen3", False)
    assert guessed.identity == named.identity


def test_a_guess_that_makes_other_ids_than_the_folders_template_is_not_taken(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    """The order desk's policy is a Qwen3 model with a short template of its own."""
    desk = Path(__file__).parents[2] / "examples/order-desk/chat_template.jinja"
    opened = open_renderer(str(make_folder(tmp_path, template=desk.read_text(), config={"model_type": "qwen3"})))
    assert (opened.family, opened.family_guessed) == ("default", True)
    prompt = opened.render(ASKS, TOOLS)
    assert "look_up(id): Find an order." in opened.decode(prompt)


def test_the_identity_is_family_tokenizer_and_template(folder: Path, tmp_path: Path, make_folder: MakeFolder) -> None:
    family, tokenizer, template = open_renderer(str(folder)).identity.split(":")
    other = open_renderer(str(make_folder(tmp_path, template=HERMES + "{# other #}"))).identity.split(":")
    assert (family, len(tokenizer), len(template)) == ("default", 16, 16)
    assert other[2] != template


def test_stop_ids_are_the_tokenizers_and_those_of_the_generation_config(renderer: Renderer) -> None:
    assert [renderer.decode([id]) for id in renderer.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_template_history_begins_anew_when_thinking_would_be_dropped(folder: Path, encode: Encode) -> None:
    opened = open_renderer(str(folder), history="template")
    prompt, thought = opened.render(ASKS, TOOLS), encode("<think>\nHm.\n</think>\n\nA lamp.<|im_end|>")
    asks = [{"role": "user", "content": "And B7?"}]
    assert opened.extend(prompt, thought, asks, TOOLS) is None
    assert opened.extend(prompt, thought, [RESULT], TOOLS) is not None
    assert open_renderer(str(folder)).extend(prompt, thought, asks, TOOLS) is not None


def test_a_family_that_drops_thinking_is_admitted_by_what_its_bridge_adds(
    tmp_path: Path, encode: Encode, make_folder: MakeFolder
) -> None:
    """What was sampled, thinking too, is never rendered anew."""
    opened = open_renderer(str(make_folder(tmp_path, template=HERMES + "{# <think> #}")), family="prime-qwen3")
    prompt, sampled = opened.render(ASKS, TOOLS), encode("<think>\nHm.\n</think>\n\nA lamp.<|im_end|>")
    extended = opened.extend(prompt, sampled, [RESULT], TOOLS)
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == prompt + sampled


# Refusing


def refused(folder: Path, **more: Any) -> str:
    with pytest.raises(ModelError) as told:
        open_renderer(str(folder), **more)
    return str(told.value)


def test_a_template_that_changes_the_past_is_refused_with_the_difference(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    counts = HERMES.replace(
        "'<|im_start|>' + message.role", "'<|im_start|>' + (messages | length | string) + message.role"
    )
    told = refused(make_folder(tmp_path, template=counts))
    assert "the prompt changes as the conversation grows: at id" in told
    assert "instead of" in told


def test_a_template_that_rewrites_replies_once_they_are_answered_is_refused(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    """Here the end of turn is left out of all replies but the last; no bridge could append to what was sampled."""
    drops = HERMES.replace(
        "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
        "{{- '<|im_end|>\\n' if loop.index < 4 else '<|im_end|>' }}\n    {%- elif message.role == \"tool\"",
    )
    assert drops != HERMES
    assert "appending differs from rendering: at id" in refused(make_folder(tmp_path, template=drops))


def test_a_template_without_a_stop_id_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    told = refused(make_folder(tmp_path, template=HERMES.replace("<|im_end|>", "\n")))
    assert "ends an assistant's message with none of the stop ids ['<|im_end|>', '<|endoftext|>']" in told


def test_a_template_that_raises_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    assert "fails on a plain conversation: no" in refused(make_folder(tmp_path, template="{{ raise_exception('no') }}"))


def test_a_missing_template_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refused(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "is no folder" in refused(tmp_path / "nowhere")


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path, config={"vocab_size": 100})
    assert "and the model takes 100 (vocab_size in config.json)" in refused(folder)


def test_a_tokenizer_that_transformers_replaces_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    """transformers 5 loads every folder of model_type qwen2 as its own tokenizer class."""
    folder = make_folder(tmp_path)
    spaced = json.loads((folder / "tokenizer.json").read_text())
    spaced["pre_tokenizer"] = {"type": "Split", "pattern": {"String": "4"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(spaced))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 500}))
    assert "transformers loads another tokenizer than" in refused(folder)


def test_an_unknown_family_is_refused_with_those_that_are_known(folder: Path) -> None:
    told = refused(folder, family="qwen33")
    assert "No renderer is named 'qwen33'" in told
    assert "glm-4.5" in told


def test_a_family_that_the_tokenizer_does_not_fit_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path, marks=["<tool_call>", "</tool_call>"])
    assert f"{folder} is no qwen3 model" in refused(folder, family="qwen3")


def test_a_model_without_ids_for_calls_refuses_tools_and_takes_plain_conversations(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    opened = open_renderer(str(make_folder(tmp_path, marks=[])))
    assert opened.render(ASKS, ())
    with pytest.raises(ModelError, match="can't call tools"):
        opened.render(ASKS, TOOLS)


# What a template can't write


def test_a_template_that_refuses_two_calls_in_a_reply_is_taken(tmp_path: Path, make_folder: MakeFolder) -> None:
    one = "{%- for each in messages if each.tool_calls and each.tool_calls | length > 1 -%}"
    opened = open_renderer(
        str(make_folder(tmp_path, template=f"{one}{{{{ raise_exception('one call') }}}}{{%- endfor -%}}{HERMES}"))
    )
    assert opened.render([*ASKS, called({"id": "A41"}), RESULT], TOOLS)
    with pytest.raises(Exception, match="one call"):
        opened.render([*ASKS, called({"id": "A41"}, {"id": "B7"})], TOOLS)


JSON_CALLS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- if message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
{%- endif -%}
{{- '\n' + (tools | tojson) if tools and loop.first -}}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""


def test_calls_that_are_whole_replies_are_read(tmp_path: Path, make_folder: MakeFolder, encode: Encode) -> None:
    """Where the template writes them so, tools were given and the reply has ended."""
    opened = open_renderer(str(make_folder(tmp_path, template=JSON_CALLS, marks=[])))
    assert (opened.family, opened.supports_tools) == ("default", True)
    said = opened.encode('{"name": "look_up", "parameters": {"id": "A41"}}<|im_end|>')
    assert read(opened, said) == ("", [("look_up", {"id": "A41"})], [])
    assert opened.parse(said, ()).tool_calls == opened.parse(said[:-1], TOOLS).tool_calls == ()


@pytest.mark.parametrize(("thinks", "goes_on"), [("", True), ("<think>\nHm.\n</think>\n\n", False)])
def test_a_family_that_follows_the_templates_history_begins_anew_only_where_something_was_thought(
    qwen_folder: Path, encode: Encode, thinks: str, goes_on: bool
) -> None:
    opened = open_renderer(str(qwen_folder), family="qwen3", history="template")
    prompt, sampled = opened.render(ASKS, TOOLS), encode(f"{thinks}In row four.<|im_end|>")
    extended = opened.extend(prompt, sampled, [{"role": "user", "content": "Sure?"}], TOOLS)
    assert (extended is not None) == goes_on


def test_thinking_is_known_by_what_the_family_reads_and_not_by_one_spelling(folder: Path, encode: Encode) -> None:
    """gpt-oss and gemma4 write no `</think>`."""

    class Library:
        def parse_response(self, ids: list[int], **more: Any) -> SimpleNamespace:
            return SimpleNamespace(content="A lamp.", reasoning_content="Hm.", tool_calls=[])

        def bridge_to_next_turn(self, prompt: list[int], said: list[int], new: Any, **more: Any) -> SimpleNamespace:
            return SimpleNamespace(token_ids=[*prompt, *said, 7])

    tokenizer, stop = load_tokenizer(folder), encode("<|im_end|>")
    sampled = encode("<|channel>thought Hm.<channel|>A lamp.<|im_end|>")
    about = {"family": "gemma4", "stop_ids": stop, "hashes": ""}
    keeps = FamilyRenderer(tokenizer, Library(), Library(), history="keep", **about)
    follows = FamilyRenderer(tokenizer, Library(), Library(), history="template", **about)
    asks = [{"role": "user", "content": "Sure?"}]
    assert keeps.extend((1, 2), sampled, asks, ()) == (1, 2, *sampled, 7)
    assert follows.extend((1, 2), sampled, asks, ()) is None
    assert follows.extend((1, 2), sampled, [RESULT], ()) == (1, 2, *sampled, 7)
