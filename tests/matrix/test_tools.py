"""Tools and structured answers: every provider's form reaches the policy as one, and its answer is read as theirs."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolNode, tools_condition
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, RetryPolicy
from matrix.graphs import add, calls_tools, look_up, one_node
from matrix.harness import Roll, Rolled, call, says
from pydantic import BaseModel

from agenttrain import External, idempotency_key

SECTION = "Tools"
FORMS = "Structured answers"


def openai() -> Any:
    return ChatOpenAI(model="gpt-4o", api_key="unused", base_url="http://127.0.0.1:9/v1")


def anthropic() -> Any:
    return ChatAnthropic(model_name="claude-sonnet-4-5", api_key="unused", base_url="http://127.0.0.1:9")


def google() -> Any:
    return ChatGoogleGenerativeAI(model="gemini-2.5-flash", google_api_key="unused")


PROVIDERS = {"ChatOpenAI": openai, "ChatAnthropic": anthropic, "ChatGoogleGenerativeAI": google}


def by_provider(section: str, name: str) -> Any:
    marked = [
        pytest.param(make, marks=pytest.mark.row(section, name.format(provider=provider)), id=provider)
        for provider, make in PROVIDERS.items()
    ]
    return pytest.mark.parametrize("make", marked)


LOOP = [("agent", "trained"), ("agent", "trained")]


def whole(rolled: Rolled, places: list[tuple[str, str]]) -> None:
    assert rolled.places == places
    assert rolled.account.trained == rolled.account.sampled > 0


@by_provider(SECTION, "{provider}.bind_tools, ToolNode")
def test_bind_tools(make: Any, roll: Roll) -> None:
    rolled = roll(calls_tools(make(), add), says(call("add", a=2, b=3), "5"))
    whole(rolled, LOOP)
    assert "Add two numbers." in rolled.asked[0]
    assert [turn.n_tool_calls for turn in rolled.turns] == [1, 0]
    assert rolled.result.rollout.n_tool_calls == 1


CHOICES = {"any": ("any", "any"), "by name": ("add", "add"), "none": ("none", "none")}


@pytest.mark.parametrize(
    "choice",
    [pytest.param(c, marks=pytest.mark.row(SECTION, f"tool_choice {n}"), id=n) for n, (c, _) in CHOICES.items()],
)
def test_tool_choice(choice: str, roll: Roll, chat: Any) -> None:
    """The policy is asked by instruction, never forced by the sampler; a reply without the call is counted."""
    bound = chat().bind_tools([add, look_up], tool_choice=choice)
    free = chat()

    def agent(state: Any) -> Any:
        return {"messages": [(bound if len(state["messages"]) == 1 else free).invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([add, look_up]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    words = ["no tool"] if choice == "none" else [call("add", a=1, b=1), "2"]
    rolled = roll(builder.compile(), says(*words))
    whole(rolled, LOOP[: len(words)])
    assert [turn.missed for turn in rolled.turns] == [""] * len(words)


@pytest.mark.row(SECTION, "tool_choice any, and the policy calls none", note="trained; counted as missed")
def test_tool_choice_missed(roll: Roll, chat: Any) -> None:
    rolled = roll(
        one_node(lambda s: {"messages": [chat().bind_tools([add], tool_choice="any").invoke(s["messages"])]}),
        says("I won't"),
    )
    whole(rolled, LOOP[:1])
    assert rolled.turns[0].missed == "tool_choice"


@pytest.mark.row(SECTION, "parallel tool calls")
def test_parallel_tool_calls(roll: Roll, chat: Any) -> None:
    both = call("add", a=1, b=1) + "\n" + call("look_up", order="A41")
    rolled = roll(calls_tools(chat(), add, look_up), says(both, "done"))
    whole(rolled, LOOP)
    assert [turn.n_tool_calls for turn in rolled.turns] == [2, 0]
    assert "A41 is on its way" in rolled.asked[1]


@pytest.mark.row(SECTION, "an unreadable call that the graph answers")
def test_unreadable_call(roll: Roll, chat: Any) -> None:
    """The graph tells the policy; the turn is trained, and counted as an invalid call."""
    bound = chat().bind_tools([add])

    def agent(state: Any) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    def mend(state: Any) -> Any:
        wrong = state["messages"][-1].invalid_tool_calls
        return {
            "messages": [ToolMessage(f"not JSON: {c['args']}", tool_call_id=c["id"], status="error") for c in wrong]
        }

    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("mend", mend)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda s: "mend" if s["messages"][-1].invalid_tool_calls else "__end__")
    builder.add_edge("mend", "agent")
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    rolled = roll(builder.compile(), says(broken, "sorry"))
    whole(rolled, LOOP)
    assert rolled.said[0] == broken
    assert rolled.result.rollout.n_invalid_tool_calls == 1


@pytest.mark.row(SECTION, "arguments that the tool refuses, answered by ToolNode")
def test_refused_arguments(roll: Roll, chat: Any) -> None:
    rolled = roll(calls_tools(chat(), add), says(call("add", a="two"), call("add", a=2, b=2), "4"))
    whole(rolled, [*LOOP, LOOP[0]])
    assert rolled.result.rollout.status == "completed"


@pytest.mark.row(SECTION, "a tool that isn't there, answered by ToolNode")
def test_unknown_tool(roll: Roll, chat: Any) -> None:
    rolled = roll(calls_tools(chat(), add), says(call("subtract", a=2, b=1), "sorry"))
    whole(rolled, LOOP)
    assert "subtract is not a valid tool" in rolled.asked[1]


@pytest.mark.row(SECTION, "ToolNode with injected state")
def test_injected_state(roll: Roll, chat: Any) -> None:
    @tool
    def count(state: Annotated[Any, InjectedState]) -> int:
        """Count the messages so far."""
        return len(state["messages"])

    rolled = roll(calls_tools(chat(), count), says(call("count"), "two"))
    whole(rolled, LOOP)
    assert "state" not in rolled.asked[0]
    assert ">tool\n2<" in rolled.asked[1] or "tool\n2" in rolled.asked[1]


@pytest.mark.row(SECTION, "ToolNode with an injected store")
def test_injected_store(roll: Roll, chat: Any) -> None:
    @tool
    def remember(key: str, store: Annotated[BaseStore, InjectedStore]) -> str:
        """What is remembered."""
        item = store.get(("facts",), key)
        return item.value["text"] if item else "nothing"

    store = InMemoryStore()
    store.put(("facts",), "tea", {"text": "tea is hot"})
    rolled = roll(calls_tools(chat(), remember, store=store), says(call("remember", key="tea"), "hot"))
    whole(rolled, LOOP)
    assert "tea is hot" in rolled.asked[1]


@pytest.mark.row(SECTION, "a tool that gives a Command")
def test_command_of_a_tool(roll: Roll, chat: Any) -> None:
    @tool
    def close(call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Close the case."""
        return Command(update={"messages": [ToolMessage("closed", tool_call_id=call_id)]})

    rolled = roll(calls_tools(chat(), close), says(call("close"), "it is closed"))
    whole(rolled, LOOP)
    assert "closed" in rolled.asked[1]


@pytest.mark.row(SECTION, "an async tool")
def test_async_tool(roll: Roll, chat: Any) -> None:
    @tool
    async def wait(seconds: int) -> str:
        """Wait."""
        return f"waited {seconds}"

    rolled = roll(calls_tools(chat(), wait), says(call("wait", seconds=1), "done"))
    whole(rolled, LOOP)
    assert "waited 1" in rolled.asked[1]


@pytest.mark.row(SECTION, "a raising tool that ToolNode answers (handle_tool_errors)")
def test_raising_tool(roll: Roll, chat: Any) -> None:
    @tool
    def fail() -> str:
        """Fail."""
        raise ValueError("out of order")

    rolled = roll(calls_tools(chat(), fail, node=ToolNode([fail], handle_tool_errors=True)), says(call("fail"), "oh"))
    whole(rolled, LOOP)
    assert "out of order" in rolled.asked[1]


@pytest.mark.row(SECTION, "an external tool's stand-in", note="the tool itself does not run")
def test_stand_in(roll: Roll, chat: Any) -> None:
    """By ToolNode, by a node's own code, and async; the policy reads what the stand-in gave."""
    paid: list[str] = []

    @tool
    def refund(order: str) -> str:
        """Refund an order."""
        paid.append(order)
        return "paid"

    @tool
    async def notify(order: str) -> str:
        """Notify the customer."""
        paid.append(order)
        return "sent"

    tools = {"refund": External(stand_in=lambda order: f"played {order}")}
    rolled = roll(calls_tools(chat(), refund), says(call("refund", order="A1"), "done"), tools=tools)
    whole(rolled, LOOP)
    assert "played A1" in rolled.asked[1]
    assert rolled.result.rollout.stand_ins_run == {"refund": 1}
    tools = {"notify": External(stand_in=lambda order: f"said {order}")}
    rolled = roll(calls_tools(chat(), notify), says(call("notify", order="A2"), "done"), tools=tools)
    assert "said A2" in rolled.asked[1]
    node = one_node(lambda s: {"messages": [("user", refund.invoke({"order": "A3"})), chat().invoke(s["messages"])]})
    rolled = roll(node, says("done"), tools={"refund": External(stand_in=lambda order: f"played {order}")})
    assert rolled.result.rollout.stand_ins_run == {"refund": 1}
    assert paid == []


@pytest.mark.row(SECTION, "a permitted external tool, and its idempotency key", note="one key over a node's retries")
def test_idempotency_key(roll: Roll, chat: Any) -> None:
    """Two calls with equal arguments have two keys, and a node that is tried again has the same."""
    keys: list[str] = []

    @tool
    def refund(order: str) -> str:
        """Refund an order."""
        keys.append(idempotency_key())
        if len(keys) == 1:
            raise ConnectionError("the answer was lost")
        return "paid"

    node = ToolNode([refund], handle_tool_errors=False)
    retried = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=ConnectionError)
    builder, model = StateGraph(MessagesState), chat().bind_tools([refund])
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", node, retry_policy=retried)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    script = says(call("refund", order="A1"), call("refund", order="A1"), "done")
    rolled = roll(builder.compile(), script, tools={"refund": External(permitted=True)})
    whole(rolled, [*LOOP, LOOP[0]])
    assert rolled.result.rollout.tools_run == {"refund": 3}
    assert keys[0] == keys[1] != keys[2]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


PERSON_SCHEMA = {
    "title": "Person",
    "description": "A person.",
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ADA = {"name": "Ada", "age": 36}
SCHEMAS: dict[str, Any] = {"pydantic": Person, "TypedDict": PersonDict, "JSON schema": PERSON_SCHEMA}
METHODS = {
    "ChatOpenAI": ("function_calling", "json_mode", "json_schema"),
    "ChatAnthropic": ("function_calling", "json_schema"),
    "ChatGoogleGenerativeAI": ("function_calling", "json_mode", "json_schema"),
}


def read(answer: Any) -> dict[str, Any]:
    """The parsed person, whatever form it has."""
    return answer.model_dump() if isinstance(answer, BaseModel) else dict(answer)


def structured(make: Any, schema: Any, **options: Any) -> Any:
    """A node that appends what the model gave, as JSON."""
    model = make().with_structured_output(schema, **options)

    def agent(state: Any) -> Any:
        answer = model.invoke(state["messages"][:1])
        parsed = answer["parsed"] if options.get("include_raw") else answer
        assert read(parsed) == ADA
        return {"messages": [("ai", json.dumps(read(parsed)))]}

    return agent


def reply_for(method: str, name: str) -> str:
    return call(name, **ADA) if method == "function_calling" else json.dumps(ADA)


@pytest.mark.parametrize(
    ("provider", "method"),
    [
        pytest.param(p, m, marks=pytest.mark.row(FORMS, f"{p}, {m}"), id=f"{p}-{m}")
        for p, methods in METHODS.items()
        for m in methods
    ],
)
def test_structured_output(provider: str, method: str, roll: Roll) -> None:
    """Pydantic, TypedDict and JSON schema, and each with the raw answer beside it: a node for each."""
    builder, places = StateGraph(MessagesState), []
    for schema in SCHEMAS:
        for raw in (False, True):
            places.append((f"{schema}, raw {raw}", "trained"))
            agent = structured(PROVIDERS[provider], SCHEMAS[schema], method=method, include_raw=raw)
            builder.add_node(places[-1][0], agent)
    edges = [START, *(node for node, _ in places)]
    for one, next_one in pairwise(edges):
        builder.add_edge(one, next_one)
    names = ["PersonDict" if node.startswith("TypedDict") else "Person" for node, _ in places]
    rolled = roll(builder.compile(), says(*(reply_for(method, name) for name in names)))
    whole(rolled, places)
    assert [turn.missed for turn in rolled.turns] == [""] * 6


@by_provider(FORMS, "{provider}, its default method")
def test_default_method(make: Any, roll: Roll) -> None:
    """The policy answers in the form that the provider's default asks for."""
    rolled = roll(
        one_node(structured(make, Person)),
        lambda seen: reply_for("function_calling" if "Call the tool" in seen.text else "json", "Person"),
    )
    whole(rolled, LOOP[:1])


@pytest.mark.row(
    FORMS,
    "an answer that doesn't fit the form",
    note="trained, status policy_failure; with include_raw=True the graph goes on",
)
def test_unfit_answer(roll: Roll) -> None:
    rolled = roll(one_node(structured(openai, Person, method="json_schema")), says("Ada, 36"), status="policy_failure")
    whole(rolled, LOOP[:1])
    assert rolled.turns[0].missed == "response_format"
