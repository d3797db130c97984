"""Where the model lives: wherever a graph holds or makes its model, its calls are recorded and trained."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import ConfigurableField, RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.runtime import Runtime
from matrix.graphs import answer, one_node
from matrix.harness import Roll, Rolled, call, says

from agenttrain import chat_model

SECTION = "Where the model lives"
GLOBAL = ChatOpenAI(model="gpt-4o", api_key="unused", base_url="http://127.0.0.1:9/v1")
UNUSED = {"api_key": "unused", "base_url": "http://127.0.0.1:9/v1"}


def once(rolled: Rolled) -> None:
    """The node's one call is trained in full."""
    assert rolled.places == [("agent", "trained")]
    assert rolled.account.trained == rolled.account.sampled > 0


@pytest.mark.row(SECTION, "in a global of the module")
def test_global(roll: Roll) -> None:
    once(roll(one_node(lambda state: {"messages": [GLOBAL.invoke(state["messages"])]}), says("hello")))


@pytest.mark.row(SECTION, "in a closure")
def test_closure(roll: Roll, chat: Any) -> None:
    once(roll(one_node(answer(chat())), says("hello")))


@pytest.mark.row(SECTION, "attribute of an object")
def test_attribute(roll: Roll, chat: Any) -> None:
    class Agent:
        def __init__(self) -> None:
            self.llm = chat()

        def answer(self, state: MessagesState) -> Any:
            return {"messages": [self.llm.invoke(state["messages"])]}

    once(roll(one_node(Agent().answer), says("hello")))


@pytest.mark.row(SECTION, "in a callable object that is the node")
def test_callable_object(roll: Roll, chat: Any) -> None:
    class Agent:
        def __init__(self) -> None:
            self.llm = chat()

        def __call__(self, state: MessagesState) -> Any:
            return {"messages": [self.llm.invoke(state["messages"])]}

    once(roll(one_node(Agent()), says("hello")))


@pytest.mark.row(SECTION, "built in the node")
def test_built_in_the_node(roll: Roll, chat: Any) -> None:
    once(roll(one_node(lambda state: {"messages": [chat().invoke(state["messages"])]}), says("hello")))


@pytest.mark.row(SECTION, "init_chat_model in the node")
def test_init_chat_model(roll: Roll) -> None:
    def agent(state: MessagesState) -> Any:
        return {"messages": [init_chat_model("openai:gpt-4o", **UNUSED).invoke(state["messages"])]}

    once(roll(one_node(agent), says("hello")))


@pytest.mark.row(SECTION, "inside a tool")
def test_inside_a_tool(roll: Roll, chat: Any) -> None:
    """The agent's calls and the tool's are one model's, so both are trained, each in its node."""
    model = chat()

    @tool
    def think(about: str) -> str:
        """Think it over."""
        return model.invoke(f"Think about {about}").text

    bound = model.bind_tools([think])
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([think]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    rolled = roll(builder.compile(), says(call("think", about="tea"), "it is hot", "tea is hot"))
    assert rolled.places == [("agent", "trained"), ("tools", "trained"), ("agent", "trained")]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "behind with_retry")
def test_with_retry(roll: Roll, chat: Any) -> None:
    once(roll(one_node(answer(chat().with_retry())), says("hello")))


@pytest.mark.row(SECTION, "behind with_fallbacks")
def test_with_fallbacks(roll: Roll, chat: Any) -> None:
    """A policy doesn't fail, so the fallback is never asked."""
    once(roll(one_node(answer(chat().with_fallbacks([chat("gpt-4o-mini")]))), says("hello")))


@pytest.mark.row(SECTION, "behind with_config tags")
def test_with_config(roll: Roll, chat: Any) -> None:
    rolled = roll(one_node(answer(chat().with_config(tags=["draft"]))), says("hello"))
    once(rolled)
    assert "draft" in rolled.turns[0].site.tags


@pytest.mark.row(SECTION, "behind bind")
def test_bind(roll: Roll, chat: Any) -> None:
    rolled = roll(one_node(answer(chat().bind(max_tokens=64))), says("hello"))
    once(rolled)
    assert rolled.turns[0].sampling is not None
    assert rolled.turns[0].sampling.max_tokens == 64


@pytest.mark.row(SECTION, "behind configurable_fields")
def test_configurable_fields(roll: Roll, chat: Any) -> None:
    model = chat().configurable_fields(max_tokens=ConfigurableField(id="cap"))

    def agent(state: MessagesState) -> Any:
        return {"messages": [model.with_config(configurable={"cap": 32}).invoke(state["messages"])]}

    rolled = roll(one_node(agent), says("hello"))
    once(rolled)
    assert rolled.turns[0].sampling is not None
    assert rolled.turns[0].sampling.max_tokens == 32


@pytest.mark.row(SECTION, "behind configurable_alternatives")
def test_configurable_alternatives(roll: Roll, chat: Any) -> None:
    model = chat().configurable_alternatives(ConfigurableField(id="llm"), mini=chat("gpt-4o-mini"))

    def agent(state: MessagesState) -> Any:
        return {"messages": [model.with_config(configurable={"llm": "mini"}).invoke(state["messages"])]}

    rolled = roll(one_node(agent), says("hello"))
    once(rolled)
    assert rolled.turns[0].site.model_name == "gpt-4o-mini"


@pytest.mark.row(SECTION, "init_chat_model(configurable_fields=…)")
def test_init_chat_model_configurable(roll: Roll) -> None:
    model = init_chat_model("openai:gpt-4o", configurable_fields=("model",), **UNUSED)

    def agent(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"], {"configurable": {"model": "gpt-4o-mini"}})]}

    rolled = roll(one_node(agent), says("hello"))
    once(rolled)
    assert rolled.turns[0].site.model_name == "gpt-4o-mini"


@dataclass
class Models:
    """A runtime context that carries the model."""

    model: BaseChatModel


@pytest.mark.row(SECTION, "in the runtime context")
def test_runtime_context(roll: Roll, chat: Any) -> None:
    @contextmanager
    def setup(task: Any) -> Any:
        yield {"context": Models(chat())}

    def agent(state: MessagesState, runtime: Runtime[Models]) -> Any:
        return {"messages": [runtime.context.model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState, context_schema=Models)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    once(roll(builder.compile(), says("hello"), setup=setup))


@pytest.mark.row(SECTION, 'in config["configurable"]')
def test_configurable_of_the_config(roll: Roll, chat: Any) -> None:
    @contextmanager
    def setup(task: Any) -> Any:
        yield {"configurable": {"model": chat()}}

    def agent(state: MessagesState, config: RunnableConfig) -> Any:
        return {"messages": [config["configurable"]["model"].invoke(state["messages"])]}

    once(roll(one_node(agent), says("hello"), setup=setup))


@pytest.mark.row(SECTION, 'named by config["configurable"], made in the node')
def test_named_by_the_config(roll: Roll) -> None:
    @contextmanager
    def setup(task: Any) -> Any:
        yield {"configurable": {"model": "openai:gpt-4o-mini"}}

    def agent(state: MessagesState, config: RunnableConfig) -> Any:
        model = init_chat_model(config["configurable"]["model"], **UNUSED)
        return {"messages": [model.invoke(state["messages"])]}

    rolled = roll(one_node(agent), says("hello"), setup=setup)
    once(rolled)
    assert rolled.turns[0].site.model_name == "gpt-4o-mini"


@pytest.mark.row(SECTION, "agenttrain.chat_model")
def test_chat_model(roll: Roll, chat: Any) -> None:
    once(roll(one_node(answer(chat_model(default=chat()))), says("hello")))


@pytest.mark.row(SECTION, "a subclass of a chat model that overrides invoke")
def test_subclass(roll: Roll) -> None:
    class Logged(ChatOpenAI):
        def invoke(self, *args: Any, **kwargs: Any) -> Any:
            return super().invoke(*args, **kwargs)

    once(roll(one_node(answer(Logged(model="gpt-4o", **UNUSED))), says("hello")))
