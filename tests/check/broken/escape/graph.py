"""An agent that asks its model on a thread of its own, which belongs to no rollout."""

from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


def agent(state: MessagesState) -> dict:
    with ThreadPoolExecutor(1) as threads:
        return {"messages": [threads.submit(model.invoke, state["messages"]).result()]}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent)
builder.set_entry_point("agent")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile()
