"""How a node calls its model: each way reaches the policy once per call, and each call is trained."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor
from matrix.graphs import in_a_row, one_node
from matrix.harness import Roll, says

SECTION = "How a node calls the model"
TRAINED = ("agent", "trained")


def streamed(model: Any, messages: Any) -> Any:
    chunks = list(model.stream(messages))
    assert len(chunks) > 1
    return sum(chunks[1:], chunks[0])


async def astreamed(model: Any, messages: Any) -> Any:
    chunks = [chunk async for chunk in model.astream(messages)]
    assert len(chunks) > 1
    return sum(chunks[1:], chunks[0])


async def events_v2(model: Any, messages: Any) -> Any:
    events = [event async for event in model.astream_events(messages, version="v2")]
    assert events[-1]["event"] == "on_chat_model_end"
    return events[-1]["data"]["output"]


def batched(model: Any, messages: Any) -> Any:
    return model.batch([messages])


async def abatched(model: Any, messages: Any) -> Any:
    return await model.abatch([messages])


SYNC: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, messages: model.invoke(messages),
    "stream": streamed,
    "batch": batched,
}
ASYNC: dict[str, Callable[[Any, Any], Any]] = {
    "ainvoke": lambda model, messages: model.ainvoke(messages),
    "astream": astreamed,
    "astream_events v2": events_v2,
    "abatch": abatched,
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.row(SECTION, way)) for way in SYNC])
def test_in_a_sync_node(way: str, roll: Roll, chat: Any) -> None:
    model = chat()
    rolled = roll(one_node(lambda state: {"messages": SYNC[way](model, state["messages"])}), says("hello there you"))
    assert rolled.places == [TRAINED]
    assert rolled.said == ["hello there you"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.row(SECTION, way)) for way in ASYNC])
def test_in_an_async_node(way: str, roll: Roll, chat: Any) -> None:
    model = chat()

    async def agent(state: Any) -> Any:
        return {"messages": await ASYNC[way](model, state["messages"])}

    rolled = roll(one_node(agent), says("hello there you"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "stream_events v3")
def test_stream_events_v3(roll: Roll, chat: Any) -> None:
    needs_v3()
    model = chat()

    def agent(state: Any) -> Any:
        return {"messages": [model.stream_events(state["messages"], version="v3").output]}

    rolled = roll(one_node(agent), says("hello"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "astream_events v3")
def test_astream_events_v3(roll: Roll, chat: Any) -> None:
    needs_v3()
    model = chat()

    async def agent(state: Any) -> Any:
        stream = await model.astream_events(state["messages"], version="v3")
        return {"messages": [await stream.output]}

    rolled = roll(one_node(agent), says("hello"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


def needs_v3() -> None:
    if not hasattr(BaseChatModel, "_chat_model_stream_v3"):
        pytest.skip("needs a newer langchain-core")


@pytest.mark.row(SECTION, "batch of several")
def test_batch_of_several(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: Any) -> Any:
        return {"messages": model.batch([[HumanMessage(name)] for name in "abc"])}

    rolled = roll(one_node(agent), lambda seen: f"to {seen.last}")
    assert rolled.places == [TRAINED] * 3
    assert sorted(rolled.said) == ["to a", "to b", "to c"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, 'an inner graph streamed by stream_mode="messages"')
def test_inner_graph_by_stream_mode_messages(roll: Roll, chat: Any) -> None:
    model = chat()
    inner = one_node(lambda state: {"messages": [model.invoke(state["messages"])]})

    def outer(state: Any) -> Any:
        pieces = [chunk for chunk, _ in inner.stream(state, stream_mode="messages")]
        assert len(pieces) > 1
        return {"messages": [("ai", "".join(piece.text for piece in pieces))]}

    rolled = roll(one_node(outer), says("one two three"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "an inner graph by astream_events v2")
def test_inner_graph_by_astream_events(roll: Roll, chat: Any) -> None:
    model = chat()

    async def within(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    inner = one_node(within)

    async def outer(state: Any) -> Any:
        said = [e async for e in inner.astream_events(state, version="v2") if e["event"] == "on_chat_model_stream"]
        assert len(said) > 1
        return {"messages": [("ai", "".join(event["data"]["chunk"].text for event in said))]}

    rolled = roll(one_node(outer), says("one two three"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "prompt | model | parser")
def test_pipe(roll: Roll, chat: Any) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be short."), ("placeholder", "{messages}")])
    chain = prompt | chat() | StrOutputParser()
    rolled = roll(one_node(lambda state: {"messages": [("ai", chain.invoke(state))]}), says("hello"))
    assert rolled.places == [TRAINED]
    assert "Be short." in rolled.asked[0]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "a streamed pipe")
def test_streamed_pipe(roll: Roll, chat: Any) -> None:
    chain = ChatPromptTemplate.from_messages([("placeholder", "{messages}")]) | chat() | StrOutputParser()
    rolled = roll(one_node(lambda state: {"messages": [("ai", "".join(chain.stream(state)))]}), says("hello you"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "RunnableParallel")
def test_runnable_parallel(roll: Roll, chat: Any) -> None:
    model = chat()
    both = RunnableParallel(
        left=RunnableLambda(lambda _: "left") | model, right=RunnableLambda(lambda _: "right") | model
    )
    rolled = roll(
        one_node(lambda state: {"messages": list(both.invoke(state).values())}), lambda seen: f"the {seen.last} one"
    )
    assert rolled.places == [TRAINED] * 2
    assert sorted(rolled.said) == ["the left one", "the right one"]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "asyncio.gather")
def test_gather(roll: Roll, chat: Any) -> None:
    model = chat()

    async def agent(state: Any) -> Any:
        return {"messages": await asyncio.gather(*(model.ainvoke(name) for name in "abc"))}

    rolled = roll(one_node(agent), lambda seen: f"to {seen.last}")
    assert rolled.places == [TRAINED] * 3
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "asyncio.to_thread")
def test_to_thread(roll: Roll, chat: Any) -> None:
    model = chat()

    async def agent(state: Any) -> Any:
        return {"messages": [await asyncio.to_thread(model.invoke, state["messages"])]}

    rolled = roll(one_node(agent), says("hello"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "a blocking call in an async node")
def test_blocking_call_in_an_async_node(roll: Roll, chat: Any) -> None:
    model = chat()

    async def agent(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    rolled = roll(one_node(agent), says("hello"))
    assert rolled.places == [TRAINED]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "sync and async nodes in one graph")
def test_sync_and_async_nodes(roll: Roll, chat: Any) -> None:
    model = chat()

    def first(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def second(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    rolled = roll(in_a_row(first, second), says("one", "two"))
    assert rolled.places == [("first", "trained"), ("second", "trained")]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "ContextThreadPoolExecutor, or copy_context().run")
def test_threads_with_context(roll: Roll, chat: Any) -> None:
    model = chat()

    def agent(state: Any) -> Any:
        with ContextThreadPoolExecutor() as pool:
            first = pool.submit(model.invoke, "a").result()
        said: list[Any] = []
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: said.append(context.run(model.invoke, "b")))
        thread.start()
        thread.join()
        return {"messages": [first, *said]}

    rolled = roll(one_node(agent), lambda seen: f"to {seen.last}")
    assert rolled.places == [TRAINED] * 2
    assert rolled.said == ["to a", "to b"]
    assert rolled.account.trained == rolled.account.sampled
