"""The order desk: an ordinary LangGraph agent that answers questions about orders with four tools.

The tools answer errors as data, and the agent has to read them: a merged order is found under its new id, a listed
item under its SKU, and a timeout passes when the call is repeated. A tool holds no state: whether it was called before
stands in the messages.
"""

import math
import re
from typing import Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime, tools_condition

from agenttrain import Task, trainable

SYSTEM = "You are the order desk agent. Use the tools to answer the question. Finish with: The answer is N."
ARITHMETIC = re.compile(r"\d{1,6}( ?[-+*] ?\d{1,6}){1,3}")


Runtime = ToolRuntime[Any, Any]
"""What a tool is given beside its arguments. Any: else pydantic checks every message at every call, a quarter of the
time of a rollout."""


class Desk(TypedDict):
    """The world of one task, as the tools see it."""

    order: str
    item: str
    qty: int
    price: int
    stock: int
    merged: str | None
    """The id under which the order is found; None: its own."""
    sku: str | None
    """The SKU under which the item is found; None: its name."""
    timeouts: list[str]
    """Names of the tools whose first call times out."""


def times_out(name: str, runtime: Runtime) -> bool:
    """Whether this call of a tool is the first one, and times out."""
    if name not in runtime.context["timeouts"]:
        return False
    return not any(isinstance(seen, ToolMessage) and seen.name == name for seen in runtime.state["messages"])


def item_error(item: str, desk: Desk) -> dict | None:
    """What is wrong with the name of an item; None: nothing."""
    if desk["sku"] and item == desk["item"]:
        return {"error": f"{item} is listed as {desk['sku']}"}
    if item != (desk["sku"] or desk["item"]):
        return {"error": f"no item {item}"}
    return None


@tool
def get_order(order_id: str, runtime: Runtime) -> dict:
    """Item and quantity of an order."""
    desk = runtime.context
    if times_out("get_order", runtime):
        return {"error": "timeout"}
    if desk["merged"] and order_id == desk["order"]:
        return {"error": f"order {order_id} was merged into {desk['merged']}"}
    if order_id != (desk["merged"] or desk["order"]):
        return {"error": f"no order {order_id}"}
    return {"item": desk["item"], "qty": desk["qty"]}


@tool
def get_price(item: str, runtime: Runtime) -> dict:
    """Price of one unit of an item."""
    if times_out("get_price", runtime):
        return {"error": "timeout"}
    return item_error(item, runtime.context) or {"price": runtime.context["price"]}


@tool
def get_stock(item: str, runtime: Runtime) -> dict:
    """Units in stock of an item."""
    if times_out("get_stock", runtime):
        return {"error": "timeout"}
    return item_error(item, runtime.context) or {"stock": runtime.context["stock"]}


@tool
def calc(expression: str) -> dict:
    """Result of an expression with + - *."""
    if not ARITHMETIC.fullmatch(expression):
        return {"error": "bad expression"}
    terms = re.findall(r"([-+]?)([\d*]+)", expression.replace(" ", ""))
    return {"result": sum(int(f"{sign}1") * math.prod(map(int, term.split("*"))) for sign, term in terms)}


TOOLS = [get_order, get_price, get_stock, calc]
model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=40).bind_tools(TOOLS)


def agent(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Ask the model what to do next."""
    return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}


builder = StateGraph(MessagesState, context_schema=Desk)
builder.add_node("agent", agent)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")


def answered(task: Task, state: dict) -> float:
    """1 when the agent's last message is exactly the answer, else 0."""
    last = state["messages"][-1] if state.get("messages") else None
    return float(isinstance(last, AIMessage) and last.text == f"The answer is {task.reference}.")


@trainable(model="policy", tasks="tasks.jsonl", verifier=answered)
def graph():
    """The agent, ready to run."""
    return builder.compile()
