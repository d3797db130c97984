"""The corpus search: an ordinary LangGraph agent that answers questions from a fixed corpus, with two tools.

A search gives only the beginnings of documents. That is often enough for an answer, and often a trap: an older count
stands before the newest, and a relative before the one who is asked for.
"""

import re
from pathlib import Path

from langchain_core.messages import AIMessage, AnyMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from library import Library

from agenttrain import Part, Task, trainable
from agenttrain.verifiers import exact_answer

SYSTEM = "Find it in the documents. Finish with: The answer is N."
NOT_FOUND = "I could not find that."
LIBRARY = Library.load(Path(__file__).parent / "corpus.jsonl")


@tool
def search(query: str) -> str:
    """Documents that match best."""
    return found(LIBRARY, query)


@tool
def read(document_id: str) -> str:
    """Text of a document."""
    return LIBRARY.read(document_id) or f"no document {document_id}"


def found(library: Library, query: str) -> str:
    """Ids and snippets of what a search finds, one a line."""
    lines = [f"{id}: {library.snippet(id)}" for id in library.search(query)]
    return "\n".join(lines) or "nothing found"


TOOLS = [search, read]
model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=40).bind_tools(TOOLS)


def agent(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Ask the model what to do next."""
    return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}


builder = StateGraph(MessagesState)
builder.add_node("agent", agent)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "agent")
builder.add_conditional_edges("agent", tools_condition)
builder.add_edge("tools", "agent")


def said(state: dict) -> str:
    """The agent's last words; empty when it ended on a tool."""
    last = state["messages"][-1] if state.get("messages") else None
    return last.text if isinstance(last, AIMessage) else ""


def answer(state: dict) -> str | None:
    """What the agent gave as the answer. None: it gave none."""
    given = re.fullmatch(r"The answer is (\w+(?: \w+)?)\.", said(state))
    return given[1] if given else None


def well_formed(state: dict) -> bool:
    """Whether the agent gave an answer, or said that it found none."""
    return answer(state) is not None or said(state) == NOT_FOUND


def grounded(task: Task, state: dict) -> bool:
    """Whether the right answer stands in a document that the agent has read; a snippet is not enough."""
    texts = [seen.text for seen in state.get("messages", []) if isinstance(seen, ToolMessage) and seen.name == "read"]
    return any(re.search(rf"\b{task.reference}\b", text) for text in texts)


def searches(state: dict) -> int:
    """How often the agent searched."""
    return sum(isinstance(seen, ToolMessage) and seen.name == "search" for seen in state.get("messages", []))


@trainable(
    model="policy",
    tasks="tasks.jsonl",
    tools={"search": "read_only", "read": "read_only"},
    verifiers={
        "form": Part(well_formed, kind="format", closed=-0.3),
        "answer": Part(exact_answer(where=answer)),
        "grounded": Part(grounded, 0.2, kind="process"),
        "searches": Part(searches, -0.02, kind="cost", low=0.0, high=5.0),
    },
)
def graph():
    """The agent, ready to run."""
    return builder.compile()
