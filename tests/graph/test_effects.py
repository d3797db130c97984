"""An external tool's stand-in runs in its place inside a rollout, and nowhere else."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import (
    BaseTool,
    InjectedToolArg,
    InjectedToolCallId,
    StructuredTool,
    Tool,
    ToolException,
    tool,
)
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from pydantic import BaseModel, ValidationError

from agenttrain.errors import EffectError, EscapeError, PolicyFailure
from agenttrain.graph.effects import Effects, effects_of, open_effects
from agenttrain.graph.idempotency import idempotency_key
from agenttrain.graph.intercept import open_gate, outside_rollouts
from agenttrain.graph.policy_model import kept_refusals
from agenttrain.records import ParsedCall, RolloutRequest, Task
from agenttrain.tool_spec import External

REQUEST = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)


class Refund(BaseModel):
    order: str
    cents: int = 100


class World:
    """What really happened, and what was only played."""

    def __init__(self) -> None:
        self.paid: list[Any] = []
        self.played: list[Any] = []

    def pay(self, order: str, cents: int = 100) -> str:
        """Refund an order."""
        self.paid.append((order, cents))
        return f"paid {order}"

    async def apay(self, order: str, cents: int = 100) -> str:
        """Refund an order."""
        return self.pay(order, cents)

    def play(self, order: str, cents: int) -> str:
        self.played.append((order, cents))
        return f"played {order}"

    async def aplay(self, order: str, cents: int) -> str:
        await asyncio.sleep(0)
        return self.play(order, cents)


@pytest.fixture
def world() -> World:
    return World()


@contextmanager
def in_rollout(**tools: Any) -> Iterator[Effects]:
    with open_effects(tools), effects_of(REQUEST, tools, run_id="run") as effects:
        yield effects


def of_subclass(world: World) -> BaseTool:
    class RefundTool(BaseTool):
        name: str = "refund"
        description: str = "Refund an order."
        args_schema: Any = Refund

        def _run(self, order: str, cents: int = 100, run_manager: Any = None) -> str:
            return world.pay(order, cents)

    return RefundTool()


def of_async_subclass(world: World) -> BaseTool:
    class RefundTool(BaseTool):
        name: str = "refund"
        description: str = "Refund an order."

        def _run(self, order: str, cents: int = 100) -> str:
            return world.pay(order, cents)

        async def _arun(self, order: str, cents: int = 100) -> str:
            return world.pay(order, cents)

    return RefundTool()


KINDS: dict[str, Any] = {
    "@tool": lambda world: tool("refund")(world.pay),
    "async @tool": lambda world: tool("refund")(world.apay),
    "StructuredTool": lambda world: StructuredTool.from_function(world.pay, world.apay, name="refund"),
    "JSON schema": lambda world: StructuredTool(
        name="refund", description="x", func=world.pay, coroutine=world.apay, args_schema=Refund.model_json_schema()
    ),
    "subclass": of_subclass,
    "async subclass": of_async_subclass,
}
GIVEN = {"order": "A1", "cents": 5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stand_in", ["play", "aplay"])
@pytest.mark.parametrize("is_async", [False, True], ids=["invoke", "ainvoke"])
def test_the_stand_in_runs_in_the_tools_place(kind: str, stand_in: str, is_async: bool, world: World) -> None:
    """However the tool is made and called; the tool object stays as it was, and runs itself afterwards."""
    refund = KINDS[kind](world)
    before, run = dict(refund.__dict__), BaseTool.run
    with in_rollout(refund=External(stand_in=getattr(world, stand_in))) as effects:
        said = asyncio.run(refund.ainvoke(GIVEN)) if is_async else refund.invoke(GIVEN)
    assert (said, world.paid, world.played) == ("played A1", [], [("A1", 5)])
    assert (effects.ran, effects.stood_in) == ({}, {"refund": 1})
    assert (refund.__dict__ | {"_injected_args_keys": None}) == (before | {"_injected_args_keys": None})
    assert BaseTool.run is run
    assert asyncio.run(refund.ainvoke(GIVEN)) == "paid A1"


def test_a_tool_of_one_text(world: World) -> None:
    """LangChain's plain Tool gives its argument by position."""
    refund = Tool(name="refund", description="x", func=world.pay)
    with in_rollout(refund=External(stand_in=lambda text: f"played {text}")):
        assert refund.invoke("A1") == "played A1"
        assert refund.invoke({"tool_input": "A2"}) == "played A2"
    assert world.paid == []


def test_arguments_are_validated_as_the_tools_are(world: World) -> None:
    """By its schema, with its defaults and conversions; what it refuses reaches no stand-in."""
    refund = KINDS["@tool"](world)
    with in_rollout(refund=External(stand_in=world.play)):
        refund.invoke({"order": "A1", "cents": "7"})
        refund.invoke({"order": "A1"})
        with pytest.raises(ValidationError):
            refund.invoke({"order": "A1", "cents": "much"})
    assert (world.paid, world.played) == ([], [("A1", 7), ("A1", 100)])


def test_content_and_artifact_and_the_tools_own_errors(world: World) -> None:
    """What the stand-in gives is taken as what the tool gives."""

    @tool(response_format="content_and_artifact")
    def refund(order: str) -> tuple[str, Any]:
        """Refund an order."""
        return world.pay(order), None

    refund.handle_tool_error = True

    def play(order: str) -> tuple[str, Any]:
        if order == "gone":
            raise ToolException("no such order")
        return f"played {order}", {"order": order}

    call = {"type": "tool_call", "id": "c1", "name": "refund"}
    with in_rollout(refund=External(stand_in=play)):
        said = refund.invoke({**call, "args": {"order": "A1"}})
        failed = refund.invoke({**call, "args": {"order": "gone"}})
    assert (said.content, said.artifact, said.tool_call_id) == ("played A1", {"order": "A1"}, "c1")
    assert (failed.content, failed.status) == ("no such order", "error")
    assert world.paid == []


def test_callbacks_are_the_tools(world: World) -> None:
    """A tracer sees the tool by its name, with its arguments and the stand-in's answer."""
    seen: list[Any] = []

    class Watch(BaseCallbackHandler):
        def on_tool_start(self, serialized: Any, input_str: str, *, inputs: Any = None, **kwargs: Any) -> None:
            seen.append((serialized["name"], inputs))

        def on_tool_end(self, output: Any, **kwargs: Any) -> None:
            seen.append(output)

    with in_rollout(refund=External(stand_in=world.play)):
        KINDS["@tool"](world).invoke(GIVEN, config={"callbacks": [Watch()]})
    assert seen == [("refund", GIVEN), "played A1"]


def tool_node(*tools: Any) -> Any:
    return StateGraph(MessagesState).add_node("tools", ToolNode(list(tools))).add_edge(START, "tools").compile()


def asked(name: str, n: int = 1, **arguments: Any) -> Any:
    """A state whose last message calls a tool n times."""
    calls = [{"name": name, "args": arguments, "id": f"c{i}", "type": "tool_call"} for i in range(n)]
    return {"messages": [AIMessage("", tool_calls=calls)]}


def answers(state: Any) -> list[Any]:
    return [message.content for message in state["messages"] if isinstance(message, ToolMessage)]


def test_what_the_runtime_injects_goes_to_a_stand_in_that_asks_for_it(world: World) -> None:
    """By the tool's own names; one that takes everything by ** gets what the model told, and no more."""

    @tool
    def refund(
        order: str,
        runtime: ToolRuntime,
        config: RunnableConfig,
        state: Annotated[Any, InjectedState],
        call_id: Annotated[str, InjectedToolCallId],
    ) -> str:
        """Refund an order."""
        return world.pay(order)

    def none(order: str) -> str:
        return order

    def some(order: str, state: Any, call_id: str) -> str:
        return f"{order} {len(state['messages'])} {call_id}"

    def more(order: str, runtime: ToolRuntime, config: RunnableConfig) -> str:
        return f"{order} {runtime.tool_call_id} {config['metadata']['langgraph_node']}"

    def every(**told: Any) -> str:
        return f"{sorted(told)}"

    said = []
    for stand_in in (none, some, more, every):
        with in_rollout(refund=External(stand_in=stand_in)):
            said += answers(tool_node(refund).invoke(asked("refund", order="A1")))
    assert said == ["A1", "A1 1 c0", "A1 c0 tools", "['order']"]
    assert world.paid == []


def test_a_stand_in_for_an_agent_of_langchain(world: World, rollout: Any, Route: Any) -> None:
    """Two parallel calls of one tool, and a tool of which nothing is declared."""
    refund = KINDS["async @tool"](world)

    @tool
    def look_up(order: str) -> str:
        """Look an order up."""
        return f"{order} is late"

    def script(call: Any) -> Any:
        n = len(call.messages)
        name = {1: "refund", 3: "look_up"}.get(n)
        given = {"order": "A1"}
        return ParsedCall(id=f"c{n}", name=name, arguments=given) if name else "done"

    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="gpt-4o", api_key="unused", base_url="http://127.0.0.1:9/v1")
    agent = create_agent(model, tools=[refund, look_up])
    with in_rollout(refund=External(stand_in=world.play)) as effects:
        ending = rollout(agent, Route(script))
    assert ending.error is None
    assert answers(ending.state) == ["played A1", "A1 is late"]
    assert (effects.ran, effects.stood_in, world.paid) == ({"look_up": 1}, {"refund": 1}, [])


def test_threads_that_keep_the_context_and_those_that_do_not(world: World) -> None:
    """One that lost it can't run the tool: it belongs to no rollout, and the tool must not run."""
    refund, tools = KINDS["@tool"](world), {"refund": External(stand_in=world.play)}
    with open_gate() as gate, open_effects(tools), effects_of(REQUEST, tools, run_id="run"):
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(context.run, refund.invoke, GIVEN).result() == "played A1"
            with pytest.raises(EscapeError, match=r"The external tool 'refund' was called on thread .*copy_context"):
                threads.submit(refund.invoke, GIVEN).result()
            assert isinstance(gate.first_escape, EscapeError)
            served = contextvars.Context()

            def by_server() -> Any:
                with outside_rollouts():
                    return refund.invoke(GIVEN)

            assert threads.submit(served.run, by_server).result() == "paid A1"
    assert (world.paid, len(world.played)) == ([("A1", 5)], 1)


def test_other_tools_run_themselves_on_any_thread(world: World) -> None:
    """Permitted, read only, and those of which nothing is declared."""
    tools = {"refund": External(permitted=True), "look_up": "read_only"}
    refund, look_up = KINDS["@tool"](world), tool("look_up")(world.pay)
    with open_effects(tools), effects_of(REQUEST, tools, run_id="run") as effects:
        refund.invoke(GIVEN)
        look_up.invoke(GIVEN)
        tool("other")(world.pay).invoke(GIVEN)
        thread = threading.Thread(target=refund.invoke, args=(GIVEN,))
        thread.start()
        thread.join()
    assert len(world.paid) == 4
    assert effects.ran == {"look_up": 1, "other": 1, "refund": 1}


def test_what_nothing_permits_never_runs(world: World) -> None:
    """The refusal is kept where the graph's own code catches it."""
    refund, refusals = KINDS["@tool"](world), list[Any]()
    with kept_refusals(refusals), in_rollout(refund=External()), pytest.raises(EffectError) as raised:
        refund.invoke(GIVEN)
    assert refusals == [raised.value]
    assert str(raised.value).startswith("The tool 'refund' is external, and nothing permits it to run in a rollout.")
    assert world.paid == []


JSON_SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "string"}, "cents": {"type": "integer", "default": 100}},
    "required": ["order"],
}


@pytest.mark.parametrize(
    ("given", "said"), [({}, "'order' is missing"), ({"order": "A41", "foo": 1}, "'foo' is not one of them")]
)
def test_a_call_outside_of_a_json_schema_is_the_policys_failure(world: World, given: Any, said: str) -> None:
    """Nobody holds calls of such a tool (an MCP server's) against its schema, and no call of a policy ends a run."""
    refusals = list[Any]()
    refund = StructuredTool(name="refund", description="", args_schema=JSON_SCHEMA, func=world.pay)
    with kept_refusals(refusals), in_rollout(refund=External(stand_in=world.play)):
        assert refund.invoke({"order": "A41"}) == "played A41"
        with pytest.raises(PolicyFailure, match=f"'refund' was called with other arguments than it has: {said}"):
            refund.invoke(given)
    assert (refusals, world.paid, world.played) == ([], [], [("A41", 100)])


def test_a_stand_in_that_does_not_fit_is_refused_by_name(world: World) -> None:
    """Also where the tool is made so late that nothing could be seen before."""
    refusals = list[Any]()
    with kept_refusals(refusals), in_rollout(refund=External(stand_in=lambda order: order)):
        with pytest.raises(EffectError, match=r"of the tool 'refund' can't be called as the tool is: .*'cents'"):
            KINDS["@tool"](world).invoke(GIVEN)
        assert len(refusals) == 1


def test_the_key_goes_along_as_an_argument(world: World) -> None:
    """The model doesn't see it; the tool gets what `idempotency_key()` gives."""
    got: list[Any] = []

    @tool
    def refund(order: str, key: Annotated[str, InjectedToolArg] = "") -> str:
        """Refund an order."""
        got.append((key, idempotency_key()))
        return order

    assert set(refund.args) == {"order"}
    with in_rollout(refund=External(permitted=True, key_argument="key")):
        for given in ({"order": "A1"}, {"order": "A2"}, "A3"):
            refund.invoke(given)
    refund.invoke({"type": "tool_call", "id": "c", "name": "refund", "args": {"order": "A4"}})
    assert [key == asked for key, asked in got] == [True, True, True, False]
    assert len({key for key, _ in got}) == 4
    assert got[3][0] == ""


def test_openings_share_the_change_and_the_last_one_ends_it() -> None:
    """BaseTool is as it was when nobody makes rollouts."""
    before = BaseTool.run, BaseTool.arun
    with open_effects({}):
        during = BaseTool.run
        with open_effects({}):
            assert BaseTool.run is during is not before[0]
        assert BaseTool.run is during
    assert (BaseTool.run, BaseTool.arun) == before
