"""A shop's desk that looks things up, sums up what it found, and replies from its notes alone.

Every rollout so has two conversations that are trained, the lookups and the reply, and between them a summary that the
same model writes and that is frozen. The history is rewritten by the summary, so that the reply extends nothing.
"""

import re
from typing import Any, TypedDict

from agenttrain import Task, trainable
from langchain_core.messages import AnyMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode, ToolRuntime

SYSTEM = "You are the order desk agent. Use the tools to answer the question. Finish with: The answer is N."
N_LOOKUPS = 2
SIBLING = re.compile(r"-(\d+)-\d+(?:-m\d+)?(?:-r\d+)?$")
"""In the id of a rollout, which is LangGraph's thread."""

Runtime = ToolRuntime[Any, Any]


class Shelf(TypedDict):
    """The world of one task, as the tools see it."""

    order: str
    item: str
    qty: int
    stock: int
    broken_for: list[int]
    """Siblings whose line to the warehouse breaks."""


def check_line(runtime: Runtime) -> None:
    """Raise where the line of this rollout is one of the broken ones.

    Raises:
        ConnectionError: it is.
    """
    found = SIBLING.search(runtime.config["configurable"]["thread_id"])
    if found and int(found[1]) in runtime.context["broken_for"]:
        raise ConnectionError("the line to the warehouse is broken")


@tool
def get_order(order_id: str, runtime: Runtime) -> dict:
    """Item and quantity of an order."""
    check_line(runtime)
    shelf = runtime.context
    if order_id != shelf["order"]:
        return {"error": f"no order {order_id}"}
    return {"item": shelf["item"], "qty": shelf["qty"]}


@tool
def get_stock(item: str, runtime: Runtime) -> dict:
    """Units in stock of an item."""
    check_line(runtime)
    shelf = runtime.context
    return {"stock": shelf["stock"]} if item == shelf["item"] else {"error": f"no item {item}"}


TOOLS = [get_order, get_stock]
model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=24).bind_tools(TOOLS)


def look(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Ask the model what to look up next."""
    return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}


def after_look(state: MessagesState) -> str:
    """Whether a tool was asked for."""
    return "tools" if state["messages"][-1].tool_calls else "summarize"


def after_tools(state: MessagesState) -> str:
    """Whether enough was looked up."""
    n_lookups = sum(isinstance(message, ToolMessage) for message in state["messages"])
    return "look" if n_lookups < N_LOOKUPS else "summarize"


def summarize(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Write notes, and leave only them and the question in the history."""
    asked = [SystemMessage(SYSTEM), *state["messages"], HumanMessage("Sum up what you found.")]
    notes = model.invoke(asked).text
    kept = HumanMessage(f"{state['messages'][0].text} Notes: {notes}")
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), kept]}


def reply(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Answer from the notes."""
    return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}


def answered(task: Task, state: dict) -> float:
    """1 when the right number stands in the reply."""
    return float(str(task.reference) in re.findall(r"\d+", state["messages"][-1].text))


def even(task: Task, state: dict) -> float:
    """The share of even characters in the reply, tool calls included, which differs between most siblings."""
    last = state["messages"][-1]
    said = last.text + "".join(f"{call['name']}{call['args']}" for call in last.tool_calls)
    return sum(ord(character) % 2 == 0 for character in said) / max(1, len(said))


builder = StateGraph(MessagesState, context_schema=Shelf)
builder.add_node("look", look)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_node("summarize", summarize)
builder.add_node("reply", reply)
builder.add_edge(START, "look")
builder.add_conditional_edges("look", after_look, ["tools", "summarize"])
builder.add_conditional_edges("tools", after_tools, ["look", "summarize"])
builder.add_edge("summarize", "reply")
builder.add_edge("reply", END)


@trainable(
    model="../../../../../examples/order-desk/policy",
    tasks="tasks.jsonl",
    verifiers={"answered": (answered, 0.5), "even": (even, 0.5)},
    frozen=["summarize"],
)
def graph():
    """The desk, ready to run."""
    return builder.compile()
