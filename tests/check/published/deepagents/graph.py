"""A deep agent with a sub-agent, files and a list of what is to be done."""

import atexit
import shutil
import tempfile
from pathlib import Path

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

from agenttrain import Task, trainable
from agenttrain.testing import tiny_model

POLICY = tiny_model(Path(tempfile.mkdtemp(prefix="agenttrain-check-")) / "policy", max_length=65536)
atexit.register(shutil.rmtree, POLICY.parent, ignore_errors=True)
model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=24)


def said_something(task: Task, state: dict) -> float:
    """The share of letters of the last message: a random policy has some."""
    text = state["messages"][-1].text
    return sum(character.isalpha() for character in text) / max(1, len(text))


RESEARCHER = {"name": "researcher", "description": "Looks things up.", "system_prompt": "Look things up."}


@trainable(model=str(POLICY), tasks="tasks.jsonl", verifier=said_something)
def graph():
    return create_deep_agent(model=model, tools=[], subagents=[RESEARCHER])
