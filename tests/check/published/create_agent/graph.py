"""LangChain's create_agent with stock middleware that asks a model for its own ends."""

import atexit
import shutil
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, TodoListMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

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


@tool
def stock(item: str) -> int:
    """Units in stock of an item."""
    return 3


MIDDLEWARE = [
    SummarizationMiddleware(model, trigger=("messages", 6), keep=("messages", 2)),
    TodoListMiddleware(),
]


@trainable(model=str(POLICY), tasks="tasks.jsonl", verifier=said_something)
def graph():
    return create_agent(model, [price, stock], system_prompt="Be brief.", middleware=MIDDLEWARE)
