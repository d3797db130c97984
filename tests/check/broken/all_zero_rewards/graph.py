"""An agent whose verifier compares a text with a message, which is never equal."""

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def answered(task: Task, state: dict) -> bool:
    return state["messages"][-1] == task.reference


builder.add_node("agent", agent)
builder.set_entry_point("agent")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=answered)
def graph():
    return builder.compile()
