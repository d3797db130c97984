"""An agent that asks a human for leave, and nobody answers for one."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import interrupt

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def approve(state: MessagesState) -> dict:
    interrupt({"send": state["messages"][-1].content})
    return {}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent)
builder.add_node("approve", approve)
builder.set_entry_point("agent")
builder.add_edge("agent", "approve")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile()
