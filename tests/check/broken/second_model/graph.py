"""An agent and a judge, each with a model of its own, and nothing says which one is trained."""

from difflib import SequenceMatcher

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


judge_model = ChatOpenAI(model="gpt-4o-mini", api_key="unused")


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def judge(state: MessagesState) -> dict:
    judge_model.invoke([*state["messages"], ("user", "Is that right?")])
    return {}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent)
builder.add_node("judge", judge)
builder.set_entry_point("agent")
builder.add_edge("agent", "judge")


@trainable(model="../../../../examples/order-desk/policy", tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile()
