"""Published graphs through a whole run: the embedded engine samples, the trainer trains, and every token is counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agenttrain.testing import ToyRun, tiny_model, toy_project

HEAD = """\
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import trainable

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=6)


def odd_share(task, state):
    text = repr(state["messages"][-1].content)
    return sum(ord(character) % 2 for character in text) / len(text)


@trainable(model="model", tasks="tasks.jsonl", verifier=odd_share)
def graph():
"""
SUMMARIES = """\
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware

    short = SummarizationMiddleware(model, trigger=("messages", 3), keep=("messages", 1))
    return create_agent(model, [], middleware=[short])
"""
SUPERVISOR = """\
    import warnings

    from langchain.agents import create_agent
    from langgraph_supervisor import create_supervisor

    warnings.simplefilter("ignore")  # create_react_agent is deprecated
    worker = create_agent(model, [], name="worker")
    return create_supervisor([worker], model=model, prompt="Lead.").compile()
"""
REFLECTION = """\
    import warnings

    from langgraph_reflection import create_reflection_graph

    warnings.simplefilter("ignore")  # config_schema is deprecated
    def ask(state):
        return {"messages": [model.invoke(state["messages"])]}

    def again(state):
        return {"messages": [HumanMessage("Again.")]} if len(state["messages"]) < 6 else {}

    def one(function):
        return StateGraph(MessagesState).add_node("ask", function).set_entry_point("ask").compile()

    return create_reflection_graph(one(ask), one(again), state_schema=MessagesState).compile()
"""
DEEP = """\
    from deepagents import create_deep_agent

    helper = {"name": "helper", "description": "Helps.", "system_prompt": "Help."}
    return create_deep_agent(model, subagents=[helper])
"""
TALK = [("user", "One?"), ("assistant", "1"), ("user", "Two?")]


def fitted(folder: Path, graph: str, max_length: int) -> ToyRun:
    project = toy_project(folder)
    tiny_model(folder / "model", max_length=max_length)
    project.graph.write_text(HEAD + graph, encoding="utf-8")
    rows = [json.loads(row) for row in (folder / "tasks.jsonl").read_text().splitlines()]
    talk = [{"role": role, "content": text} for role, text in TALK]
    texts = [json.dumps({**row, "input": {"messages": [*talk, *row["input"]["messages"]]}}) for row in rows]
    (folder / "tasks.jsonl").write_text("".join(text + "\n" for text in texts))
    return project.fit(limits={"tokens": 4 * max_length})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "max_length", "turns"),
    [
        (SUMMARIES, 8192, {("SummarizationMiddleware.before_model", "frozen"): 4, ("model", "trained"): 4}),
        (SUPERVISOR, 2048, {("agent", "trained"): 4}),
        (REFLECTION, 2048, {("ask", "trained"): 8}),
        (DEEP, 65536, {("model", "trained"): 4}),
    ],
    ids=["create_agent with summaries", "supervisor", "reflection", "deepagents"],
)
def test_a_published_graph_trains(
    graph: str, max_length: int, turns: dict[tuple[str, str], int], tmp_path: Path
) -> None:
    """One step of two tasks, two rollouts each: nothing drifted, and what was sampled is trained, frozen or dropped."""
    run = fitted(tmp_path / "toy", graph, max_length)
    tokens = run.report["tokens"]
    assert tokens["drifted"] == 0
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert tokens["trained"] > 0
    results = [each for each in run.store.rollouts() if each.phase == "train"]
    made = Counter((turn.site.node, turn.role) for each in results for turn in run.store.turns(each.id))
    assert made == turns
