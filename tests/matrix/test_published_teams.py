"""Published graphs of several agents, run as their packages build them: deepagents, supervisor, swarm and others.

Expected turns are read off the packages' sources; each test says which rule of theirs gives the numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from matrix.harness import Roll, Rolled, Seen, call, says
from pydantic import BaseModel

from agenttrain.records import CallSite

SECTION = "Published graphs"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def breaks(rolled: Rolled) -> list[str | None]:
    """Why each turn began a trajectory, in the order of the calls. None: it extends an earlier one."""
    return [turn.break_cause for turn in rolled.turns]


def lengths(rolled: Rolled) -> list[int]:
    """Turns of each trajectory, the longest first."""
    return sorted((len(path.spans) for path in rolled.result.trajectories), reverse=True)


def around(rolled: Rolled) -> list[str]:
    """The nodes around and at each turn, outermost first: "tools|model"."""
    return ["|".join(part.partition(":")[0] for part in turn.site.checkpoint_ns.split("|")) for turn in rolled.turns]


ADDER = {"name": "adder", "description": "Adds.", "system_prompt": "You are the adder.", "tools": [add]}


@pytest.mark.row(SECTION, "deepagents: a sub-agent, files")
def test_a_deep_agent(roll: Roll, chat: Any) -> None:
    """A sub-agent is a graph within the tool `task`: two conversations, each one path, all of it trained."""
    deepagents = pytest.importorskip("deepagents")
    main = [
        call("write_file", file_path="/sum.txt", content="2 and 3"),
        call("task", description="Add what stands in /sum.txt.", subagent_type="adder"),
        "It is 5.",
    ]
    adder = [call("read_file", file_path="/sum.txt"), call("add", a=2, b=3), "5"]

    def script(seen: Seen) -> str:
        if not seen.messages[0][1].startswith("You are the adder."):
            return main.pop(0)
        if seen.n_tool_results == 1:
            assert "2 and 3" in seen.last
        return adder.pop(0)

    rolled = roll(deepagents.create_deep_agent(chat(), subagents=[ADDER]), script)
    assert rolled.places == [("model", "trained")] * 6
    assert around(rolled) == ["model", "model", "tools|model", "tools|model", "tools|model", "model"]
    assert breaks(rolled) == ["first_turn", None, "other_conversation", None, None, None]
    assert lengths(rolled) == [3, 3]
    assert rolled.account.trained == rolled.account.sampled


@pytest.mark.row(SECTION, "deepagents: parallel sub-agents, one of them frozen")
def test_parallel_sub_agents(roll: Roll, chat: Any) -> None:
    """Two `task` calls of one message run side by side, each a conversation; a predicate tells them apart."""
    deepagents = pytest.importorskip("deepagents")
    teller = {"name": "teller", "description": "Tells.", "system_prompt": "You are the teller."}
    both = "\n".join(call("task", description="Go on.", subagent_type=name) for name in ("adder", "teller"))

    def script(seen: Seen) -> str:
        if seen.messages[0][1].startswith("You are the teller."):
            return "once upon a time"
        if seen.messages[0][1].startswith("You are the adder."):
            return "5" if seen.n_tool_results else call("add", a=2, b=3)
        return "Both are done." if seen.n_tool_results else both

    def within_a_tool(site: CallSite) -> bool:
        return site.checkpoint_ns.startswith("tools:")

    rolled = roll(deepagents.create_deep_agent(chat(), subagents=[ADDER, teller]), script, frozen=[within_a_tool])
    assert around(rolled)[0] == around(rolled)[-1] == "model"
    assert around(rolled)[1:-1] == ["tools|model"] * 3
    assert rolled.roles == {"frozen": 3, "trained": 2}
    assert lengths(rolled) == [2, 2, 1]
    assert sorted(str(cause) for cause in breaks(rolled)) == [
        "None",
        "None",
        "first_turn",
        "other_conversation",
        "other_conversation",
    ]


@pytest.mark.row(SECTION, "deepagents: its own summaries, a to-do list")
def test_a_deep_agent_with_summaries(roll: Roll, chat: Any) -> None:
    """Its middleware summarises within the node `model`; LangChain says so, and the summary is frozen."""
    deepagents = pytest.importorskip("deepagents")
    from deepagents.backends import StateBackend
    from deepagents.middleware.summarization import SummarizationMiddleware
    from langchain.agents.middleware import TodoListMiddleware

    model = chat()
    short = SummarizationMiddleware(model, backend=StateBackend(), trigger=("messages", 5), keep=("messages", 2))
    graph = deepagents.create_deep_agent(model, tools=[add], middleware=[short, TodoListMiddleware()])

    def script(seen: Seen) -> str:
        if "<messages>" in seen.text:
            return "Added 1 and 1, then 2 and 2."
        if "Here is a summary" in seen.text or "summary" in seen.messages[1][1]:
            return "It is 4."
        if seen.n_tool_results == 0:
            return call("write_todos", todos=[{"content": "add", "status": "in_progress"}])
        return call("add", a=2, b=2)

    rolled = roll(graph, script)
    assert rolled.places == [("model", "trained"), ("model", "trained"), ("model", "frozen"), ("model", "trained")]
    assert [turn.site.source for turn in rolled.turns] == [None, None, "summarization", None]
    assert breaks(rolled) == ["first_turn", None, "other_conversation", "history_rewritten"]


@pytest.mark.row(SECTION, "langgraph-supervisor: two workers")
def test_a_supervisor(roll: Roll, chat: Any) -> None:
    """Each worker reads the supervisor's history under its own prompt.

    What a worker said, and a hand-back that nobody sampled, stand in the supervisor's next prompt: a break each time.
    """
    supervisor = pytest.importorskip("langgraph_supervisor")
    from langchain.agents import create_agent

    adder = create_agent(chat(), tools=[add], name="adder", system_prompt="You are the adder.")
    teller = create_agent(chat(), tools=[], name="teller", system_prompt="You are the teller.")
    with pytest.warns(DeprecationWarning, match="create_react_agent"):
        graph = supervisor.create_supervisor([adder, teller], model=chat(), prompt="You lead.").compile()
    script = says(
        call("transfer_to_adder"), call("add", a=2, b=3), "5", call("transfer_to_teller"), "The sum is 5.", "Done."
    )
    rolled = roll(graph, script)
    assert around(rolled) == [
        "supervisor|agent",
        "adder|model",
        "adder|model",
        "supervisor|agent",
        "teller|model",
        "supervisor|agent",
    ]
    assert rolled.roles == {"trained": 6}
    assert breaks(rolled) == [
        "first_turn",
        "other_conversation",
        None,
        "history_rewritten",
        "other_conversation",
        "history_rewritten",
    ]
    assert rolled.n_escapes == 0


@pytest.mark.row(SECTION, "langgraph-supervisor: one worker's node frozen")
def test_a_supervisors_worker_is_selected_by_its_node(roll: Roll, chat: Any) -> None:
    """A worker's name is a node of the graph around it, so that it selects all calls within."""
    supervisor = pytest.importorskip("langgraph_supervisor")
    from langchain.agents import create_agent

    adder = create_agent(chat(), tools=[add], name="adder")
    with pytest.warns(DeprecationWarning, match="create_react_agent"):
        graph = supervisor.create_supervisor([adder], model=chat()).compile()
    script = says(call("transfer_to_adder"), call("add", a=2, b=3), "5", "Done.")
    rolled = roll(graph, script, frozen=["adder"])
    assert rolled.places == [("agent", "trained"), ("model", "frozen"), ("model", "frozen"), ("agent", "trained")]


@pytest.mark.row(SECTION, "langgraph-swarm, with its checkpointer")
def test_a_swarm(roll: Roll, chat: Any) -> None:
    """Its checkpointer remembers who is active; each rollout begins with the default agent all the same."""
    swarm = pytest.importorskip("langgraph_swarm")
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    to_bob = swarm.create_handoff_tool(agent_name="bob")
    to_alice = swarm.create_handoff_tool(agent_name="alice")
    alice = create_agent(chat(), tools=[add, to_bob], name="alice", system_prompt="You are Alice.")
    bob = create_agent(chat(), tools=[to_alice], name="bob", system_prompt="You are Bob.")
    graph = swarm.create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())
    turns = (call("transfer_to_bob"), call("transfer_to_alice"), call("add", a=2, b=3), call("transfer_to_bob"), "Arr.")
    rolled = roll(graph, says(*turns, *turns), runs=2)
    assert around(rolled) == ["alice|model", "bob|model", "alice|model", "alice|model", "bob|model"] * 2
    assert rolled.roles == {"trained": 10}
    assert breaks(rolled) == ["first_turn", "other_conversation", "history_rewritten", None, "history_rewritten"] * 2


def reflecting(agent: Any, critic: Any) -> Any:
    """langgraph-reflection's graph: an agent, and a critic whose word of a human sends it back."""
    reflection = pytest.importorskip("langgraph_reflection")
    with pytest.warns(DeprecationWarning, match="config_schema"):
        graph = reflection.create_reflection_graph(agent, critic, state_schema=MessagesState)
    return graph.compile()


def one_node(function: Any) -> Any:
    return StateGraph(MessagesState).add_node("ask", function).set_entry_point("ask").compile()


def critic_of(model: Any) -> Any:
    def ask(state: Any) -> Any:
        said = model.invoke([HumanMessage(f"Judge: {state['messages'][-1].text}")]).text
        return {} if said == "fine" else {"messages": [HumanMessage(said)]}

    return one_node(ask)


@pytest.mark.row(SECTION, "langgraph-reflection: a critic by the same model, trained or frozen")
@pytest.mark.parametrize(("frozen", "critic"), [([], "trained"), (["reflection"], "frozen")])
def test_reflection(frozen: list[str], critic: str, roll: Roll, chat: Any) -> None:
    """Nothing tells a critic from an agent, so it is trained until its node is named."""
    model = chat()
    agent = one_node(lambda state: {"messages": [model.invoke(state["messages"])]})
    rolled = roll(reflecting(agent, critic_of(model)), says("4", "No, it is 5.", "5", "fine"), frozen=frozen)
    assert around(rolled) == ["graph|ask", "reflection|ask", "graph|ask", "reflection|ask"]
    assert [turn.role for turn in rolled.turns] == ["trained", critic, "trained", critic]
    assert breaks(rolled) == ["first_turn", "other_conversation", None, "other_conversation"]


def big_toolbox(chat: Any) -> Any:
    """langgraph-bigtool's agent with one tool, found by the letters of its description."""
    bigtool = pytest.importorskip("langgraph_bigtool")
    from langgraph.store.memory import InMemoryStore

    def by_letters(texts: list[str]) -> list[list[float]]:
        return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]

    store = InMemoryStore(index={"embed": by_letters, "dims": 26, "fields": ["description"]})
    store.put(("tools",), "add", {"description": "add: Add two numbers."})
    return bigtool.create_agent(chat(), {"add": add}, limit=1).compile(store=store)


@pytest.mark.row(SECTION, "langgraph-bigtool: tools found in a store")
def test_bigtool(roll: Roll, chat: Any) -> None:
    """Once tools are found they are bound, so that the prompt begins otherwise and a new path begins."""

    def script(seen: Seen) -> str:
        if seen.n_tool_results == 0:
            return call("retrieve_tools", query="add numbers")
        assert "add: Add two numbers." in seen.messages[0][1]
        return "I can add."

    rolled = roll(big_toolbox(chat), script)
    assert rolled.places == [("agent", "trained")] * 2
    assert breaks(rolled) == ["first_turn", "tools_changed"]


@pytest.mark.row(SECTION, "langgraph-bigtool: a call of a found tool")
@pytest.mark.skipif(hasattr(ToolNode, "inject_tool_args"), reason="langgraph-prebuilt has what langgraph-bigtool calls")
def test_bigtool_calls(roll: Roll, chat: Any) -> None:
    """langgraph-bigtool 0.0.3 calls what langgraph-prebuilt 1.1 has no more; with or without agenttrain it fails."""
    script = says(call("retrieve_tools", query="add numbers"), call("add", a=2, b=3))
    rolled = roll(big_toolbox(chat), script, status="environment_failure")
    assert "'ToolNode' object has no attribute 'inject_tool_args'" in rolled.result.rollout.cause
    assert rolled.account.dropped == {"status environment_failure": rolled.account.sampled}


class Person(BaseModel):
    """A person."""

    first: str
    age: int


@pytest.mark.row(SECTION, "trustcall: an extraction that is patched")
def test_trustcall(roll: Roll, chat: Any) -> None:
    """A call that doesn't fit its schema is mended by a call of another node, with other tools."""
    trustcall = pytest.importorskip("trustcall")
    extractor = trustcall.create_extractor(chat(), tools=[Person], tool_choice="Person")

    class State(MessagesState):
        person: Person

    def profile(state: State) -> Any:
        return {"person": extractor.invoke({"messages": state["messages"]})["responses"][0]}

    graph = StateGraph(State).add_node(profile).set_entry_point("profile").compile()
    seen_ids: list[str] = []

    def script(seen: Seen) -> str:
        if "json_doc_id=[" not in seen.last:
            return call("Person", first="Ann", age="old")
        seen_ids.append(seen.last.partition("json_doc_id=[")[2].partition("]")[0])
        patches = [{"op": "replace", "path": "/age", "value": 41}]
        return call("PatchFunctionErrors", json_doc_id=seen_ids[0], planned_edits="Set the age.", patches=patches)

    rolled = roll(graph, script, verifier=lambda task, state: state["person"] == Person(first="Ann", age=41))
    assert rolled.places == [("extract", "trained"), ("patch", "trained")]
    assert around(rolled) == ["profile|extract", "profile|patch"]
    assert breaks(rolled) == ["first_turn", "tools_changed"]
    assert rolled.result.rollout.success
