"""An agent and a reviewer in a subgraph, which is answered by the policy and not trained on: nothing is wrong."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def review(state: MessagesState) -> dict:
    model.invoke([*state["messages"], ("user", "Is that right?")])
    return {}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


@trainable(model="../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike, frozen=["reviewer"])
def graph():
    reviewer = StateGraph(MessagesState)
    reviewer.add_node("review", review)
    reviewer.set_entry_point("review")
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("reviewer", reviewer.compile())
    builder.set_entry_point("agent")
    builder.add_edge("agent", "reviewer")
    return builder.compile()
