"""An ordinary agent, and a policy whose template counts the messages that are still to come."""

import atexit
import shutil
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused")
builder = StateGraph(MessagesState)


ORDER_DESK = Path(__file__).parents[4] / "examples" / "order-desk" / "policy"
POLICY = Path(tempfile.mkdtemp(prefix="agenttrain-check-")) / "policy"
atexit.register(shutil.rmtree, POLICY.parent, ignore_errors=True)
shutil.copytree(ORDER_DESK, POLICY)
shutil.copy(Path(__file__).with_name("chat_template.jinja"), POLICY)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def alike(task: Task, state: dict) -> float:
    return SequenceMatcher(None, state["messages"][-1].text, task.reference).ratio()


builder.add_node("agent", agent)
builder.set_entry_point("agent")


@trainable(model=str(POLICY), tasks="tasks.jsonl", verifier=alike)
def graph():
    return builder.compile()
