"""One agent in the three ways a node may call its model: sync, async, and a blocking call inside an async node."""

import sys
from pathlib import Path

from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agenttrain import trainable

sys.path.append(str(Path(__file__).parents[1] / "examples" / "order-desk"))
import graph as desk


def sync_node(state: MessagesState) -> dict:
    return {"messages": [desk.model.invoke([SystemMessage(desk.SYSTEM), *state["messages"]])]}


async def async_node(state: MessagesState) -> dict:
    return {"messages": [await desk.model.ainvoke([SystemMessage(desk.SYSTEM), *state["messages"]])]}


async def blocking_node(state: MessagesState) -> dict:
    return sync_node(state)


def built(node):
    builder = StateGraph(MessagesState, context_schema=desk.Desk)
    builder.add_node("agent", node)
    builder.add_node("tools", ToolNode(desk.TOOLS))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile()


sync = trainable(built(sync_node), verifier=desk.answered)
asynchronous = trainable(built(async_node), verifier=desk.answered)
blocking = trainable(built(blocking_node), verifier=desk.answered)
