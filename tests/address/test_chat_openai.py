"""A user's ChatOpenAI at an address: LangChain gets what it gets of OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"item": "lamp"}}\n</tool_call>'


@tool
def look_up(item: str) -> int:
    """Quantity of an item."""
    return 4


class Answer(BaseModel):
    """An answer."""

    n: int


def model_at(desk: Any, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=desk.url, api_key="unused", model="gpt-4o-mini", max_retries=0, **settings)


def test_an_answer_is_the_same_by_every_way_to_ask(desk: Any) -> None:
    model = model_at(desk, temperature=0, max_tokens=50)

    async def later() -> list[str]:
        pieces = [piece async for piece in model.astream("Hi.")]
        return [(await model.ainvoke("Hi.")).text, "".join(piece.text for piece in pieces)]

    answers = [model.invoke("Hi.").text, "".join(piece.text for piece in model.stream("Hi.")), *asyncio.run(later())]
    assert answers == ["Hello there."] * 4
    assert desk.engine.asked[-1][1].max_tokens == 50


def test_usage_comes_with_an_answer_and_with_a_stream(desk: Any) -> None:
    model = model_at(desk, stream_usage=True)
    whole = model.invoke("Hi.")
    first, *rest = model.stream("Hi.")
    streamed = sum(rest, first)
    assert whole.usage_metadata == streamed.usage_metadata
    assert whole.usage_metadata["input_token_details"]["cache_read"] == 3
    assert whole.response_metadata["model_name"] == "told-1"
    assert whole.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_with_tools_runs(open_desk: Any, streaming: bool) -> None:
    """A ToolNode runs the call, and the second prompt begins with the ids of the first answer."""
    with open_desk(CALL, "Four.") as desk:
        model = model_at(desk, streaming=streaming).bind_tools([look_up])
        builder = StateGraph(MessagesState)
        builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
        builder.add_node("tools", ToolNode([look_up]))
        builder.add_edge(START, "agent")
        builder.add_conditional_edges("agent", tools_condition)
        builder.add_edge("tools", "agent")
        state = builder.compile().invoke({"messages": [("user", "How many lamps?")]})
        _, call, result, last = state["messages"]
        assert (call.tool_calls[0]["args"], result.content, last.text) == ({"item": "lamp"}, "4", "Four.")
        (before, _), (after, _) = desk.engine.asked
        assert after[: len(before)] == before


def test_structured_output_by_a_tool_and_by_a_schema(open_desk: Any) -> None:
    called = '<tool_call>\n{"name": "Answer", "arguments": {"n": 4}}\n</tool_call>'
    with open_desk(called, '{"n": 5}', '{"n": 6}') as desk:
        model = model_at(desk)
        answers = [
            model.with_structured_output(Answer, method=method).invoke("How many?")
            for method in ("function_calling", "json_schema", "json_mode")
        ]
        assert answers == [Answer(n=4), Answer(n=5), Answer(n=6)]
        prompts = [desk.engine.decode(prompt) for prompt, _ in desk.engine.asked]
        assert "Call the tool Answer." in prompts[0]
        assert "Answer with one JSON object of this schema" in prompts[1]
        assert "Answer with one JSON object and nothing else." in prompts[2]


def test_an_unreadable_call_is_invalid_and_goes_back_as_it_was_sampled(open_desk: Any) -> None:
    broken = '<tool_call>\n{"name": "look_up", "arguments": {"item"\n</tool_call>'
    with open_desk(broken, "Sorry.") as desk:
        model = model_at(desk).bind_tools([look_up])
        asked = HumanMessage("How many lamps?")
        said = model.invoke([asked])
        assert (said.tool_calls, len(said.invalid_tool_calls)) == ([], 1)
        refused = ToolMessage("That is no JSON.", tool_call_id=said.invalid_tool_calls[0]["id"])
        assert model.invoke([asked, said, refused]).text == "Sorry."
        (before, sampling), (after, _) = desk.engine.asked
        sampled = (*desk.engine.encode(broken), *sampling.stop_ids[:1])
        assert after[: len(before) + len(sampled)] == before + sampled


def test_several_questions_at_one_time(desk: Any) -> None:
    assert [answer.text for answer in model_at(desk).batch(["One?", "Two?", "Three?"])] == ["Hello there."] * 3


def test_what_a_policy_cannot_do_is_openais_error(desk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="the policy gives one answer a call"):
        model_at(desk, n=2).invoke("Hi.")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="the policy reads text only"):
        model_at(desk).invoke([HumanMessage([image])])
