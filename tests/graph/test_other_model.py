"""What a call asks for, as chat models of several providers would send it; no network is used."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI

from agenttrain.graph.other_model import asked_of
from agenttrain.records import ModelCall

PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
SCHEMA = {"title": "Answer", "type": "object", "properties": {"text": {"type": "string"}}}
TOOLED = ModelCall(
    messages=(), tools=(PRICE,), tool_choice="required", max_tokens=9, stop=("END",), parallel_tool_calls=False
)
FORMED = ModelCall(
    messages=(), response_format={"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA}}
)


def request(model: Any, call: ModelCall) -> Any:
    """What the provider's client would be handed."""
    make = getattr(model, "_get_request_payload", None) or model._prepare_request
    return make([HumanMessage("x")], **asked_of(model, call))


OPENAI = ChatOpenAI(model="gpt-4o", api_key="unused")
ANTHROPIC = ChatAnthropic(model="claude-3", api_key="unused")
GOOGLE = ChatGoogleGenerativeAI(model="gemini-2.0-flash", google_api_key="unused")


def test_tools_as_openai_takes_them() -> None:
    asked = request(OPENAI, TOOLED)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["price"]
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    assert (asked["max_completion_tokens"], asked["stop"]) == (9, ["END"])


def test_tools_as_anthropic_takes_them() -> None:
    asked = request(ANTHROPIC, TOOLED)
    assert [tool["name"] for tool in asked["tools"]] == ["price"]
    assert asked["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert (asked["max_tokens"], asked["stop_sequences"]) == (9, ["END"])


def test_tools_as_google_takes_them() -> None:
    asked = request(GOOGLE, TOOLED)["config"]
    assert [each.name for tool in asked.tools for each in tool.function_declarations] == ["price"]
    assert asked.tool_config.function_calling_config.mode.value == "ANY"
    assert (asked.max_output_tokens, asked.stop_sequences) == (9, ["END"])


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, GOOGLE], ids=["openai", "anthropic", "google"])
def test_a_form_reaches_each_provider(model: BaseChatModel) -> None:
    assert "'text':{'type':'string'}" in "".join(str(request(model, FORMED)).split())


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, GOOGLE], ids=["openai", "anthropic", "google"])
def test_nothing_is_asked_of_its_own(model: BaseChatModel) -> None:
    assert asked_of(model, ModelCall(messages=())) == {"stop": None}
