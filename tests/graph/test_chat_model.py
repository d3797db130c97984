"""chat_model() is one model to the role book, answers by its default outside, and gives structured output each way."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from agenttrain import chat_model
from agenttrain.errors import ConfigError, ModelError
from agenttrain.graph.intercept import open_gate, use_route
from agenttrain.graph.site import model_identity
from agenttrain.records import InvalidCall, ModelCall, ParsedCall, Reply


class Place(BaseModel):
    """Where something is."""

    room: str
    shelf: int = Field(default=1)


class Plain(BaseChatModel):
    """A model of somebody's own, without streaming, that keeps what it was told."""

    told: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "plain"

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(tools=list(tools), tool_choice={"mine": tool_choice}, **kwargs)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self.told.append({**kwargs, "stop": stop})
        calls = [{"name": "Place", "args": {"room": "hall"}, "id": "1"}] if "tools" in kwargs else []
        return ChatResult(generations=[ChatGeneration(message=AIMessage("plain", tool_calls=calls))])


MODELS: list[Callable[[], Any]] = [
    lambda: ChatOpenAI(model="gpt-4o", api_key="unused", base_url="http://127.0.0.1:9/v1"),
    lambda: ChatAnthropic(model="claude-sonnet-4-5", api_key="unused", base_url="http://127.0.0.1:9"),
    chat_model,
]
each_model = pytest.mark.parametrize("make", MODELS, ids=["ChatOpenAI", "ChatAnthropic", "chat_model"])
GOOD = '{"room": "hall", "shelf": 2}'


def answers(good: str | dict[str, Any]) -> Callable[[ModelCall], Any]:
    """A script: the tool where there is one, else text."""
    if isinstance(good, str):
        return lambda call: good
    return lambda call: ParsedCall(id="t1", name="Place", arguments=good)


# Who answers


def test_without_anybody_to_answer_the_error_names_the_three_ways() -> None:
    with pytest.raises(ModelError, match=r"agenttrain fit.*use\(RUN\).*chat_model\(default=ChatOpenAI"):
        chat_model().invoke("hi")


def test_the_default_answers_outside_in_every_way() -> None:
    """Streamed by itself where it can stream, whole where it can't."""
    for default in (Plain(), GenericFakeChatModel(messages=iter([AIMessage("plain")] * 4))):
        model = chat_model(default=default)
        streamed = list(model.stream("hi"))
        assert all(isinstance(chunk, AIMessageChunk) for chunk in streamed)
        texts = [model.invoke("hi").text, "".join(chunk.text for chunk in streamed)]
        texts += [asyncio.run(model.ainvoke("hi")).text, model.batch(["hi"])[0].text]
        assert texts == ["plain"] * 4


def test_tools_and_settings_reach_the_default_in_its_own_form() -> None:
    default = Plain()
    model = chat_model(default=default).bind_tools([Place], tool_choice="any")
    message = model.invoke("Where?", stop=["END"])
    assert message.tool_calls[0]["args"] == {"room": "hall"}
    assert [tool["function"]["name"] for tool in default.told[0]["tools"]] == ["Place"]
    assert (default.told[0]["tool_choice"], default.told[0]["stop"]) == ({"mine": "any"}, ["END"])
    chunks = list(chat_model(default=Plain()).bind_tools([Place], tool_choice="Place").stream("Where?"))
    assert chunks[-1].tool_calls[0]["args"] == {"room": "hall"}


def test_a_default_given_as_text_is_made_by_langchain_when_it_is_needed() -> None:
    """With the settings that were given."""
    model = chat_model(default="openai:gpt-4o", temperature=0.5, api_key="unused", max_retries=0)
    made = model._default_model()
    assert isinstance(made, ChatOpenAI)
    assert (made.model_name, made.temperature, made.max_retries) == ("gpt-4o", 0.5, 0)
    assert model._default_model() is made


def test_settings_are_those_of_the_default_where_none_are_given() -> None:
    """So that the policy serves as the model did that it replaces."""
    default = ChatOpenAI(model="gpt-4o", api_key="unused", temperature=0.3, max_tokens=7, stop=["END"])
    model = chat_model(default=default)
    assert (model.temperature, model.max_tokens, model.stop) == (0.3, 7, ["END"])
    assert chat_model(default=default, temperature=1).temperature == 1


def test_a_default_that_is_no_model_is_refused() -> None:
    bound: Any = Plain().bind(stop=["x"])
    with pytest.raises(ConfigError, match=r"got default=.*Binding, and a chat model"):
        chat_model(default=bound)


def test_a_choice_of_an_unknown_tool_is_refused_when_it_is_bound() -> None:
    with pytest.raises(ConfigError, match="tool_choice names 'fly', and the tools are Place"):
        chat_model().bind_tools([Place], tool_choice="fly")


def test_all_of_them_are_one_model(rollout: Any, Route: Any, graph_of: Any) -> None:
    """Whatever their settings, and copies from another process too."""
    one, other = chat_model(), pickle.loads(pickle.dumps(chat_model(default="openai:gpt-4o", temperature=0.2)))
    assert other.default == "openai:gpt-4o"
    assert model_identity(one) == model_identity(other) == ("ChatPolicy", "policy", "")
    route = Route()
    both = graph_of(lambda state: {"messages": [one.invoke("a"), other.invoke("b")]})
    assert rollout(both, route).error is None
    assert [call.role for call in route.calls] == ["trained", "trained"]


def test_an_auxiliary_call_is_answered_by_the_default(rollout: Any, Route: Any, graph_of: Any) -> None:
    model, route = chat_model(default=Plain()), Route(auxiliary=["agent"])
    state = rollout(graph_of(lambda state: {"messages": [model.invoke("a")]}), route).state
    assert state["messages"][-1].text == "plain"
    assert (len(route.auxiliary), route.calls) == (1, [])


def test_retries_fallbacks_and_usage_callbacks_work_as_for_any_model() -> None:
    model = chat_model().with_fallbacks([chat_model(default=Plain())])
    assert model.invoke("hi").text == "plain"
    assert chat_model(default=Plain()).with_retry(stop_after_attempt=2).invoke("hi").text == "plain"


def test_usage_is_counted_for_the_policy(Route: Any) -> None:
    counted = UsageMetadataCallbackHandler()
    route = Route(lambda call: Reply(call_id="t", text="x", n_prompt_ids=5, n_response_ids=2, model="tiny"))
    with open_gate(), use_route(route):
        chat_model().invoke("hi", config={"callbacks": [counted]})
    assert counted.usage_metadata["tiny"]["total_tokens"] == 7


# Structured output


@each_model
@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_each_model_gives_the_object_by_each_method(make: Any, method: str, Route: Any) -> None:
    """Invoked, streamed, and with the raw message beside it; what was asked for reaches the policy."""
    if method == "json_mode" and make is MODELS[1]:
        pytest.skip("ChatAnthropic has no JSON mode")
    by_tool = method == "function_calling"
    route = Route(answers({"room": "hall", "shelf": 2} if by_tool else GOOD))
    model = make()
    with open_gate(), use_route(route):
        place = model.with_structured_output(Place, method=method).invoke("Where?")
        last = list(model.with_structured_output(Place, method=method).stream("Where?"))[-1]
        raw = model.with_structured_output(Place, method=method, include_raw=True).invoke("Where?")
    assert place == last == raw["parsed"] == Place(room="hall", shelf=2)
    assert (raw["parsing_error"], type(raw["raw"])) == (None, AIMessage)
    call = route.calls[0]
    if by_tool:
        assert call.tools[0]["function"]["name"] == "Place"
        assert call.tool_choice
    else:
        assert call.response_format["type"] == ("json_object" if method == "json_mode" else "json_schema")


@each_model
@pytest.mark.parametrize("method", ["json_mode", "json_schema"])
def test_text_that_is_no_object_is_an_error_or_stands_beside_the_raw_message(
    make: Any, method: str, Route: Any
) -> None:
    """As LangChain's users expect it."""
    if method == "json_mode" and make is MODELS[1]:
        pytest.skip("ChatAnthropic has no JSON mode")
    model = make()
    with open_gate(), use_route(Route(answers("no idea"))):
        raw = model.with_structured_output(Place, method=method, include_raw=True).invoke("Where?")
        with pytest.raises((OutputParserException, ValueError)):
            model.with_structured_output(Place, method=method).invoke("Where?")
    assert (raw["raw"].text, raw["parsed"]) == ("no idea", None)
    assert raw["parsing_error"] is not None


@each_model
def test_arguments_that_do_not_fit_stand_beside_the_raw_message(make: Any, Route: Any) -> None:
    with open_gate(), use_route(Route(answers({"shelf": "high"}))):
        raw = make().with_structured_output(Place, method="function_calling", include_raw=True).invoke("Where?")
    assert raw["parsed"] is None
    assert "room" in str(raw["parsing_error"])


def test_another_method_is_refused() -> None:
    method: Any = "xml"
    with pytest.raises(ConfigError, match=r"method='xml'\. Accepted: function_calling, json_mode, json_schema"):
        chat_model().with_structured_output(Place, method=method)


@each_model
def test_a_graph_that_ends_on_an_unreadable_object_ends_by_the_policys_fault(
    make: Any, Route: Any, graph_of: Any, rollout: Any
) -> None:
    """By JSON schema, in a node, without a raw message."""
    model = make().with_structured_output(Place, method="json_schema")
    ending = rollout(graph_of(lambda state: {"messages": [str(model.invoke("Where?"))]}), Route(answers("no idea")))
    assert ending.unreadable_answer


@each_model
def test_unreadable_calls_survive_a_stream(make: Any, Route: Any) -> None:
    """The sum of the chunks holds them, and so does the message of a streaming invoke."""
    broken = InvalidCall(id="t1", name="Place", arguments='{"room": ', error="no JSON")
    route = Route(lambda call: Reply(call_id="x", text="", invalid_tool_calls=(broken,), model="tiny"))
    with open_gate(), use_route(route):
        chunks = list(make().bind_tools([Place]).stream("Where?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.tool_calls == []
    assert [call["name"] for call in total.invalid_tool_calls] == ["Place"]
