"""A trained policy answers a user's graph as it did in training, in every way to run one, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

import agenttrain
from agenttrain.errors import CaptureError, ConfigError, GraphError, ModelError, RoleError, RunError
from agenttrain.graph.intercept import FUNNELS
from agenttrain.graph.load import load_module
from agenttrain.serving import attached as serving
from agenttrain.serving.served_policy import served_policies

ASK = {"messages": [("user", "Price of item 3?")]}
ORIGINALS = {name: vars(BaseChatModel).get(name) for name in FUNNELS}
IN_PROCESS = '[engine]\nprocess = "shared"\n'


@pytest.fixture
def graph() -> Any:
    """One node that asks a model whose server doesn't exist."""
    return graph_of(ChatOpenAI(model="gpt-4o", api_key="unused", base_url="http://127.0.0.1:9/v1", max_tokens=40))


def graph_of(model: Any, **compiling: Any) -> Any:
    builder = StateGraph(MessagesState)

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile(**compiling)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The order desk's policy as the folder of a run that was made in one process, served there too."""
    run = tmp_path_factory.mktemp("runs") / "desk-1"
    run.mkdir()
    (run / "policy").symlink_to(policy_folder)
    (run / "config.toml").write_text(IN_PROCESS + '[renderer]\nfamily = "default"\n')
    return run


def is_gate_in() -> bool:
    return {name: vars(BaseChatModel).get(name) for name in FUNNELS} != ORIGINALS


def said(state: Any) -> str:
    """Text and tool calls of the last message, ids left out; never empty."""
    return answer_of(state["messages"][-1])


def answer_of(message: Any) -> str:
    calls = [(call["name"], call["args"]) for call in (*message.tool_calls, *message.invalid_tool_calls)]
    assert message.usage_metadata is None or message.usage_metadata["output_tokens"] > 0
    return f"{message.text} {calls}"


# Where it comes from


@pytest.mark.slow
def test_what_was_captured_in_a_rollout_is_what_is_served(new_project: Any, command: Any) -> None:
    """A greedy evaluation's turns, tool results and all, and the same tasks served from its run: equal ids."""
    project = new_project(BODY, tasks=DESK_TASKS, settings=SETTINGS)
    assert command("fit", "graph.py", "--set", "trainer.steps=1", "--set", "trainer.learning_rate=0").code == 0
    rollouts = [r for r in project.store.rollouts() if r.phase == "held_out"]
    turns = {r.task_id: project.store.turns(r.id) for r in rollouts}
    assert max(len(each) for each in turns.values()) > 1
    graph = load_module(project.folder / "graph.py").builder.compile()
    served = agenttrain.attach(graph, project.run.id)
    try:
        for task in DESK_TASKS[2:]:
            messages = served.invoke(task["input"], context=task["context"])["messages"]
            usage = [message.usage_metadata for message in messages if isinstance(message, AIMessage)]
            captured = turns[task["id"]]
            assert [(u["input_tokens"], u["output_tokens"]) for u in usage] == [
                (len(turn.prompt_ids), len(turn.response_ids)) for turn in captured
            ]
            kept = {turn.prompt_ids + turn.response_ids for turn in served_turns(project.run.policy)}
            assert {turn.prompt_ids + turn.response_ids for turn in captured} <= kept
    finally:
        served.close()


def loaded(policy: Path) -> Any:
    return next(each for each in served_policies.values() if each.source.policy == policy.resolve())


def served_turns(policy: Path) -> list[Any]:
    calls = loaded(policy).calls
    assert calls is not None
    return list(calls._turns.values())


BODY = """
import importlib.util, sys
from pathlib import Path
desk = Path(POLICY).parent
spec = importlib.util.spec_from_file_location("order_desk_graph", desk / "graph.py")
order_desk = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = order_desk
spec.loader.exec_module(order_desk)
builder = order_desk.builder
"""
SETTINGS = """
[engine]
process = "shared"
[trainer]
tasks_per_step = 2
group_size = 2
[limits]
turns = 6
tokens = 256
seconds = 60
"""
DESK = {"order": "B1", "item": "lamp", "qty": 3, "price": 7, "stock": 20, "merged": None, "sku": None, "timeouts": []}
DESK_TASKS = [
    {
        "id": f"desk-{i}",
        "input": {"messages": [{"role": "user", "content": f"{question} what A{i}0{i} contains?"}]},
        "context": {**DESK, "order": f"A{i}0{i}", "qty": i + 2},
        "reference": 7,
        "split": "train" if i < 2 else "held_out",
    }
    for i, question in enumerate(["Price of one unit of", "Units in stock of"] * 2)
]


@pytest.mark.slow
def test_a_policy_folder_serves_without_a_run(graph: Any, policy_folder: Path) -> None:
    """From a process of its own, which ends with the block."""
    with agenttrain.use(policy_folder):
        assert said(graph.invoke(ASK))
        pid = loaded(policy_folder).engine.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not served_policies


def test_no_such_run_is_told_before_anything_starts(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No run is named 'nothing'"):
        agenttrain.use("nothing")
    with pytest.raises(RunError, match="No run is named"):
        agenttrain.attach(graph, tmp_path / "nothing")


def test_a_run_without_a_policy_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match=f"Run {tmp_path.name} holds no policy: .* agenttrain fit --resume"):
        agenttrain.use(tmp_path)


def test_another_tokenizer_than_the_runs_is_refused(graph: Any, tmp_path: Path, policy_folder: Path) -> None:
    """Its ids would mean something else."""
    (tmp_path / "policy").symlink_to(policy_folder)
    (tmp_path / "config.toml").write_text(IN_PROCESS + '[provenance.hashes]\nrenderer = "default:1:2"\n')
    with agenttrain.use(tmp_path), pytest.raises(ModelError, match="and the run trained with default:1:2"):
        graph.invoke(ASK)


# Ways to run a graph


def test_every_way_to_run_a_graph_is_answered(graph: Any, policy: Path) -> None:
    """And gives the same greedy answer."""
    served = agenttrain.attach(graph, policy)

    async def anext_ways() -> list[str]:
        streamed = [chunk async for chunk in served.astream(ASK, stream_mode="values")]
        batch = await served.abatch([ASK])
        return [said(await served.ainvoke(ASK)), said(streamed[-1]), said(batch[0])]

    try:
        streamed = list(served.stream(ASK, stream_mode="values"))
        answers = [said(served.invoke(ASK)), said(streamed[-1]), said(served.batch([ASK])[0])]
        answers += asyncio.run(anext_ways())
    finally:
        served.close()
    assert len(set(answers)) == 1
    assert answers[0]
    assert isinstance(served, CompiledStateGraph)


def test_chunks_add_up_to_the_message(graph: Any, policy: Path) -> None:
    """By stream_mode="messages" and by events."""
    served = agenttrain.attach(graph, policy)

    async def events() -> list[Any]:
        return [event async for event in served.astream_events(ASK, version="v2")]

    try:
        chunks = [chunk for chunk, _ in served.stream(ASK, stream_mode="messages")]
        whole = served.invoke(ASK)["messages"][-1]
        streamed = [e["data"]["chunk"] for e in asyncio.run(events()) if e["event"] == "on_chat_model_stream"]
    finally:
        served.close()
    for pieces in (chunks, streamed):
        total: Any = pieces[0]
        for piece in pieces[1:]:
            total = total + piece
        assert isinstance(total, AIMessageChunk)
        assert (total.content, total.tool_calls, total.usage_metadata["output_tokens"]) == (
            whole.content,
            whole.tool_calls,
            whole.usage_metadata["output_tokens"],
        )


def test_the_users_checkpointer_is_kept(policy: Path) -> None:
    """A thread goes on where it stood, and its ids are never made again."""
    saver = InMemorySaver()
    model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6)
    served = agenttrain.attach(graph_of(model, checkpointer=saver), policy)
    config: Any = {"configurable": {"thread_id": "7"}}
    try:
        served.invoke(ASK, config)
        served.invoke({"messages": [("user", "And now?")]}, config)
        turns = served_turns(policy / "policy")
    finally:
        served.close()
    assert served.checkpointer is saver
    assert len(served.get_state(config).values["messages"]) == 4
    assert any(turn.extends == turns[0].id for turn in turns)


def test_a_copy_with_other_settings_is_served_too(graph: Any, policy: Path) -> None:
    """As servers make one to put their own checkpointer in."""
    served = agenttrain.attach(graph, policy)
    try:
        assert said(served.with_config(tags=["mine"]).invoke(ASK))
        assert said(served.copy(update={"checkpointer": None}).invoke(ASK))
    finally:
        served.close()


def test_concurrent_requests_share_the_engines_batch(policy: Path) -> None:
    """From threads and from one event loop; all are answered, in fewer passes than tokens."""
    model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=8)
    served = agenttrain.attach(graph_of(model), policy)
    asks: list[Any] = [{"messages": [("user", f"Price of item {i}?")]} for i in range(8)]

    async def together() -> list[Any]:
        return await asyncio.gather(*(served.ainvoke(ask) for ask in asks))

    try:
        with ThreadPoolExecutor(8) as pool:
            answers = [said(state) for state in pool.map(served.invoke, asks)]
        assert [said(state) for state in asyncio.run(together())] == answers
        engine = loaded(policy / "policy").engine
        assert engine is not None
        stats = engine.stats()
    finally:
        served.close()
    assert stats["decode_rows"] > 1.5 * stats["decode_steps"]


def test_whoever_serves_a_policy_again_finds_the_engine_that_serves_it(graph: Any, policy: Path) -> None:
    """Also one that was named before others came and went."""
    early = serving.use(policy)
    with serving.use(policy):
        graph.invoke(ASK)
    with early, serving.use(policy) as late:
        graph.invoke(ASK)
        assert early.loaded is not None
        assert late.loaded is early.loaded
    assert early.loaded is None


def test_a_run_that_goes_on_after_the_end_loads_nothing_again(policy: Path) -> None:
    """An engine that nobody would unload."""
    model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6)
    builder = StateGraph(MessagesState)
    for name in ("one", "two"):
        builder.add_node(name, lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.set_entry_point("one")
    builder.add_edge("one", "two")
    served = agenttrain.attach(builder.compile(), policy)
    chunks = served.stream(ASK, stream_mode="updates")
    next(chunks)
    served.close()
    with pytest.raises(RunError, match="is not served any more: close"):
        next(chunks)
    assert not served_policies


def test_an_async_block_serves_what_is_begun_in_it(graph: Any, policy: Path) -> None:
    """Tasks and threads that copy the context."""

    async def main() -> list[str]:
        async with agenttrain.use(policy):
            task = asyncio.create_task(graph.ainvoke(ASK))
            return [said(await task), said(await asyncio.to_thread(graph.invoke, ASK))]

    one, other = asyncio.run(main())
    assert one == other


def test_what_can_be_attached(graph: Any, policy: Path) -> None:
    """A StateGraph and a factory too; a context manager is entered first, a served graph is attached once."""
    served = [agenttrain.attach(each, policy) for each in (graph.builder, lambda: graph)]
    assert all(isinstance(each, CompiledStateGraph) for each in served)
    with pytest.raises(GraphError, match="serves a policy already"):
        agenttrain.attach(served[0], policy)
    with pytest.raises(GraphError, match="attach got a dict, and a LangGraph graph is needed"):
        agenttrain.attach({}, policy)


# What is left alone


def test_nothing_is_patched_before_the_first_call_and_after_the_last(graph: Any, policy: Path) -> None:
    served = agenttrain.attach(graph, policy)
    assert not is_gate_in()
    chunks = served.stream(ASK)
    next(chunks)
    assert is_gate_in()
    list(chunks)
    assert not is_gate_in()
    served.close()


def test_calls_outside_of_the_served_graph_go_to_their_own_models(graph: Any, policy: Path) -> None:
    """On the consumer's side of a stream, and on another thread meanwhile."""
    served = agenttrain.attach(graph, policy)
    mine = GenericFakeChatModel(messages=iter([AIMessage("mine")] * 2))
    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.append(mine.invoke("hi").text))
    try:
        for _ in served.stream(ASK):
            thread.start()
            thread.join()
            heard.append(mine.invoke("hi").text)
    finally:
        served.close()
    assert heard == ["mine", "mine"]


def test_a_graph_that_is_not_attached_is_not_answered(graph: Any, policy: Path) -> None:
    """The original keeps its own model."""
    served = agenttrain.attach(graph, policy)
    try:
        assert said(served.invoke(ASK))
    finally:
        served.close()
    with pytest.raises(Exception, match="Connection error"):
        graph_of(ChatOpenAI(model="m", api_key="x", base_url="http://127.0.0.1:9/v1", max_retries=0)).invoke(ASK)


# Roles and settings


def test_auxiliary_calls_stay_with_the_users_model(policy: Path) -> None:
    """By the selectors of the call, and of the graph's own @trainable."""
    judge = GenericFakeChatModel(messages=iter([AIMessage("fine")] * 2))
    builder = StateGraph(MessagesState)
    model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("judge", lambda state: {"messages": [judge.invoke(state["messages"])]})
    builder.set_entry_point("agent")
    builder.add_edge("agent", "judge")
    with agenttrain.use(policy, auxiliary=["judge"]):
        assert builder.compile().invoke(ASK)["messages"][-1].text == "fine"
    noted = agenttrain.trainable(builder.compile(), auxiliary=["node:judge"])
    served = agenttrain.attach(noted, policy)
    assert served.invoke(ASK)["messages"][-1].text == "fine"
    served.close()
    with agenttrain.use(policy), pytest.raises(RoleError, match=r"two models.*Where a policy serves: use\(RUN, aux"):
        builder.compile().invoke(ASK)


class LoopTeller(GenericFakeChatModel):
    """Answers by the event loop that it runs on; a client that it kept would belong to that one."""

    seen: ClassVar[list[int]] = []

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(id(asyncio.get_running_loop()))
        return await super()._agenerate(*args, **kwargs)

    async def _astream(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(id(asyncio.get_running_loop()))
        async for chunk in super()._astream(*args, **kwargs):
            yield chunk


def test_the_users_own_models_answer_on_the_event_loop_of_the_server(policy: Path) -> None:
    """Where their clients keep connections, however they are asked."""
    judge = LoopTeller(messages=iter([AIMessage("fine")] * 9))

    async def judged(state: MessagesState) -> dict[str, Any]:
        chunks = [chunk async for chunk in judge.astream(state["messages"])]
        if hasattr(judge, "_achat_model_stream_v3"):
            assert await (await judge.astream_events("x", version="v3")).output
        return {"messages": [await judge.ainvoke(state["messages"]), *chunks[:0]]}

    builder = StateGraph(MessagesState)
    builder.add_node("judge", judged)
    builder.set_entry_point("judge")
    served = agenttrain.attach(builder.compile(), policy, auxiliary=["judge"])

    async def asked() -> int:
        assert said(await served.ainvoke(ASK)) == "fine []"
        return id(asyncio.get_running_loop())

    loop = asyncio.run(asked())
    served.close()
    assert set(judge.seen) == {loop}
    assert len(judge.seen) >= 2


NOTED = """
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from agenttrain import attach, trainable

model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=40)
judge = GenericFakeChatModel(messages=iter([AIMessage("fine")] * 4))
builder = StateGraph(MessagesState)
builder.add_node("agent", lambda state: {{"messages": [model.invoke(state["messages"])]}})
builder.add_node("judge", lambda state: {{"messages": [judge.invoke(state["messages"])]}})
builder.set_entry_point("agent")
builder.add_edge("agent", "judge")

@trainable(auxiliary=["judge"])
def graph():
    return builder.compile()

served = attach(builder.compile(), {run!r})
by_factory = attach(graph, {run!r})
"""


def test_a_graph_file_may_hold_its_own_served_graph(tmp_path: Path, policy_folder: Path) -> None:
    """As langgraph.json names it: roles are those of the @trainable of the run's file, which is imported once."""
    file = tmp_path / "graph.py"
    file.write_text(NOTED.format(run=str(tmp_path)))
    (tmp_path / "policy").symlink_to(policy_folder)
    provenance = f'[provenance]\ngraph = "{file}"\nattribute = "graph"\n'
    (tmp_path / "config.toml").write_text(IN_PROCESS + provenance)
    module = load_module(file)
    try:
        for served in (module.served, module.by_factory):
            messages = served.invoke(ASK)["messages"]
            assert messages[-1].text == "fine"
            assert messages[-2].response_metadata["model_provider"] == "agenttrain"
    finally:
        module.served.close()
        module.by_factory.close()
    assert not served_policies


HOOKED = """
from agenttrain import hookimpl

@hookimpl
def agenttrain_role(site):
    return ("auxiliary", "the judge is ours") if site.node == "judge" else None
"""


@pytest.mark.parametrize("served", ["served", "by_factory"])
def test_what_the_graph_file_decides_in_training_holds_where_it_serves(
    tmp_path: Path, policy_folder: Path, served: str
) -> None:
    """A graph.py with a hook that decides roles is a plugin in both."""
    file = tmp_path / "graph.py"
    text = NOTED.format(run=str(tmp_path)).replace('@trainable(auxiliary=["judge"])', "@trainable")
    file.write_text(text + HOOKED)
    (tmp_path / "policy").symlink_to(policy_folder)
    provenance = f'[provenance]\ngraph = "{file}"\nattribute = "graph"\n'
    (tmp_path / "config.toml").write_text(IN_PROCESS + provenance)
    module = load_module(file)
    try:
        assert getattr(module, served).invoke(ASK)["messages"][-1].text == "fine"
    finally:
        module.served.close()
        module.by_factory.close()


def test_a_selector_that_cannot_be_read_is_told_at_once(policy: Path) -> None:
    with pytest.raises(RoleError, match="begins with 'nodes'"):
        agenttrain.use(policy, auxiliary=["nodes:judge"])


def test_the_users_temperature_holds_and_what_the_policy_does_not_follow_is_told_once(policy: Path) -> None:
    """Greedy where the user's model says nothing, as the run was evaluated."""
    hot = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=40, temperature=20, top_p=0.5)
    with agenttrain.use(policy):
        with pytest.warns(UserWarning, match="asks for top_p=0.5"):
            answers = {answer_of(hot.invoke("Price?"))}
        answers |= {answer_of(hot.invoke("Price?")) for _ in range(7)}
        cool = {answer_of(hot.invoke("Price?", temperature=0)) for _ in range(4)}
    assert len(answers) > 1
    assert len(cool) == 1


def test_a_block_is_entered_once(policy: Path) -> None:
    block = agenttrain.use(policy)
    with block, pytest.raises(ConfigError, match="open already"), block:
        pass
    with block:
        assert is_gate_in()
    assert not is_gate_in()


def test_a_prompt_without_room_is_an_ordinary_error(graph: Any, policy: Path) -> None:
    """No BaseException leaves a server's graph."""
    with agenttrain.use(policy), pytest.raises(RuntimeError, match=r"The prompt has .* and the policy takes 2048"):
        graph.invoke({"messages": [("user", "price " * 3000)]})


def test_a_call_without_a_message_is_an_ordinary_error(policy: Path) -> None:
    with agenttrain.use(policy), pytest.raises(CaptureError, match="A call came without a message"):
        ChatOpenAI(model="gpt-4o", api_key="unused").invoke([])


def test_a_call_that_is_given_up_frees_the_engine(policy: Path) -> None:
    """A client that goes away in the middle of an answer."""

    async def main() -> None:
        async with agenttrain.use(policy):
            long = ChatOpenAI(model="gpt-4o", api_key="unused", temperature=9)
            await long.ainvoke("Hi.", max_tokens=1)  # the policy is loaded
            engine = loaded(policy / "policy").engine
            assert engine is not None
            asking = asyncio.create_task(long.ainvoke("Tell all.", max_tokens=1900))
            until = time.monotonic() + 30
            while not engine._open and time.monotonic() < until:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while engine._open and time.monotonic() < until:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            assert not engine._open  # type: ignore[attr-defined]

    asyncio.run(main())
