"""langgraph-supervisor over two agents."""

import atexit
import shutil
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor

from agenttrain import Task, trainable
from agenttrain.testing import tiny_model

POLICY = tiny_model(Path(tempfile.mkdtemp(prefix="agenttrain-check-")) / "policy", max_length=8192)
atexit.register(shutil.rmtree, POLICY.parent, ignore_errors=True)
model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=24)


def said_something(task: Task, state: dict) -> float:
    """The share of letters of the last message: a random policy has some."""
    text = state["messages"][-1].text
    return sum(character.isalpha() for character in text) / max(1, len(text))


@tool
def price(item: str) -> int:
    """Price of one unit of an item."""
    return len(item)


@trainable(model=str(POLICY), tasks="tasks.jsonl", verifier=said_something)
def graph():
    prices = create_agent(model, [price], name="prices")
    writer = create_agent(model, [], name="writer")
    return create_supervisor([prices, writer], model=model, prompt="Hand over to prices or writer.").compile()
