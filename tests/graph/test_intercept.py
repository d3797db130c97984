"""The gate in front of LangChain's chat models, on real graphs."""

from __future__ import annotations

import asyncio
import contextvars
import operator
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import RetryPolicy, Send
from pydantic import BaseModel

from agenttrain.errors import EscapeError, GraphError, RoleError, RolloutStop
from agenttrain.graph import intercept
from agenttrain.graph.intercept import open_gate, outside_rollouts, use_route
from agenttrain.graph.self_test import self_test
from agenttrain.records import InvalidCall, ParsedCall, Reply

FUNNELS = (*intercept.FUNNELS, *intercept.LATER_FUNNELS)


class Echo(BaseChatModel):
    """A user's own model that answers by itself."""

    model_name: str = "echo"

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("own answer"))])


class Answer(BaseModel):
    """An answer."""

    value: int


def react(model: Any, tool: Any) -> Any:
    bound = model.bind_tools([tool])
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([tool]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile()


# What the gate catches


def test_a_model_in_a_closure_is_answered_by_the_route(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """The policy's text stands in the state, and the call says where it was made."""
    model, route = chat(), Route()
    ending = rollout(graph_of(lambda state: {"messages": [model.invoke(state["messages"])]}), route)
    assert ending.state["messages"][-1].content == "hello from policy"
    site = route.calls[0].site
    assert (site.node, site.step, site.attempt, site.model_identity) == (
        "agent",
        1,
        1,
        ("ChatOpenAI", "gpt-4o", "http://127.0.0.1:9/v1"),
    )
    assert site.task_id is not None
    assert site.checkpoint_ns == f"agent:{site.task_id}"


def test_a_model_built_inside_a_node_behind_a_prompt_is_caught(
    Route: Any, graph_of: Any, chat: Any, rollout: Any
) -> None:
    """LCEL reaches the gate with the prompt's messages."""
    prompt, route = ChatPromptTemplate.from_messages([("system", "be brief"), ("placeholder", "{messages}")]), Route()
    rollout(graph_of(lambda state: {"messages": [(prompt | chat()).invoke(state)]}), route)
    assert [m["role"] for m in route.calls[0].messages] == ["system", "user"]


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_bound_tools_arrive_in_one_format(
    provider: str, Route: Any, adds: Any, graph_of: Any, chat: Any, add_tool: Any, rollout: Any
) -> None:
    """OpenAI's and Anthropic's tool formats both arrive as OpenAI functions, and the tool is called."""
    anthropic = ChatAnthropic(model="claude-sonnet-4-5", api_key="unused", base_url="http://127.0.0.1:9")
    route = Route(adds)
    ending = rollout(react(chat() if provider == "openai" else anthropic, add_tool), route)
    function = route.calls[0].tools[0]["function"]
    assert function["name"] == "add"
    assert sorted(function["parameters"]["properties"]) == ["a", "b"]
    assert ending.state["messages"][-1].content == "it is 3"
    assert route.nodes == ["agent", "agent"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_read_from_the_reply(method: str, Route: Any, chat: Any) -> None:
    """ChatOpenAI's three ways of structured output give the object."""

    def script(call: Any) -> Any:
        return ParsedCall(id="t1", name="Answer", arguments={"value": 3}) if call.tools else '{"value": 3}'

    route = Route(script)
    with open_gate(), use_route(route):
        assert chat().with_structured_output(Answer, method=method).invoke("x") == Answer(value=3)
    if method == "json_schema":
        assert route.calls[0].response_format["json_schema"]["name"] == "Answer"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_anthropics_structured_output_is_read_from_the_reply(method: str, Route: Any) -> None:
    """Both of Anthropic's ways give the object."""

    def script(call: Any) -> Any:
        return ParsedCall(id="t1", name="Answer", arguments={"value": 3}) if call.tools else '{"value": 3}'

    model = ChatAnthropic(model="claude-sonnet-4-5", api_key="unused", base_url="http://127.0.0.1:9")
    with open_gate(), use_route(Route(script)):
        assert model.with_structured_output(Answer, method=method).invoke("x") == Answer(value=3)


def test_the_models_own_settings_reach_the_call(Route: Any, chat: Any) -> None:
    """max_tokens, stop, tool_choice and parallel_tool_calls come from the call or the model."""
    model, route = chat(max_tokens=7, stop=["END"]), Route()
    with open_gate(), use_route(route):
        model.bind(tool_choice="any", parallel_tool_calls=False).invoke("x")
        model.invoke("x", max_tokens=5, stop=["X"])
    first, second = route.calls
    assert (first.max_tokens, first.stop, first.tool_choice, first.parallel_tool_calls) == (
        7,
        ("END",),
        "required",
        False,
    )
    assert (second.max_tokens, second.stop) == (5, ("X",))


def test_several_answers_a_call_are_refused(Route: Any, chat: Any) -> None:
    """n > 1 says what to do instead."""
    with open_gate(), use_route(Route()), pytest.raises(GraphError, match=r"n > 1 answers.*model\.batch"):
        chat(n=2).invoke("x")


def test_parallel_calls_all_reach_the_route(Route: Any, chat: Any) -> None:
    """batch, RunnableParallel, gather and to_thread keep the context."""

    async def gathered() -> None:
        await asyncio.gather(*[model.ainvoke("x") for _ in range(3)])
        await asyncio.to_thread(model.invoke, "x")

    model, route = chat(), Route()
    with open_gate(), use_route(route):
        model.batch(["a", "b"])
        RunnableParallel(a=model, b=model).invoke("x")
        asyncio.run(gathered())
    assert len(route.calls) == 8


def test_subgraphs_and_send_branches_are_told_apart(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """Each Send branch has its own task id and path; a subgraph's calls name both nodes."""

    class State(TypedDict):
        items: list[int]
        outs: Annotated[list[str], operator.add]

    model, route = chat(), Route()
    inner = graph_of(lambda state: {"messages": [model.invoke(state["messages"])]})

    def work(state: dict[str, int]) -> dict[str, list[str]]:
        return {"outs": [inner.invoke({"messages": [("user", str(state["x"]))]})["messages"][-1].text]}

    builder = StateGraph(State)
    builder.add_node("work", work)
    builder.add_conditional_edges(START, lambda state: [Send("work", {"x": i}) for i in state["items"]], ["work"])
    builder.add_edge("work", END)
    ending = rollout(builder.compile(), route, {"items": [0, 1, 2, 3], "outs": []})
    assert ending.state["outs"] == ["hello from policy"] * 4
    sites = [call.site for call in route.calls]
    assert {site.node for site in sites} == {"agent"}
    assert all([p.partition(":")[0] for p in site.checkpoint_ns.split("|")] == ["work", "agent"] for site in sites)
    assert len({site.task_id for site in sites}) == 4


def test_entrypoints_and_tasks_are_caught(Route: Any, chat: Any, rollout: Any) -> None:
    """The functional API's tasks are nodes of their name, and its result is the state."""
    model, route = chat(), Route()

    @task
    def ask(x: str) -> str:
        return str(model.invoke(x).text)

    @entrypoint()
    def flow(xs: list[str]) -> list[str]:
        return [f.result() for f in [ask(x) for x in xs]]

    ending = rollout(flow, route, ["a", "b"])
    assert ending.state == ["hello from policy"] * 2
    assert route.nodes == ["ask", "ask"]


def test_a_retried_node_says_which_attempt_calls(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """RetryPolicy's second execution has the same task id and attempt 2."""
    model, route = chat(), Route()

    def flaky(state: MessagesState) -> dict[str, Any]:
        answer = model.invoke(state["messages"])
        if len(route.calls) < 2:
            raise ConnectionError("flaky")
        return {"messages": [answer]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", flaky, retry_policy=RetryPolicy(initial_interval=0.01, jitter=False))
    builder.add_edge(START, "agent")
    assert rollout(builder.compile(), route).error is None
    assert [call.site.attempt for call in route.calls] == [1, 2]
    assert len({call.site.task_id for call in route.calls}) == 1


def test_an_agent_with_summaries_freezes_them(Route: Any, adds: Any, chat: Any, add_tool: Any, rollout: Any) -> None:
    """create_agent works as it is, and SummarizationMiddleware's call on the same model is frozen with the reason."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware

    def script(call: Any) -> Any:
        return adds(call) if call.tools else "a summary"

    summaries = SummarizationMiddleware(model=chat(), trigger=("messages", 4), keep=("messages", 2))
    agent = create_agent(chat(), tools=[add_tool], middleware=[summaries])
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "1+2?")]
    route = Route(script)
    ending = rollout(agent, route, {"messages": talk})
    assert ending.error is None
    roles = [(call.role, call.role_reason) for call in route.calls]
    assert roles[0] == ("frozen", "LangChain says this call is for summarization")
    assert ("trained", "the graph's one model") in roles
    assert route.calls[0].site.source == "summarization"


def test_async_tools_run_and_call_the_gate(Route: Any, adds: Any, chat: Any, rollout: Any) -> None:
    """An agent whose tools are async only is run by an event loop."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    @tool
    async def add(a: int, b: int) -> int:
        """Add two whole numbers."""
        return a + b

    ending = rollout(create_agent(chat(), tools=[add]), Route(adds))
    assert ending.state["messages"][-1].content == "it is 3"


# Streaming


def test_a_stream_adds_up_to_the_message(Route: Any, chat: Any, add_tool: Any) -> None:
    """Text, then tool calls; the sum equals what invoke gives."""
    reply = Reply(
        call_id="turn-1",
        text="one two  three",
        reasoning="because",
        tool_calls=(ParsedCall(id="t1", name="add", arguments={"a": 1, "b": 2}),),
        n_prompt_ids=5,
        n_response_ids=3,
        model="tiny",
    )
    with open_gate(), use_route(Route(lambda call: reply)):
        whole = chat().invoke("x")
        pieces = list(chat().stream("x"))
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert [p.text for p in pieces[:3]] == ["one ", "two  ", "three"]
    for name in ("content", "tool_calls", "invalid_tool_calls", "usage_metadata", "response_metadata", "id"):
        assert getattr(total, name) == getattr(whole, name), name
    assert total.additional_kwargs == whole.additional_kwargs == {"reasoning_content": "because"}


def test_an_unreadable_call_stays_unreadable_when_streamed(Route: Any, graph_of: Any, chat: Any) -> None:
    """LangChain would mend its JSON while adding chunks up; the message in the state is still exact."""
    broken = InvalidCall(id="t1", name="add", arguments='{"a": 1', error="no end")
    reply = Reply(call_id="turn-1", text="", invalid_tool_calls=(broken,))
    model = chat()
    graph = graph_of(lambda state: {"messages": [model.invoke(state["messages"])]})
    with open_gate(), use_route(Route(lambda call: reply)):
        total = sum(list(model.stream("x"))[1:], next(model.stream("x")))
        states = [
            s
            for kind, s in graph.stream({"messages": [("user", "x")]}, stream_mode=["messages", "values"])
            if kind == "values"
        ]
    assert total.tool_calls == []
    assert len(total.invalid_tool_calls) >= 1
    message = states[-1]["messages"][-1]
    assert message.tool_calls == []
    assert [(c["args"], c["error"]) for c in message.invalid_tool_calls] == [('{"a": 1', "no end")]


def test_every_way_of_streaming_a_graph_asks_once(Route: Any, graph_of: Any, chat: Any) -> None:
    """stream_mode=messages, astream_events v2, and stream and astream inside a node."""
    model = chat()

    async def events(graph: Any) -> list[str]:
        return [e["event"] async for e in graph.astream_events({"messages": [("user", "x")]}, version="v2")]

    def streaming(state: Any) -> Any:
        pieces = list(model.stream(state["messages"]))
        return {"messages": [sum(pieces[1:], pieces[0])]}

    async def astreaming(state: Any) -> Any:
        pieces = [piece async for piece in model.astream(state["messages"])]
        return {"messages": [sum(pieces[1:], pieces[0])]}

    async def ainvoking(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    route = Route()
    with open_gate(), use_route(route):
        plain = graph_of(lambda state: {"messages": [model.invoke(state["messages"])]})
        tokens = [t.text for t, _ in plain.stream({"messages": [("user", "x")]}, stream_mode="messages")]
        assert "".join(tokens) == "hello from policy"
        assert len(tokens) >= 3
        assert "on_chat_model_stream" in asyncio.run(events(graph_of(ainvoking)))
        assert graph_of(streaming).invoke({"messages": [("user", "x")]})["messages"][-1].text == "hello from policy"
        result = asyncio.run(graph_of(astreaming).ainvoke({"messages": [("user", "x")]}))
        assert result["messages"][-1].text == "hello from policy"
    assert len(route.calls) == 4


def test_v3_streams_ask_once(Route: Any, chat: Any) -> None:
    """stream_events and astream_events of version v3, where langchain-core has them."""

    async def output() -> str:
        stream = await chat().astream_events("x", version="v3")
        return str((await stream.output).text)

    route = Route()
    with open_gate(), use_route(route):
        assert chat().stream_events("x", version="v3").output.text == "hello from policy"
        assert asyncio.run(output()) == "hello from policy"
    assert len(route.calls) == 2


def test_callbacks_and_tags_of_the_model_object_are_kept(Route: Any, chat: Any) -> None:
    """Starts and ends are told to handlers, and a streamed call keeps the tags of the model it was made on."""

    class Heard(BaseCallbackHandler):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def on_chat_model_start(self, serialized: Any, messages: Any, *, tags: Any = None, **kwargs: Any) -> None:
            self.events.append(("start", tags))

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.events.append(("end", response.generations[0][0].message.text))

    heard, route = Heard(), Route()
    model = chat(tags=["judge"], callbacks=[heard])
    with open_gate(), use_route(route):
        model.invoke("x")
        list(model.stream("x"))
    assert heard.events == [("start", ["judge"]), ("end", "hello from policy")] * 2
    assert [call.site.tags for call in route.calls] == [("judge",)] * 2


# The user's own models


def test_an_auxiliary_call_is_answered_by_the_users_own_model(
    Route: Any, graph_of: Any, chat: Any, rollout: Any
) -> None:
    """Its answer is untouched, it is recorded once in every style, and the policy isn't asked."""
    judge, model = Echo(), chat()

    async def node(state: Any) -> Any:
        said = [judge.invoke("a"), await judge.ainvoke("b"), *judge.stream("c")]
        said += [piece async for piece in judge.astream("d")]
        return {"messages": [model.invoke("x"), AIMessage(" ".join(m.text for m in said))]}

    route = Route(auxiliary=["model:echo"])
    ending = rollout(graph_of(node), route)
    assert ending.state["messages"][-1].text == "own answer own answer own answer own answer"
    assert [call.role_reason for call in route.auxiliary] == ["auxiliary: model:echo"] * 4
    assert route.auxiliary_errors == [None] * 4
    assert len(route.calls) == 1


def test_an_auxiliary_call_may_hold_images(Route: Any) -> None:
    """What the policy couldn't read is described in the record."""
    picture = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    route = Route(auxiliary=["model:echo"])
    with open_gate(), use_route(route):
        assert Echo().invoke([("user", picture)]).text == "own answer"
    assert route.auxiliary[0].messages[0]["content"] == "see [image_url]"


def test_a_failing_auxiliary_call_is_recorded_as_failed(Route: Any, chat: Any) -> None:
    """The error reaches the record and the graph."""
    route = Route(auxiliary=["model:gpt-4o"])
    with open_gate(), use_route(route), pytest.raises(Exception, match="Connection"):
        chat(max_retries=0).invoke("x")
    assert [type(error).__name__ for error in route.auxiliary_errors] == ["OpenAIConnectionError"]


def test_a_second_model_ends_the_run_with_the_line_to_paste(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """It names both models and stays known though the graph might have caught it."""
    one, two = chat(), chat(model="gpt-4o-mini")
    route = Route()
    ending = rollout(graph_of(lambda state: {"messages": [one.invoke("x"), two.invoke("x")]}), route)
    assert isinstance(ending.error, RoleError)
    assert 'auxiliary=["model:gpt-4o-mini"]' in str(ending.error)
    assert route.book.refused is ending.error


def test_outside_of_rollouts_the_users_own_models_answer() -> None:
    """A judge that agenttrain itself runs while rollouts run is neither routed nor refused."""
    with open_gate() as gate, outside_rollouts():
        assert Echo().invoke("x").text == "own answer"
    assert gate.n_escapes == 0


# Escapes


def test_a_call_from_an_own_thread_is_refused(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """It names the thread, the line and the fix."""
    model, route = chat(), Route()

    def node(state: Any) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
            return {"messages": [pool.submit(lambda: model.invoke("x")).result()]}

    error = rollout(graph_of(node), route).error
    assert isinstance(error, EscapeError)
    assert "mine_0" in str(error)
    assert "test_intercept.py" in str(error)
    assert "ContextThreadPoolExecutor" in str(error)


def test_a_call_from_a_loops_executor_is_refused(chat: Any, graph_of: Any) -> None:
    """run_in_executor copies no context; an async node stands on no stack while it waits, so it is not named."""

    async def agent(state: Any) -> Any:
        loop = asyncio.get_running_loop()
        return {"messages": [await loop.run_in_executor(None, chat().invoke, "x")]}

    with open_gate(), pytest.raises(EscapeError, match=r"on thread 'asyncio_0'.*asyncio\.to_thread"):
        asyncio.run(graph_of(agent).ainvoke({"messages": []}))


def test_threads_that_copy_the_context_are_routed(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """The two fixes that the error names work."""
    model, route = chat(), Route()

    def node(state: Any) -> Any:
        with ContextThreadPoolExecutor(1) as pool:
            first = pool.submit(model.invoke, "x").result()
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(contextvars.copy_context().run, model.invoke, "x").result()
        return {"messages": [first, second]}

    assert rollout(graph_of(node), route).error is None
    assert route.nodes == ["agent", "agent"]


def test_allowed_escapes_are_answered_and_counted() -> None:
    """The user's own model answers, and the first stays known."""
    with open_gate(allow_escapes=True) as gate:
        assert Echo().invoke("x").text == "own answer"
        assert next(iter(Echo().stream("x"))).text == "own answer"
    assert gate.n_escapes >= 2
    assert isinstance(gate.first_escape, EscapeError)


def test_one_strict_gate_makes_all_strict() -> None:
    """An escape can't be told to belong to the lenient one."""
    with open_gate(allow_escapes=True), open_gate() as strict, pytest.raises(EscapeError):
        Echo().invoke("x")
    assert strict.n_escapes == 1


# The gate itself


def test_importing_patches_nothing() -> None:
    """The funnels are langchain-core's own until a gate opens."""
    code = (
        "from langchain_core.language_models.chat_models import BaseChatModel as B\n"
        f"names = [n for n in {FUNNELS!r} if hasattr(B, n)]\n"
        "before = [vars(B)[n] for n in names]\n"
        "import agenttrain.graph.load, agenttrain.graph.run, agenttrain.graph.models\n"
        "assert before == [vars(B)[n] for n in names]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_funnels_are_back_after_the_last_gate() -> None:
    """Nested and overlapping gates share one patch."""
    before = [vars(BaseChatModel).get(name) for name in FUNNELS]
    with open_gate():
        inside = [vars(BaseChatModel).get(name) for name in FUNNELS]
        with open_gate():
            assert [vars(BaseChatModel).get(name) for name in FUNNELS] == inside
        assert [vars(BaseChatModel).get(name) for name in FUNNELS] == inside
    assert [vars(BaseChatModel).get(name) for name in FUNNELS] == before
    assert all(a is not b for a, b in zip(before, inside, strict=True) if a is not None)


def test_someone_elses_wrapper_over_the_gate_survives_it(Route: Any, chat: Any, monkeypatch: Any) -> None:
    """What was put over the gate while it was open stays, and the gate below lets everything through."""
    monkeypatch.setattr(BaseChatModel, "stream", BaseChatModel.stream)  # undone after the test
    with open_gate():
        gated = BaseChatModel.stream

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return gated(self, *args, **kwargs)

        BaseChatModel.stream = wrapper  # type: ignore[method-assign]
    assert BaseChatModel.stream is wrapper
    assert next(iter(Echo().stream("x"))).text == "own answer"
    with open_gate(), use_route(Route()):
        assert "".join(p.text for p in chat().stream("x")) == "hello from policy"


def test_the_users_model_is_not_changed(Route: Any, chat: Any) -> None:
    """Fields, bound settings and instance attributes are the same after a rollout's calls."""
    model = chat(max_tokens=7)
    model._serialized  # noqa: B018 (langchain-core keeps it on the object at the first call of any kind)
    before = (model.model_dump(), dict(vars(model)))
    with open_gate(), use_route(Route()):
        model.invoke("x")
        list(model.stream("x"))
    assert (model.model_dump(), dict(vars(model))) == before


def test_the_llm_cache_is_bypassed(Route: Any, chat: Any) -> None:
    """Equal prompts are asked again, and nothing is stored."""
    cache = InMemoryCache()
    route = Route(lambda call: f"answer {len(route.calls)}")
    set_llm_cache(cache)
    try:
        with open_gate(), use_route(route):
            said = [chat().invoke("same").text for _ in range(2)] + [chat(cache=True).invoke("same").text]
    finally:
        set_llm_cache(None)
    assert said == ["answer 1", "answer 2", "answer 3"]
    assert cache._cache == {}


def test_rollouts_in_one_loop_keep_their_routes(Route: Any, graph_of: Any, chat: Any) -> None:
    """Twenty concurrent graphs on one event loop each get their own route's answers."""
    model = chat()

    async def node(state: Any) -> Any:
        await asyncio.sleep(0)
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = graph_of(node)

    async def one(i: int) -> str:
        with use_route(Route(lambda call: f"policy {i}")):
            return str((await graph.ainvoke({"messages": [("user", "x")]}))["messages"][-1].text)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*[one(i) for i in range(20)])

    with open_gate():
        assert asyncio.run(all_of_them()) == [f"policy {i}" for i in range(20)]


def test_the_self_test_passes_on_the_installed_version() -> None:
    """Every funnel is caught, and nothing stays patched."""
    before = [vars(BaseChatModel).get(name) for name in FUNNELS]
    self_test()
    assert [vars(BaseChatModel).get(name) for name in FUNNELS] == before


def test_the_self_test_names_the_funnel_that_is_missed(monkeypatch: Any) -> None:
    """A langchain-core whose stream the gate doesn't know is refused by name and version."""
    monkeypatch.setattr(intercept, "FUNNELS", tuple(n for n in intercept.FUNNELS if n != "stream"))
    with pytest.raises(GraphError, match=r"BaseChatModel\.stream .*langchain-core \d"):
        self_test()


# RolloutStop


def stopping(call: Any) -> BaseException:
    return RolloutStop("budget")


def test_a_stop_passes_retry_fallbacks_and_excepts(Route: Any, graph_of: Any, chat: Any, rollout: Any) -> None:
    """`except Exception`, with_retry and with_fallbacks don't hold it, in sync and async nodes; it is asked once."""
    model = chat().with_retry(stop_after_attempt=3).with_fallbacks([chat()])

    def node(state: Any) -> Any:
        try:
            return {"messages": [model.invoke("x")]}
        except Exception:
            return {"messages": [AIMessage("swallowed")]}

    async def anode(state: Any) -> Any:
        try:
            return {"messages": [await model.ainvoke("x")]}
        except Exception:
            return {"messages": [AIMessage("swallowed")]}

    for function in (node, anode):
        route = Route(stopping)
        ending = rollout(graph_of(function), route)
        assert type(ending.error) is RolloutStop
        assert len(route.calls) == 1
        assert len(ending.state["messages"]) == 1


def test_a_stop_passes_retry_policies_tools_and_branches(
    Route: Any, graph_of: Any, chat: Any, adds: Any, add_tool: Any, rollout: Any
) -> None:
    """A node's RetryPolicy, ToolNode's error handling and parallel branches don't hold it."""
    from langchain_core.tools import tool

    model = chat()

    @tool
    def ask(q: str) -> str:
        """Ask a model."""
        return str(model.invoke(q).text)

    asking = AIMessage("", tool_calls=[{"name": "ask", "args": {"q": "x"}, "id": str(i)} for i in range(2)])
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([ask], handle_tool_errors=True), retry_policy=RetryPolicy(initial_interval=0.01))
    builder.add_edge(START, "tools")
    assert type(rollout(builder.compile(), Route(stopping), {"messages": [asking]}).error) is RolloutStop

    wide = StateGraph(MessagesState)
    for name in ("a", "b"):
        wide.add_node(name, lambda state: {"messages": [model.invoke("x")]})
        wide.add_edge(START, name)
    assert type(rollout(wide.compile(), Route(stopping)).error) is RolloutStop


@pytest.mark.parametrize("style", ["stream", "astream", "v3", "av3"])
def test_a_stop_passes_streams(style: str, Route: Any, chat: Any) -> None:
    """It comes out of every kind of stream."""

    async def astream() -> None:
        async for _ in chat().astream("x"):
            pass

    async def av3() -> None:
        await (await chat().astream_events("x", version="v3")).output

    styles = {
        "stream": lambda: list(chat().stream("x")),
        "astream": lambda: asyncio.run(astream()),
        "v3": lambda: chat().stream_events("x", version="v3").output,
        "av3": lambda: asyncio.run(av3()),
    }
    with open_gate(), use_route(Route(stopping)), pytest.raises(RolloutStop):
        styles[style]()
