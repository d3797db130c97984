"""Roles: each selector for each role, what is frozen with nothing declared, and what two models are."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy
from matrix.graphs import in_a_row
from matrix.harness import Roll, Seen, says
from matrix.own_model import OwnModel, OwnWriter

from agenttrain.errors import RoleError
from agenttrain.prepare import prepare
from agenttrain.records import CallSite
from agenttrain.testing import toy_project

SECTION = "Roles"


def writes(site: CallSite) -> bool:
    return site.node == "writer"


def agent_and_writer(model: Any, writes_with: Any = None) -> Any:
    """Two nodes; the second one's call has a tag and a source."""
    own = writes_with or model

    def agent(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def writer(state: Any) -> Any:
        config = {"tags": ["quick"], "metadata": {"lc_source": "title"}}
        return {"messages": [own.invoke([*state["messages"], ("user", "Go on.")], config=config)]}

    return in_a_row(agent, writer)


SELECTORS = {
    "a node's name": "writer",
    "node:": "node:writer",
    "tag:": "tag:quick",
    "source:": "source:title",
    "a predicate": writes,
}


@pytest.mark.row(SECTION, "selectors: a node's name, node:, tag:, source:, a predicate")
@pytest.mark.parametrize("keyword", ["train", "frozen", "auxiliary"])
@pytest.mark.parametrize("kind", SELECTORS)
def test_selectors(kind: str, keyword: str, roll: Roll) -> None:
    """The named call gets the role; the other one is trained, or frozen where train= names others."""
    model = OwnModel()
    rolled = roll(agent_and_writer(model), says("hello", "hello again"), **{keyword: [SELECTORS[kind]]})
    role = {"train": "trained"}.get(keyword, keyword)
    assert rolled.places == [("agent", "frozen" if keyword == "train" else "trained"), ("writer", role)]
    assert model.n_calls == (keyword == "auxiliary")


@pytest.mark.row(SECTION, "selectors: model:")
@pytest.mark.parametrize(
    ("selectors", "roles"),
    [
        ({"train": ["model:OwnWriter"], "frozen": ["model:OwnModel"]}, ["frozen", "trained"]),
        ({"frozen": ["model:OwnWriter"]}, ["trained", "frozen"]),
        ({"auxiliary": ["model:OwnWriter"]}, ["trained", "auxiliary"]),
        ({"train": ["model:OwnModel", "model:OwnWriter"]}, ["trained", "trained"]),
    ],
    ids=["train", "frozen", "auxiliary", "train both"],
)
def test_models(selectors: Any, roles: list[str], roll: Roll) -> None:
    """By class or name; where train= names both models, one policy answers and learns both."""
    writer = OwnWriter()
    rolled = roll(agent_and_writer(OwnModel(), writer), says("hello", "hello again"), **selectors)
    assert [turn.role for turn in rolled.turns] == roles
    assert writer.n_calls == roles.count("auxiliary")
    assert [path.break_cause for path in rolled.result.trajectories] == ["first_turn"]


@pytest.mark.row(SECTION, "a selector for a subgraph's node: all calls within")
@pytest.mark.parametrize(("selector", "frozen"), [("team", 2), ("node:draft", 1)])
def test_a_subgraph(selector: str, frozen: int, roll: Roll, chat: Any) -> None:
    """And one for a node within, that node's only."""
    model = chat()

    def draft(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def review(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def last(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    team = in_a_row(draft, review)
    graph = StateGraph(MessagesState).add_node("team", team).add_node(last)
    graph.add_edge(START, "team").add_edge("team", "last")
    rolled = roll(graph.compile(), says("a", "b", "c"), frozen=[selector])
    assert [turn.role for turn in rolled.turns] == ["frozen"] * frozen + ["trained"] * (3 - frozen)
    assert [turn.site.node for turn in rolled.turns] == ["draft", "review", "last"]


@pytest.mark.row(SECTION, "a selector for the node that calls a graph with a thread_id of its own: all calls within")
def test_a_graph_of_its_own_thread(roll: Roll, chat: Any) -> None:
    """LangGraph begins such a graph's namespace anew; the node around it is still known, its retries too."""
    model, tries = chat(), [ConnectionError("once")]

    def inner(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    team = in_a_row(inner, checkpointer=InMemorySaver())

    def worker(state: MessagesState) -> Any:
        got = team.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "1"}})
        if tries:
            raise tries.pop()
        return {"messages": got["messages"][-1:]}

    def agent(state: MessagesState) -> Any:
        return {"messages": [model.invoke("bye")]}

    builder = StateGraph(MessagesState)
    builder.add_node("worker", worker, retry_policy=RetryPolicy(initial_interval=0.01))
    builder.add_node("agent", agent)
    graph = builder.add_edge(START, "worker").add_edge("worker", "agent").compile()
    rolled = roll(graph, says("thrown away", "a", "b"), frozen=["worker"])
    assert [turn.site.nodes for turn in rolled.turns] == [("inner", "worker"), ("inner", "worker"), ("agent",)]
    assert rolled.roles == {"frozen": 2, "trained": 1}
    assert [turn.site.attempts for turn in rolled.turns] == [(), (2, 1), ()]


@pytest.mark.row(SECTION, "a misspelt node", outcome="refused")
def test_a_misspelt_node(tmp_path: Path) -> None:
    """Before anything runs, with the nodes seen."""
    project = toy_project(tmp_path)
    project.graph.write_text(
        project.graph.read_text().replace("verifier=odd_share", "verifier=odd_share, frozen=['agnet']")
    )
    with pytest.raises(RoleError, match=r"frozen=\['agnet'\] names no node .* Seen: agent\. Did you mean 'agent'\?"):
        prepare(str(project.graph), cwd=tmp_path, flags={})


@pytest.mark.row(SECTION, "a misspelt tag, model or source", outcome="refused")
@pytest.mark.parametrize(
    ("selector", "told"),
    [
        ("tag:qick", "Tags seen: quick. Did you mean 'quick'?"),
        ("source:titel", "Sources seen: title. Did you mean 'title'?"),
        ("model:OwnModl", "Models seen: OwnModel. Did you mean 'OwnModel'?"),
    ],
)
def test_a_misspelt_selector(selector: str, told: str, roll: Roll) -> None:
    """After the first evaluation, with the names seen."""
    with pytest.raises(AssertionError) as unmatched:
        roll(agent_and_writer(OwnModel()), says("hello", "hello again"), frozen=[selector])
    assert f"frozen=[{selector!r}] matched no call. {told}" in str(unmatched.value)


@pytest.mark.row(SECTION, "one model with other settings: one model")
def test_other_settings(roll: Roll, chat: Any) -> None:
    """Temperature, length, stop texts, tools, a name given at the call."""
    models = [chat(temperature=0.1), chat(temperature=0.9, max_tokens=50), chat().bind(stop=["x"])]

    def agent(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"]) for model in models]}

    rolled = roll(in_a_row(agent), says("a", "b", "c"))
    assert rolled.places == [("agent", "trained")] * 3


@pytest.mark.row(SECTION, "one name at another address: another model", outcome="refused")
def test_another_address(roll: Roll, chat: Any) -> None:
    """Only a node tells them apart, which is the line to paste."""
    graph = agent_and_writer(chat(), chat(base_url="http://127.0.0.1:9/v2"))
    with pytest.raises(RoleError, match="two models") as refused:
        roll(graph, says("hello", "hello again"))
    line = re.search(r"frozen=(\[.*?\])", str(refused.value))
    assert line is not None
    assert json.loads(line[1]) == ["node:writer"]
    rolled = roll(graph, says("hello", "hello again"), frozen=json.loads(line[1]))
    assert rolled.places == [("agent", "trained"), ("writer", "frozen")]


@pytest.mark.row(SECTION, "a summary, title or judge in a node of the user's: trained until named")
@pytest.mark.parametrize("name", ["summarize", "title", "judge"])
def test_nodes_of_the_users(name: str, roll: Roll, chat: Any) -> None:
    """A name tells nothing for certain: such a node may be what is to be trained."""
    model = chat()

    def agent(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def asks(state: Any) -> Any:
        model.invoke([("user", f"{name}: {state['messages'][-1].text}")])
        return {}

    asks.__name__ = name
    graph = in_a_row(agent, asks)
    assert roll(graph, says("hello", "x")).places == [("agent", "trained"), (name, "trained")]
    assert roll(graph, says("hello", "x"), frozen=[name]).places == [("agent", "trained"), (name, "frozen")]


class Titles(AgentMiddleware):  # type: ignore[type-arg]
    """Somebody's middleware that names a conversation, and marks its call as LangChain's docs say."""

    def __init__(self, model: Any, mark: Callable[[], dict[str, Any]]) -> None:
        self._model, self._mark = model, mark

    def after_agent(self, state: Any, runtime: Any) -> None:
        self._model.invoke("A title, please.", config={"metadata": self._mark()})


@pytest.mark.row(SECTION, "anybody's middleware that marks its call as internal")
def test_marked_calls(roll: Roll, chat: Any) -> None:
    """Frozen with nothing declared; source:middleware selects it."""
    module = pytest.importorskip(
        "langchain.agents.middleware.internal_call_transformer", reason="langchain 1.0 marks no calls as internal"
    )
    model = chat()
    agent = create_agent(model, [], middleware=[Titles(model, module.internal_call_metadata)])
    assert roll(agent, says("hello", "Greetings")).places == [("model", "trained"), ("Titles.after_agent", "frozen")]
    rolled = roll(agent, says("hello", "Greetings"), train=["model", "source:middleware"])
    assert rolled.roles == {"trained": 2}


def judged(model: Any, judge: Any) -> Any:
    rubric = pytest.importorskip("deepagents.middleware.rubric", reason="deepagents 0.2 has no RubricMiddleware")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is in beta, told once a process
        middleware = rubric.RubricMiddleware(model=judge)
    return create_agent(model, [], middleware=[middleware])


def verdict(result: str, **criterion: Any) -> str:
    criteria = [{"name": "adds up", **criterion}]
    return json.dumps({"result": result, "explanation": "It was looked at.", "criteria": criteria})


RUBRIC = {"messages": [{"role": "user", "content": "2 and 3?"}], "rubric": "It adds up."}


@pytest.mark.row(SECTION, "deepagents' RubricMiddleware: a judge by the same model")
def test_a_judge(roll: Roll, chat: Any) -> None:
    """Its agent runs in the middleware's node: frozen. What it says sends the agent back, which goes on in its path."""
    model = chat()
    script = says("4", verdict("needs_revision", passed=False, gap="It is 5."), "5", verdict("satisfied", passed=True))
    rolled = roll(judged(model, model), script, input=RUBRIC)
    assert rolled.places == [("model", "trained"), ("model", "frozen")] * 2
    assert [turn.site.checkpoint_ns.partition(":")[0] for turn in rolled.turns] == [
        "model",
        "RubricMiddleware.after_agent",
    ] * 2
    assert [turn.break_cause for turn in rolled.turns] == [
        "first_turn",
        "other_conversation",
        None,
        "other_conversation",
    ]


@pytest.mark.row(SECTION, "deepagents' RubricMiddleware: a judge by another model", outcome="refused")
def test_a_judge_by_another_model(roll: Roll, chat: Any) -> None:
    """Detection only says why, and gives the line."""

    def script(seen: Seen) -> str:
        return "5"

    with pytest.raises(RoleError, match=r"\(made by RubricMiddleware.after_agent\)") as refused:
        roll(judged(chat(), chat(model="gpt-4o-mini")), script, input=RUBRIC)
    assert 'auxiliary=["model:gpt-4o-mini"]' in str(refused.value)
