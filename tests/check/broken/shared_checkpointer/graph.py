"""An agent with a helper that remembers under one thread id, whatever the task."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


def answer(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


helper_builder = StateGraph(MessagesState)
helper_builder.add_node("answer", answer)
helper_builder.set_entry_point("answer")
helper = helper_builder.compile(checkpointer=InMemorySaver(), name="helper")


def agent(state: MessagesState) -> dict:
    done = helper.invoke({"messages": state["messages"]}, {"configurable": {"thread_id": "desk"}})
    return {"messages": done["messages"][-1:]}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent)
builder.set_entry_point("agent")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile()
