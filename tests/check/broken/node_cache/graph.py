"""An agent whose answers are cached by node: all siblings of a task would get the first one's."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import CachePolicy

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent, cache_policy=CachePolicy(ttl=600))
builder.set_entry_point("agent")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile(cache=InMemoryCache())
