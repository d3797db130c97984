"""What was promoted answers a user's graph; a canary's runs are marked or held back, and how they went is counted."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Command, interrupt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import agenttrain
from agenttrain.errors import ConfigError
from agenttrain.folder_hash import policy_hash
from agenttrain.promotion.canary import draws_canary
from agenttrain.promotion.ledger import Ledger
from agenttrain.promotion.outcomes import Outcomes
from agenttrain.promotion_record import LedgerEntry
from agenttrain.serving import attached as serving
from agenttrain.serving.served_policy import served_policies
from agenttrain.telemetry import names

ASK = {"messages": [("user", "Price of item 3?")]}
IN_PROCESS = '[engine]\nprocess = "shared"\n[renderer]\nfamily = "default"\n'


class Desk:
    """The current directory, with runs of one policy and their ledger."""

    def __init__(self, folder: Path, policy: Path) -> None:
        self.folder, self._policy = folder, policy
        self.ledger = Ledger(folder / "promotions" / "desk")

    def do(self, deed: Any, run_id: str, *, tools: str = "marked", share: float | None = None) -> LedgerEntry:
        run = self.folder / "runs" / run_id
        if not run.exists():
            shutil.copytree(self._policy, run / "policy")
            settings = f'[canary]\nmin_outcomes = 2\ntools = "{tools}"\n'
            (run / "config.toml").write_text(f'model = "{self._policy}"\n{IN_PROCESS}{settings}')
        return self.ledger.append(
            deed,
            graph=f"{self.folder / 'graph.py'}:graph",
            run_id=run_id,
            policy=run / "policy",
            weights=policy_hash(run / "policy"),
            why="because",
            share=share,
        )

    def try_canary(self, *, tools: str = "marked") -> tuple[str, str]:
        """(a thread that the canary desk-2 answers, one that desk-1 does)."""
        self.do("promoted", "desk-1")
        salt = self.do("canary", "desk-2", tools=tools, share=0.5).hash
        is_canary = {f"t{i}": draws_canary(f"t{i}", salt=salt, share=0.5) for i in range(50)}
        return next(t for t in is_canary if is_canary[t]), next(t for t in is_canary if not is_canary[t])

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(outcomes, successes) of the canary and of the incumbent."""
        trial = next(line.hash for line in self.ledger.entries() if line.deed == "canary")
        with closing(Outcomes(self.ledger.folder)) as outcomes:
            return [(arm.n, arm.n_success) for arm in outcomes.counts(trial)]


@pytest.fixture
def desk(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    yield Desk(tmp_path, policy_folder)
    assert not served_policies


def graph_of(*nodes: Any, **compiling: Any) -> Any:
    """A node that asks a model, and the nodes after it."""
    model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6)
    builder = StateGraph(MessagesState)

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    for node in (agent, *nodes):
        builder.add_node(node.__name__, node)
    builder.set_entry_point("agent")
    for one, other in zip((agent, *nodes), nodes, strict=False):
        builder.add_edge(one.__name__, other.__name__)
    return builder.compile(**compiling)


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def answered_by(state: Any) -> str:
    return str(state["messages"][-1].response_metadata["model_name"])


# Who answers


def test_what_is_promoted_answers_new_conversations_while_the_process_runs(desk: Desk) -> None:
    desk.do("promoted", "desk-1")
    served = agenttrain.attach(graph_of(), "promoted")
    with closing(served):
        assert answered_by(served.invoke(ASK, config("a"))) == "desk-1"
        desk.do("promoted", "desk-2")
        by = [answered_by(served.invoke(ASK, config(thread))) for thread in "aba"]
        assert by == ["desk-1", "desk-2", "desk-1"]
        desk.do("rolled_back", "desk-1")
        assert answered_by(served.invoke(ASK)) == "desk-1"


@pytest.mark.slow
def test_a_share_of_threads_and_event_loops_is_the_canarys(desk: Desk) -> None:
    mine, other = desk.try_canary()
    served = agenttrain.attach(graph_of(), "promoted")

    async def both() -> list[Any]:
        return await asyncio.gather(*(served.ainvoke(ASK, config(thread)) for thread in (mine, other)))

    with closing(served):
        with ThreadPoolExecutor(4) as pool:
            states = list(pool.map(lambda thread: served.invoke(ASK, config(thread)), [mine, other] * 4))
        assert [answered_by(state) for state in states] == ["desk-2", "desk-1"] * 4
        assert [answered_by(state) for state in asyncio.run(both())] == ["desk-2", "desk-1"]


@pytest.mark.slow
def test_in_a_block_the_thread_of_a_graph_is_the_conversation(desk: Desk) -> None:
    mine, other = desk.try_canary()
    graph = graph_of()
    with agenttrain.use("promoted:desk") as block:
        assert [answered_by(graph.invoke(ASK, config(t))) for t in (mine, other)] == ["desk-2", "desk-1"]
        assert block.describe()["canary"]["conversations"] == {"canary": 1, "incumbent": 1}


@pytest.mark.slow
def test_a_conversation_of_a_canary_that_is_taken_back_goes_on_with_the_incumbent(desk: Desk) -> None:
    """From its next call on, in the middle of a run too; the run's mark stays."""
    mine, _ = desk.try_canary()
    marks = []

    def again(state: MessagesState) -> dict[str, Any]:
        marks.append(agenttrain.current_serving().is_canary)
        desk.do("taken_back", "desk-2")
        return {"messages": [ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6).invoke(state["messages"])]}

    served = agenttrain.attach(graph_of(again), "promoted")
    with closing(served):
        messages = served.invoke(ASK, config(mine))["messages"]
    assert [m.response_metadata["model_name"] for m in messages[1:]] == ["desk-2", "desk-1"]
    assert marks == [True]


@pytest.mark.slow
def test_a_server_asks_by_conversation(desk: Desk) -> None:
    mine, other = desk.try_canary()
    with closing(serving.open_serving("promoted")) as opened:
        assert [opened.served(t).is_canary for t in (mine, other)] == [True, False]
        assert opened.calls_for(mine) is not opened.calls_for(other)
        assert opened.calls() is opened.calls_for(other)
        assert [opened.record_outcome(t, True) for t in (mine, other)] == [True, True]
        told = opened.describe()
    promoted, canary = desk.ledger.entries()
    assert told == {
        "promotion": str(desk.ledger.folder),
        "serves": "desk-1",
        "since": promoted.at,
        "canary": {
            "run_id": "desk-2",
            "since": canary.at,
            "share": 0.5,
            "tools": "marked",
            "conversations": {"canary": 1, "incumbent": 1},
            "outcomes": {"canary": {"n": 1, "successes": 1}, "incumbent": {"n": 1, "successes": 1}},
            "next_look": 2,
        },
    }


@pytest.mark.slow
def test_a_canary_that_cannot_be_loaded_is_not_tried(desk: Desk) -> None:
    mine, _ = desk.try_canary()
    (desk.folder / "runs" / "desk-2" / "policy" / "model.safetensors").write_bytes(b"none")
    served = agenttrain.attach(graph_of(), "promoted", outcome=lambda input, state: True)
    with closing(served):
        assert [answered_by(served.invoke(ASK, config(mine))) for _ in range(2)] == ["desk-1", "desk-1"]
    assert desk.counts == [(0, 0), (0, 0)]


# Marks


def test_tools_and_nodes_know_who_answers(desk: Desk) -> None:
    mine, other = desk.try_canary()
    marks, seen = [], []

    def node(state: MessagesState, config: RunnableConfig) -> None:
        marks.append(agenttrain.current_serving())
        seen.append((config["metadata"].get("agenttrain_canary"), "agenttrain:canary" in (config.get("tags") or ())))

    served = agenttrain.attach(graph_of(node), "promoted")
    with closing(served):
        for thread in (mine, other):
            served.invoke(ASK, {**config(thread), "tags": ["mine"]})
    assert marks == [
        agenttrain.Served(run_id="desk-2", is_canary=True, conversation=mine),
        agenttrain.Served(run_id="desk-1", is_canary=False, conversation=other),
    ]
    assert [canary for canary, _ in seen] == [True, False]
    with pytest.raises(LookupError, match="No policy serves here"):
        agenttrain.current_serving()


@pytest.mark.slow
def test_spans_of_calls_say_who_answered(desk: Desk) -> None:
    mine, other = desk.try_canary()
    exporter = InMemorySpanExporter()
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))  # type: ignore[attr-defined]
    graph = graph_of()
    with agenttrain.use("promoted"):
        for thread in (mine, other):
            graph.invoke(ASK, config(thread))
    exporter.shutdown()
    found = [span.attributes or {} for span in exporter.get_finished_spans() if span.name.startswith("chat ")]
    assert [tuple(each[name] for name in (names.RUN_ID, names.CANARY, names.CONVERSATION_ID)) for each in found] == [
        ("desk-2", True, mine),
        ("desk-1", False, other),
    ]


paid = []


@tool
def pay(order: str) -> str:
    """Pay an order."""
    paid.append(order)
    return "paid"


def test_a_canarys_external_tools_run_their_stand_ins(desk: Desk) -> None:
    """The incumbent's run themselves, as does a tool of which nothing is declared."""
    mine, other = desk.try_canary(tools="stand_in")
    said = []

    def node(state: MessagesState) -> None:
        said.append(pay.invoke({"order": "A1"}))

    noted = agenttrain.trainable(graph_of(node), tools={"pay": agenttrain.External(stand_in=lambda order: "as if")})
    served = agenttrain.attach(noted, "promoted")
    with closing(served):
        for thread in (mine, other):
            served.invoke(ASK, config(thread))
    assert (said, paid) == (["as if", "paid"], ["A1"])


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_canarys_sandboxed_tools_have_a_sandbox(desk: Desk, is_async: bool) -> None:
    """Of their own for each run."""
    mine, other = desk.try_canary(tools="stand_in")
    found = []

    def node(state: MessagesState) -> None:
        try:
            found.append(agenttrain.current_sandbox().read("note.txt"))
        except LookupError:
            found.append(None)

    spec = agenttrain.SandboxSpec(files=lambda task: {"note.txt": task.id})
    served = agenttrain.attach(agenttrain.trainable(graph_of(node), sandbox=spec), "promoted")
    with closing(served):
        for thread in (mine, other):
            if is_async:
                asyncio.run(served.ainvoke(ASK, config(thread)))
            else:
                served.invoke(ASK, config(thread))
    assert found == [mine, None]


@pytest.mark.slow
def test_a_sandbox_that_cannot_be_removed_fails_no_run(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Removing it is waited for by nobody, and what goes wrong there is logged."""
    mine, _ = desk.try_canary(tools="stand_in")
    goes = threading.Event()

    def node(state: MessagesState) -> None:
        sandbox: Any = agenttrain.current_sandbox()
        close = sandbox.close

        def fails() -> None:
            assert goes.wait(60)
            close()
            raise OSError("the device is busy")

        sandbox.close = fails

    noted = agenttrain.trainable(graph_of(node), sandbox=agenttrain.SandboxSpec())
    served = agenttrain.attach(noted, "promoted")
    with closing(served):
        assert answered_by(served.invoke(ASK, config(mine))) == "desk-2"
        goes.set()
    for thread in threading.enumerate():
        if thread.name == "agenttrain-leave":
            thread.join()
    assert f"The sandbox of conversation {mine} could not be removed" in caplog.text


# Outcomes


def test_each_run_is_judged_by_the_users_function(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Which knows the conversation; what it doesn't know, or raises, or says in words, is not counted."""
    mine, other = desk.try_canary()
    said: dict[str, Any] = {mine: True, other: 0.5, "x": None, "y": "well"}

    def outcome(input: Any, state: Any) -> Any:
        assert input == ASK
        assert len(state["messages"]) == 2
        return said[agenttrain.current_serving().conversation]

    served = agenttrain.attach(graph_of(), "promoted", outcome=outcome)
    with closing(served):
        for thread in (mine, other, "x", "y", "not known"):
            list(served.stream(ASK, config(thread), stream_mode="updates"))
        assert "How a conversation went is 'well', which is neither a bool nor a number" in caplog.text
        assert desk.counts == [(1, 1), (1, 0)]
        said[mine] = False
        asyncio.run(served.ainvoke(ASK, config(mine)))
    assert desk.counts == [(1, 0), (1, 0)]


def test_the_users_function_is_called_without_a_canary_too(desk: Desk) -> None:
    """What it gives is kept nowhere."""
    desk.do("promoted", "desk-1")
    heard = []

    def outcome(input: Any, state: Any) -> bool:
        heard.append((input, len(state["messages"]), agenttrain.current_serving().conversation))
        return True

    for run in ("promoted", "runs/desk-1"):
        with closing(agenttrain.attach(graph_of(), run, outcome=outcome)) as served:
            served.invoke(ASK, config("t"))
    assert heard == [(ASK, 2, "t")] * 2
    assert not (desk.ledger.folder / "canary.db").exists()


@pytest.mark.slow
def test_a_run_that_raises_is_a_failure_of_its_arm(desk: Desk) -> None:
    """Without a function one that ended is a success; one that its consumer left is neither."""
    mine, other = desk.try_canary()

    def node(state: MessagesState) -> None:
        if agenttrain.current_serving().is_canary:
            raise KeyError("order")

    served = agenttrain.attach(graph_of(node), "promoted")
    with closing(served):
        with pytest.raises(KeyError, match="order"):
            served.invoke(ASK, config(mine))
        served.invoke(ASK, config(other))
        left = served.stream(ASK, config("left"))
        next(left)
        left.close()
    assert desk.counts == [(1, 0), (1, 1)]


@pytest.mark.slow
def test_a_run_that_waits_for_a_human_is_judged_when_it_has_ended(desk: Desk) -> None:
    """At an interrupt, and at a breakpoint."""
    mine, other = desk.try_canary()

    def ask_human(state: MessagesState) -> None:
        interrupt("may I?")

    graph = graph_of(ask_human, checkpointer=InMemorySaver())
    served = agenttrain.attach(graph, "promoted", outcome=lambda input, state: True)
    with closing(served):
        served.invoke(ASK, config(mine))
        served.invoke(ASK, config(other), interrupt_before=["ask_human"])
        assert desk.counts == [(0, 0), (0, 0)]
        served.invoke(Command(resume="yes"), config(mine))
    assert desk.counts == [(1, 1), (0, 0)]


def test_a_function_that_cannot_judge_is_told_at_once(desk: Desk) -> None:
    desk.do("promoted", "desk-1")

    async def later(input: Any, state: Any) -> bool:
        return True

    with pytest.raises(ConfigError, match=r"outcome=<lambda> can't be called with \(input, state\)"):
        agenttrain.attach(graph_of(), "promoted", outcome=lambda state: True)
    with pytest.raises(ConfigError, match="outcome=later, which is async"):
        agenttrain.attach(graph_of(), "promoted", outcome=later)  # type: ignore[arg-type]
