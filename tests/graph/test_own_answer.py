"""What another model said, in plain data; and that every way to ask it tells the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_server import ChatServer, call, serve
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from openai import BadRequestError

from agenttrain.graph.intercept import open_gate, outside_rollouts, use_route
from agenttrain.graph.own_answer import own_answer
from agenttrain.records import OwnAnswer, ParsedCall

TOLD = {"input_tokens": 11, "output_tokens": 3, "total_tokens": 14}
ADDS = ParsedCall(id="call-1", name="add", arguments={"a": 1, "b": 2})


def script(body: Any) -> Any:
    return call("add", a=1, b=2) if body.get("tools") else {"content": "it is three"}


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with serve(script) as running:
        yield running


def test_text_calls_tokens_and_why_it_ended() -> None:
    broken = {"type": "invalid_tool_call", "id": "b", "name": "add", "args": "{", "error": "no JSON"}
    message = AIMessage(
        content=[{"type": "text", "text": "so "}, {"type": "reasoning", "reasoning": "hm"}, "far"],
        tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "call-1"}],
        invalid_tool_calls=[broken],
        usage_metadata=TOLD,
        response_metadata={"finish_reason": "length"},
    )
    found = own_answer([message])
    assert found is not None
    assert (found.text, found.tool_calls, found.stop_reason) == ("so far", (ADDS,), "length")
    assert [(each.name, each.arguments, each.error) for each in found.invalid_tool_calls] == [("add", "{", "no JSON")]
    assert (found.n_prompt_tokens, found.n_response_tokens) == (11, 3)


@pytest.mark.parametrize(
    "told",
    [
        {"stop_reason": "max_tokens"},
        {"finish_reason": "MAX_TOKENS"},
        {"incomplete_details": {"reason": "max_output_tokens"}},
    ],
)
def test_each_provider_says_in_its_own_way_that_an_answer_was_cut(told: dict[str, Any]) -> None:
    found = own_answer([AIMessage(content="a", response_metadata=told)])
    assert found is not None
    assert found.stop_reason == "length"


def test_what_is_not_told_is_none() -> None:
    assert own_answer([AIMessage(content="a")]) == OwnAnswer(text="a")
    assert own_answer([]) is None


def test_chunks_add_up() -> None:
    pieces = [AIMessageChunk(content="it "), AIMessageChunk(content="is"), AIMessageChunk(content="")]
    pieces[2].usage_metadata = TOLD  # type: ignore[assignment]
    assert own_answer(pieces) == OwnAnswer(text="it is", n_prompt_tokens=11, n_response_tokens=3)


async def listed(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


async def v3_output(model: Any) -> Any:
    stream = await model.astream_events("x", version="v3")
    return await stream.output


WAYS = {
    "invoke": lambda model: model.invoke("x"),
    "ainvoke": lambda model: asyncio.run(model.ainvoke("x")),
    "stream": lambda model: list(model.stream("x")),
    "astream": lambda model: asyncio.run(listed(model.astream("x"))),
    "v3": lambda model: model.stream_events("x", version="v3").output,
    "async v3": lambda model: asyncio.run(v3_output(model)),
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_tools", [False, True])
def test_every_way_to_ask_tells_the_same(
    way: str, with_tools: bool, server: ChatServer, Route: Any, add_tool: Any
) -> None:
    """A call that the user's own model answers, by each funnel: one turn, its text or calls, and its tokens."""
    model: Any = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused", stream_usage=True)
    route = Route(auxiliary=["model:small-1"])
    with open_gate(), use_route(route):
        WAYS[way](model.bind_tools([add_tool]) if with_tools else model)
    (found,) = route.auxiliary_answers
    assert (found.n_prompt_tokens, found.n_response_tokens, found.stop_reason) == (11, 3, "stop")
    assert (found.text, found.tool_calls) == (("", (ADDS,)) if with_tools else ("it is three", ()))
    assert len(route.auxiliary) == 1
    assert [tool["function"]["name"] for tool in route.auxiliary[0].tools] == (["add"] if with_tools else [])


def test_a_stream_without_usage_leaves_its_tokens_untold(server: ChatServer, Route: Any) -> None:
    """As ChatOpenAI streams from an address of one's own unless stream_usage is set."""
    model = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused")
    route = Route(auxiliary=["model:small-1"])
    with open_gate(), use_route(route):
        list(model.stream("x"))
    assert route.auxiliary_answers == [OwnAnswer(text="it is three")]


def test_a_stream_that_is_left_tells_what_had_come(server: ChatServer, Route: Any) -> None:
    model = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused")
    route = Route(auxiliary=["model:small-1"])
    with open_gate(), use_route(route):
        pieces = model.stream("x")
        while not next(pieces).content:
            pass
        pieces.close()  # type: ignore[attr-defined]
    (found,) = route.auxiliary_answers
    assert (found.text, found.n_response_tokens) == ("it", None)
    assert route.auxiliary_errors == [None]


class Asks(BaseChatModel):
    """A user's model that asks another one."""

    inner: Any

    @property
    def _llm_type(self) -> str:
        return "asks"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages))])

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for piece in self.inner.stream(messages):
            yield ChatGenerationChunk(message=piece)


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_asks_another_is_one_call(way: str, server: ChatServer, Route: Any) -> None:
    """The tokens are counted once."""
    inner = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused", stream_usage=True)
    route = Route(auxiliary=[lambda site: True])
    with open_gate(), use_route(route):
        WAYS[way](Asks(inner=inner))
    (found,) = route.auxiliary_answers
    assert (found.text, found.n_response_tokens) == ("it is three", 3)


def test_async_calls_of_many_event_loops_share_one_client(server: ChatServer, Route: Any) -> None:
    """Each rollout has a loop of its own, and an async client's connections belong to the one that opened them."""
    model = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused")
    route = Route(auxiliary=["model:small-1"])
    with open_gate(), use_route(route):
        for _ in range(3):
            assert asyncio.run(model.ainvoke("x")).content == "it is three"
            pieces = asyncio.run(listed(model.astream("x")))
            assert "".join(piece.content for piece in pieces) == "it is three"
    with open_gate(), outside_rollouts():  # a judge's, say
        assert asyncio.run(model.ainvoke("x")).content == "it is three"
        assert len(asyncio.run(listed(model.astream("x")))) == len(pieces)
    assert len(route.auxiliary_answers) == 6


def test_what_an_own_model_raises_comes_out_and_is_recorded(Route: Any) -> None:
    with serve(lambda body: 400) as refusing:
        model = ChatOpenAI(model="small-1", base_url=refusing.address, api_key="unused", max_retries=0)
        route = Route(auxiliary=["model:small-1"])
        with open_gate(), use_route(route):
            for way in ("invoke", "ainvoke", "stream", "astream"):
                with pytest.raises(Exception, match="refused with 400"):
                    WAYS[way](model)
    assert [isinstance(error, BadRequestError) for error in route.auxiliary_errors] == [True] * 4
    assert route.auxiliary_answers == [None] * 4


def test_the_server_speaks_openai(server: ChatServer) -> None:
    """What these tests stand on: whole answers and streams say the same."""
    model = ChatOpenAI(model="small-1", base_url=server.address, api_key="unused", stream_usage=True)
    whole, streamed = model.invoke("x"), own_answer(list(model.stream("x")))
    assert own_answer([whole]) == streamed
    assert json.dumps(server.requests[-1]["messages"]) == '[{"content": "x", "role": "user"}]'
