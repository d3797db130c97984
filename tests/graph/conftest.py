"""A scripted Route and the small graphs that the tests of graph/ run; nothing here needs a model or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agenttrain.graph.intercept import open_gate
from agenttrain.graph.roles import RoleBook
from agenttrain.graph.run import GraphEnding, run_graph
from agenttrain.graph.runnable import RunnableGraph, opened
from agenttrain.records import CallSite, ModelCall, OwnAnswer, ParsedCall, Reply, Role


class ScriptedRoute:
    """Answers by a function of the call; keeps every call in order."""

    def __init__(self, script: Callable[[ModelCall], Any] = lambda call: "hello from policy", **roles: Any) -> None:
        self.script = script
        self.book = RoleBook(**roles)
        self.calls: list[ModelCall] = []
        self.auxiliary: list[ModelCall] = []
        self.auxiliary_errors: list[BaseException | None] = []
        self.auxiliary_answers: list[OwnAnswer | None] = []
        self._lock = threading.Lock()

    def role(self, site: CallSite) -> tuple[Role, str]:
        return self.book.role(site)

    def answer(self, call: ModelCall) -> Reply:
        with self._lock:
            self.calls.append(call)
            call_id = f"turn-{len(self.calls)}"
        said = self.script(call)
        if isinstance(said, BaseException):
            raise said
        if isinstance(said, ParsedCall):
            return Reply(call_id=call_id, text="", tool_calls=(said,), model="tiny")
        return said if isinstance(said, Reply) else Reply(call_id=call_id, text=said, model="tiny")

    async def aanswer(self, call: ModelCall) -> Reply:
        return self.answer(call)

    def auxiliary_began(self, call: ModelCall) -> str:
        self.auxiliary.append(call)
        return str(len(self.auxiliary))

    def auxiliary_ended(self, turn_id: str, error: BaseException | None, answer: OwnAnswer | None) -> None:
        self.auxiliary_errors.append(error)
        self.auxiliary_answers.append(answer)

    @property
    def nodes(self) -> list[str | None]:
        return [call.site.node for call in self.calls]


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def adds_once(call: ModelCall) -> Any:
    """A script: call `add` first, then say the last tool's answer."""
    if call.tools and call.messages[-1]["role"] != "tool":
        return ParsedCall(id="t1", name="add", arguments={"a": 1, "b": 2})
    return f"it is {call.messages[-1]['content']}"


def one_node(function: Any, **compiling: Any) -> Any:
    """A graph with one node, `agent`."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", function)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    return builder.compile(**compiling)


def dead_model(**settings: Any) -> ChatOpenAI:
    """A chat model whose server doesn't exist."""
    return ChatOpenAI(**{"model": "gpt-4o", "api_key": "unused", "base_url": "http://127.0.0.1:9/v1", **settings})


@pytest.fixture(scope="session")
def Route() -> type[ScriptedRoute]:
    return ScriptedRoute


@pytest.fixture(scope="session")
def graph_of() -> Any:
    return one_node


@pytest.fixture(scope="session")
def chat() -> Any:
    return dead_model


@pytest.fixture(scope="session")
def add_tool() -> Any:
    return add


@pytest.fixture(scope="session")
def adds() -> Any:
    return adds_once


@pytest.fixture(scope="session")
def open_graph() -> Any:
    """Opens any target as the loader would."""
    return lambda target: opened(target, name="graph.py:graph", explain=lambda error: TypeError(repr(error)))


@pytest.fixture
def rollout(open_graph: Any) -> Callable[..., GraphEnding]:
    """Runs a target once behind the gate."""

    def run(target: Any, route: Any, input: Any = None, **options: Any) -> GraphEnding:
        with open_gate():
            if isinstance(target, RunnableGraph):
                return run_graph(target, route=route, **settings(input, options))
            with open_graph(target) as runnable:
                return run_graph(runnable, route=route, **settings(input, options))

    def settings(input: Any, options: dict[str, Any]) -> dict[str, Any]:
        asked = {"messages": [("user", "hi")]} if input is None else input
        return {"input": asked, "recursion_limit": 25, "thread_id": "t", **options}

    return run


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Writes a file of a user's project and gives its path."""

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put
