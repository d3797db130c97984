"""LangChain's messages and settings as plain data, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from agenttrain.errors import GraphError
from agenttrain.graph.messages import (
    assistant_message,
    described_messages,
    message_chunks,
    own_temperature,
    plain_messages,
    plain_response_format,
    plain_tool_choice,
    plain_tools,
    unsupported_sampling,
)
from agenttrain.records import InvalidCall, ParsedCall, Reply


def test_each_kind_of_message() -> None:
    """Roles, names and ids as in OpenAI's format, arguments as dicts."""
    call: Any = {"name": "add", "args": {"a": 1}, "id": "t1", "type": "tool_call"}
    broken: Any = {"name": "add", "args": '{"a"', "id": "t2", "error": "no end", "type": "invalid_tool_call"}
    assert plain_messages(
        [
            SystemMessage("be brief"),
            HumanMessage("hi", name="ann"),
            AIMessage("", tool_calls=[call], invalid_tool_calls=[broken]),
            ToolMessage("3", tool_call_id="t1", name="add"),
            FunctionMessage("4", name="old"),
            ChatMessage("odd", role="critic"),
        ]
    ) == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": '{"a"'}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "t1", "name": "add"},
        {"role": "function", "content": "4", "name": "old"},
        {"role": "critic", "content": "odd"},
    )


def test_content_blocks_become_text() -> None:
    """Text is joined; thinking and tool blocks are said elsewhere."""
    blocks: Any = [
        "a",
        {"type": "text", "text": "b"},
        {"type": "thinking", "thinking": "…"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {}},
    ]
    assert plain_messages([AIMessage(blocks)])[0]["content"] == "ab"
    assert (
        plain_messages([ToolMessage([{"type": "json", "json": {"x": 1}}], tool_call_id="t")])[0]["content"]
        == '{"x": 1}'
    )


def test_an_image_is_refused_and_can_be_described() -> None:
    """With the kind of block and the way out."""
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])
    with pytest.raises(GraphError, match=r"user message holds a content block of type 'image_url'.*auxiliary="):
        plain_messages([picture])
    assert described_messages([picture])[0]["content"] == "[image_url]"
    with pytest.raises(GraphError, match="RemoveMessage"):
        plain_messages([RemoveMessage(id="1")])


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}},
        {"name": "add", "description": "d", "input_schema": {"type": "object"}},
        {"name": "add", "description": "d", "parameters": {"type": "object"}},
    ],
    ids=["openai", "responses", "anthropic", "json_schema"],
)
def test_tools_of_each_provider(tool: dict[str, Any]) -> None:
    """All give OpenAI's function format."""
    (plain,) = plain_tools([tool])
    assert plain == {
        "type": "function",
        "function": {"name": "add", "description": "d", "parameters": {"type": "object"}},
    }


@pytest.mark.parametrize("tool", [{"type": "web_search_20250305", "name": "web_search"}, {"type": "web_search"}])
def test_a_tool_on_the_providers_server_is_refused_by_name(tool: dict[str, Any]) -> None:
    """It can't be called by the policy."""
    with pytest.raises(GraphError, match=r"'web_search' runs on the provider's server"):
        plain_tools([tool])


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("given_choice", "plain"),
    [
        (None, None),
        (False, None),
        (True, "required"),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        ({"type": "any"}, "required"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ("add", NAMED),
        ({"type": "tool", "name": "add"}, NAMED),
        (NAMED, NAMED),
        ({"tool": {"name": "add"}}, NAMED),
        ({"any": {}}, "required"),
    ],
)
def test_tool_choice_of_each_provider(given_choice: Any, plain: Any) -> None:
    """All give one of OpenAI's forms."""
    assert plain_tool_choice(given_choice) == plain


def test_an_unknown_tool_choice_is_refused() -> None:
    """With what can be written."""
    with pytest.raises(GraphError, match=r"tool_choice=\{'type': 'later'\} can't be read"):
        plain_tool_choice({"type": "later"})


def test_response_formats_of_each_provider() -> None:
    """A class, OpenAI's two forms, Anthropic's, and none."""

    class Answer(BaseModel):
        """An answer."""

        value: int

    asked = {"type": "json_schema", "json_schema": {"name": "A", "schema": {"type": "object"}}}
    assert plain_response_format({}) is None
    assert plain_response_format({"response_format": {"type": "text"}}) is None
    assert plain_response_format({"response_format": {"type": "json_object"}}) == {"type": "json_object"}
    assert plain_response_format({"response_format": asked}) == asked
    anthropic = {"output_config": {"format": {"type": "json_schema", "schema": {"title": "A", "type": "object"}}}}
    found = plain_response_format(anthropic)
    assert found is not None
    assert found["json_schema"]["name"] == "A"
    of_class = plain_response_format({"response_format": Answer})
    assert of_class is not None
    assert of_class["json_schema"]["name"] == "Answer"


def test_a_replys_numbers_and_reasons_reach_the_message() -> None:
    """Usage, finish reason, model, reasoning and id."""
    message = assistant_message(
        Reply(
            call_id="turn-1",
            text="hi",
            reasoning="hm",
            stop_reason="length",
            n_prompt_ids=5,
            n_response_ids=2,
            n_cached_ids=4,
            model="tiny",
        )
    )
    assert (message.id, message.text) == ("turn-1", "hi")
    assert message.additional_kwargs == {"reasoning_content": "hm"}
    assert message.response_metadata == {
        "finish_reason": "length",
        "model_name": "tiny",
        "model_provider": "agenttrain",
    }
    assert message.usage_metadata == {
        "input_tokens": 5,
        "output_tokens": 2,
        "total_tokens": 7,
        "input_token_details": {"cache_read": 4},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda v: st.lists(v, max_size=2),
    max_leaves=3,
)
CALLS = st.builds(
    ParsedCall, id=st.just("t1"), name=st.just("add"), arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3)
)
BROKEN = st.builds(
    InvalidCall, id=st.just("t2"), name=st.just("add"), arguments=st.text(max_size=12).filter(bool), error=st.just("e")
)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), calls=st.lists(CALLS, max_size=2), broken=st.lists(BROKEN, max_size=2))
def test_whole_or_in_pieces_a_reply_reads_back_the_same(text: str, calls: list[Any], broken: list[Any]) -> None:
    """The plain message of the sum of chunks is that of the whole message, unreadable calls included."""
    reply = Reply(call_id="turn-1", text=text, tool_calls=tuple(calls), invalid_tool_calls=tuple(broken))
    pieces = list(message_chunks(reply))
    total: Any = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    whole = assistant_message(reply)
    if any(call.arguments.startswith('"') for call in broken):
        return  # such arguments are themselves a quoted string
    assert plain_messages([total]) == plain_messages([whole])
    assert (total.id, total.usage_metadata) == (whole.id, whole.usage_metadata)


def test_the_users_temperature_is_the_calls_then_the_models(chat: Any) -> None:
    """None where neither says one: 0 is a temperature."""
    assert own_temperature(chat(temperature=0.4), {"temperature": 0}) == 0.0
    assert own_temperature(chat(temperature=0.4), {}) == 0.4
    assert own_temperature(chat(), {}) is None


def test_settings_that_a_policy_does_not_follow_are_named() -> None:
    """What changes nothing is left out."""
    model = ChatOpenAI(model="m", api_key="unused", top_p=0.9, presence_penalty=0)
    assert unsupported_sampling(model, {"top_k": 5}) == ("top_p=0.9", "top_k=5")
    assert unsupported_sampling(model, {"top_p": 1}) == ()
