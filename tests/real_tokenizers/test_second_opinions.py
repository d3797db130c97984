"""The renderer against other people's: each prompt that goes on from stored ids is theirs too, or it is known why not.

Three opinions, over random conversations with tools: the chat template over the whole history (transformers), the
token-in-token-out tokenizers of Miles, and veRL's continuous-token builder. docs/renderers.md has the table of what
they disagree on.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from agenttrain.protocols import Renderer
from agenttrain.records import Ids
from agenttrain.testing.conversations import Continuation, continuations, random_conversation

N_CONVERSATIONS = int(os.environ.get("AGENTTRAIN_CONVERSATIONS", "40"))
pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tokenizer with a template and a way to render it."""

    name: str
    tokenizer: str
    template: str | None = None
    family: str | None = None
    tools: bool = True
    most_calls: int = 3
    miles: str = "default"
    verl: str = "ContinuousTokenBuilder"


DEEPSEEK = "DeepSeekContinuousTokenBuilder"
QWEN = "QwenContinuousTokenBuilder"
CASES = (
    Case(name="qwen3 by its family", tokenizer="qwen3", miles="qwen3", verl=QWEN),
    Case(name="qwen3 by its template", tokenizer="qwen3", family="default", miles="qwen3", verl=QWEN),
    Case(name="llama3_1", tokenizer="llama3_1", tools=False),
    Case(name="llama3_1 with tools", tokenizer="llama3_1", template="llama3_1", most_calls=1),
    Case(name="gemma3", tokenizer="gemma3", tools=False),
    Case(name="deepseek_v3", tokenizer="deepseek_v3", tools=False, verl=DEEPSEEK),
    Case(name="deepseek_v3 by its family", tokenizer="deepseek_v3", family="deepseek-v3", tools=False, verl=DEEPSEEK),
    Case(name="deepseek_v3 with tools", tokenizer="deepseek_v3", template="deepseek_v3", verl=DEEPSEEK),
)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def renderer(case: Case, real_folder: Callable[..., Any], opened: Callable[..., Renderer]) -> Renderer:
    return opened(str(real_folder(case.tokenizer, template=case.template)), family=case.family, history="keep")


def places(case: Case) -> Iterator[Continuation]:
    """Where the conversations of a case go on; the same in every run."""
    for seed in range(N_CONVERSATIONS):
        yield from continuations(
            *random_conversation(random.Random(seed), tools=case.tools, most_calls=case.most_calls)
        )


def plain(messages: Sequence[Any]) -> Any:
    """A copy that the other may change, None for nothing."""
    return json.loads(json.dumps(list(messages))) or None


def tokenizer_of(renderer: Renderer) -> Any:
    """The tokenizer of transformers that the renderer was made from."""
    return renderer._tokenizer._tokenizer


def stored(place: Continuation, renderer: Renderer) -> tuple[Ids, Ids]:
    """A prompt, and the reply as a policy would sample the template's own words: behind it, ended."""
    prompt = renderer.render(place.before, place.tools)
    text = renderer.decode(renderer.render(place.messages, place.tools))[len(renderer.decode(prompt)) :]
    ids = renderer.encode(text)
    return prompt, ids[: next(i for i, id in enumerate(ids) if id in renderer.stop_ids) + 1]


def held(
    case: Case, renderer: Renderer, theirs: Callable[[Continuation, Ids, Ids], Ids], known: Callable[..., str]
) -> Counter[str]:
    """How often another says the same as we, and else why not.

    Args:
        theirs: the next prompt, given the place, the prompt before and the reply's ids.
        known: what explains a difference, given the place, our text, and the other's text or error; empty: nothing.
    """
    counts: Counter[str] = Counter()
    for place in places(case):
        prompt, reply = stored(place, renderer)
        ours = renderer.extend(prompt, reply, place.new, place.tools)
        assert ours is not None
        try:
            other = theirs(place, prompt, reply)
        except Exception as error:
            why = known(place, renderer.decode(ours), f"{type(error).__name__}: {error}")
        else:
            why = "same" if other == ours else known(place, renderer.decode(ours), renderer.decode(other))
        assert why, f"nobody knows why this differs: {place}"
        counts[why] += 1
    return counts


def user_speaks(place: Continuation) -> bool:
    return any(message["role"] == "user" for message in place.new)


# The template over the whole history


def test_the_template_over_the_whole_history(case: Case, renderer: Renderer) -> None:
    """The same text always. The same ids, unless the reply begins with white space that the tokenizer joins to what
    stands before it: the policy sampled it apart, so ours are the ids that it saw."""
    tokenizer = tokenizer_of(renderer)

    def whole(place: Continuation, prompt: Ids, reply: Ids) -> Ids:
        return tuple(
            tokenizer.apply_chat_template(
                plain(place.messages), tools=plain(place.tools), add_generation_prompt=True, return_dict=False
            )
        )

    def known(place: Continuation, ours: str, theirs: str) -> str:
        begins_blank = any(m["role"] == "assistant" and m["content"][:1].isspace() for m in place.messages)
        return "joined" if ours == theirs and begins_blank else ""

    counts = held(case, renderer, whole, known)
    assert counts["same"] > N_CONVERSATIONS
    assert set(counts) == ({"same", "joined"} if case.tokenizer == "qwen3" else {"same"})


# Miles


def test_the_tokenizers_of_miles(case: Case, renderer: Renderer) -> None:
    """Qwen3 has one of its own there, the others the general one, which renders new messages behind a system message
    of its own."""
    miles = pytest.importorskip("miles_tito_tokenizers")
    tito = miles.get_tito_tokenizer(tokenizer_of(renderer), case.miles, allowed_append_roles=["tool", "user"])

    def merged(place: Continuation, prompt: Ids, reply: Ids) -> Ids:
        before = plain((*place.before, place.reply))
        return tuple(tito.merge_tokens(before, plain(place.messages), [*prompt, *reply], plain(place.tools)))

    def known(place: Continuation, ours: str, theirs: str) -> str:
        if case.tokenizer == "gemma3":
            return "system message in the question" if "dummy system" in theirs else ""
        twice = theirs.count("to call a function") == 1 + ours.count("to call a function")
        return "tools a second time" if case.template == "llama3_1" and user_speaks(place) and twice else ""

    counts = held(case, renderer, merged, known)
    expected = {"gemma3": {"system message in the question"}, "llama3_1 with tools": {"same", "tools a second time"}}
    assert set(counts) == expected.get(case.name, {"same"})


# veRL


def test_the_continuous_tokens_of_verl(case: Case, renderer: Renderer) -> None:
    """Its builders render new messages behind a system message and a question of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what veRL imports
        verl = pytest.importorskip("verl.utils.tokenizer.continuous_token")
    builder = getattr(verl, case.verl)(tokenizer_of(renderer))

    def merged(place: Continuation, prompt: Ids, reply: Ids) -> Ids:
        before = plain((*place.before, place.reply))
        merge = builder.merge_context_tokens(before, plain(place.messages), [*prompt, *reply], tools=plain(place.tools))
        return tuple(merge.token_ids)

    def known(place: Continuation, ours: str, theirs: str) -> str:
        return "two questions in a row" if "TemplateError: Conversation roles must alternate" in theirs else ""

    counts = held(case, renderer, merged, known)
    assert set(counts) == ({"two questions in a row"} if case.tokenizer == "gemma3" else {"same"})


# Reading back


def test_a_reply_is_read_back_as_it_was_written(case: Case, renderer: Renderer) -> None:
    """Text, names and arguments; white space around the text is the template's."""
    for place in places(case):
        prompt, reply = stored(place, renderer)
        parsed = renderer.parse(reply, place.tools, prompt)
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        functions = [call["function"] for call in place.reply.get("tool_calls", ())]
        assert calls == [(each["name"], each["arguments"]) for each in functions]
        assert parsed.invalid_tool_calls == ()
        if not (functions and case.template == "llama3_1"):  # its template writes no text beside a call
            assert parsed.text.strip() == place.reply["content"].strip()


# Each disagreement as one case

SURE = {"role": "user", "content": "Sure?"}


def test_qwen_joins_a_line_break_that_was_sampled_apart(
    real_folder: Callable[..., Any], opened: Callable[..., Renderer]
) -> None:
    """Rendered whole, the header's line break and the reply's are one id; the policy saw one and sampled the other."""
    renderer = opened(str(real_folder("qwen3")), family="default", history="keep")
    asked = ({"role": "user", "content": "Where?"},)
    prompt, sampled = renderer.render(asked, ()), renderer.encode("\nHere.<|im_end|>")
    whole = renderer.render((*asked, {"role": "assistant", "content": "\nHere."}, SURE), ())
    at = len(prompt) - 1
    assert [renderer.decode(ids) for ids in (prompt[at:], sampled[:1], whole[at : at + 1])] == ["\n", "\n", "\n\n"]
    ours = renderer.extend(prompt, sampled, [SURE], ())
    assert ours is not None
    assert ours[: len(prompt) + len(sampled)] == prompt + sampled
    assert (renderer.decode(ours), len(ours)) == (renderer.decode(whole), len(whole) + 1)


def test_miles_writes_the_tools_of_a_first_question_before_the_next(
    real_folder: Callable[..., Any], opened: Callable[..., Renderer]
) -> None:
    miles = pytest.importorskip("miles_tito_tokenizers")
    renderer = opened(str(real_folder("llama3_1", template="llama3_1")), family=None, history="keep")
    tito = miles.get_tito_tokenizer(tokenizer_of(renderer), "default", allowed_append_roles=["user"])
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    before = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    prompt, sampled = renderer.render(before[:1], [tool]), renderer.encode("Here.<|eot_id|>")
    theirs = renderer.decode(tito.merge_tokens(before, [*before, SURE], [*prompt, *sampled], [tool]))
    ours = renderer.decode(renderer.extend(prompt, sampled, [SURE], [tool]) or ())
    assert [text.count('"name": "add"') for text in (ours, theirs)] == [1, 2]
    assert ours == renderer.decode(renderer.render([*before, SURE], [tool]))


def test_miles_and_verl_ask_two_questions_in_a_row_of_gemma(
    real_folder: Callable[..., Any], opened: Callable[..., Renderer]
) -> None:
    """Both put a message of their own before the new one; Gemma 3's template takes that for the question."""
    miles = pytest.importorskip("miles_tito_tokenizers")
    renderer = opened(str(real_folder("gemma3")), family=None, history="keep")
    tito = miles.get_tito_tokenizer(tokenizer_of(renderer), "default", allowed_append_roles=["user"])
    before = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    prompt, sampled = renderer.render(before[:1], ()), renderer.encode("Here.<end_of_turn>")
    ours = renderer.decode(renderer.extend(prompt, sampled, [SURE], ()) or ())
    theirs = renderer.decode(tito.merge_tokens(before, [*before, SURE], [*prompt, *sampled], None))
    end = "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n"
    assert ours.endswith(f"Here.<end_of_turn>\n{end}")
    assert theirs.endswith(f"Here.<end_of_turn>{end.replace('Sure?', 'dummy system' + chr(10) * 2 + 'Sure?')}")
