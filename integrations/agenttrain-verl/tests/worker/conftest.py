"""What runs in a rollout worker, in this process and without Ray: real graphs, the local engine, veRL's own worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agenttrain_verl import cpu

os.environ.update(cpu.environment_variables())  # veRL reads them when it is imported

from agenttrain.fit import spec_of
from agenttrain.local.engine import LocalEngine
from agenttrain.prepare import Job, prepare, trainable_job
from agenttrain.records import RolloutRequest
from agenttrain.run_folder import RunFolder, new_run

if TYPE_CHECKING:
    from agenttrain_verl.host import Host, HostSpec

ORDER_DESK = Path(__file__).parents[4] / "examples" / "order-desk" / "graph.py"
SUMMARIZING = Path(__file__).parents[1] / "graphs" / "summarizing" / "graph.py"
GRAPH = '''\
"""A graph that does what a task says, and then asks the policy once."""

import threading
import time
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, hookimpl, trainable

HERE = Path(__file__).parent
model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=6)


def agent(state: MessagesState) -> dict:
    act(state["messages"][-1].content)
    return {"messages": [model.invoke(state["messages"])]}


def act(what: str) -> None:
    threads = HERE / "threads"
    threads.mkdir(exist_ok=True)
    (threads / threading.current_thread().name.replace("/", "-")).touch()
    if what == "break":
        raise ConnectionError("the line is broken")
    if what == "break once" and not (HERE / "broken").exists():
        (HERE / "broken").touch()
        raise ConnectionError("the line is broken")
    if what == "hang":
        (HERE / "hangs").touch()
        while not (HERE / "enough").exists():
            time.sleep(0.02)
    if what == "escape":
        thread = threading.Thread(target=call_from_outside)
        thread.start()
        thread.join()


def call_from_outside() -> None:
    """A call that belongs to no rollout: its thread has no context."""
    try:
        model.invoke("hello")
    except RuntimeError:
        pass  # the graph goes on, and the run must not


def says_something(task: Task, state: dict) -> float:
    if task.input["messages"][0]["content"] == "no score":
        raise ValueError("the verifier is broken")
    return float(len(state["messages"]))


@trainable(model="model", tasks="tasks.jsonl", verifier=says_something)
def graph():
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile()
'''


@dataclass(slots=True)
class Workplace:
    """A run of a graph, and an engine that answers it."""

    job: Job
    run: RunFolder
    engine: LocalEngine
    hosts: list[Host] = field(default_factory=list)

    def spec(self, **others: Any) -> HostSpec:
        from agenttrain_verl.host import HostSpec  # here: what veRL's imports warn of is known only once tests run

        settings = {"concurrency": 8, "max_length": self.engine.max_length, **others}
        return HostSpec(
            rollout=spec_of(self.job, self.run),
            node_id="here",
            takes_seeds=True,
            engine_name="local",
            stock=False,
            **settings,
        )

    async def host(self, *, is_on_drivers_node: bool = True, **others: Any) -> Host:
        from agenttrain_verl.host import Host

        host = await asyncio.to_thread(
            Host.open,
            self.spec(**others),
            self.engine,
            asyncio.get_running_loop(),
            is_on_drivers_node=is_on_drivers_node,
        )
        self.hosts.append(host)
        return host

    def group(self, place: int, n: int = 4, *, phase: Any = "train") -> list[RolloutRequest]:
        """The requests of one task, by its place in the file."""
        task = self.job.train[place]
        return [RolloutRequest(task=task, phase=phase, step=1, sibling=each, temperature=0.9) for each in range(n)]

    def work(self, coroutine: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine on a new loop; hosts that it left open are closed."""

        async def whole() -> Any:
            try:
                return await asyncio.wait_for(coroutine(), timeout=120)
            finally:
                for host in self.hosts:
                    await asyncio.to_thread(host.close)

        return asyncio.run(whole())


@pytest.fixture(scope="session")
def desk_engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(ORDER_DESK.parent / "policy")
    yield engine
    engine.close()


@pytest.fixture
def desk(tmp_path: Path, desk_engine: LocalEngine) -> Workplace:
    """The order desk."""
    job = trainable_job(prepare(str(ORDER_DESK), cwd=tmp_path, flags={}))
    return Workplace(job, new_run(tmp_path / "runs", "desk"), desk_engine)


@pytest.fixture
def summarizing(tmp_path: Path, desk_engine: LocalEngine) -> Workplace:
    """A graph whose rollouts have two trajectories and a summary, on the order desk's policy."""
    job = trainable_job(prepare(str(SUMMARIZING), cwd=tmp_path, flags={}))
    return Workplace(job, new_run(tmp_path / "runs", "summarizing"), desk_engine)


@pytest.fixture(scope="session")
def toy_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    from agenttrain.testing import tiny_model

    engine = LocalEngine(tiny_model(tmp_path_factory.mktemp("toy") / "model"))
    yield engine
    engine.close()


@pytest.fixture
def toy(tmp_path: Path, toy_engine: LocalEngine) -> Callable[..., Workplace]:
    """toy("break", …): a graph whose tasks do what they are called."""

    def made(*tasks: str, **tables: Any) -> Workplace:
        from agenttrain.testing import toy_project

        project = toy_project(tmp_path, n_tasks=3)
        project.graph.write_text(GRAPH, encoding="utf-8")
        rows = [
            f'{{"id": "{n}", "input": {{"messages": [{{"role": "user", "content": "{what}"}}]}}, "split": "train"}}\n'
            for n, what in enumerate(tasks)
        ]
        held_out = '{"id": "last", "input": {"messages": []}, "split": "held_out"}\n'
        (tmp_path / "tasks.jsonl").write_text("".join(rows) + held_out, encoding="utf-8")
        job = trainable_job(prepare(str(project.graph), cwd=tmp_path, flags=tables))
        return Workplace(job, new_run(tmp_path / "runs", "toy"), toy_engine)

    return made


@dataclass(slots=True)
class Queue:
    """In TransferQueue's place: keeps what is put, and needs no Ray."""

    puts: list[dict[str, Any]] = field(default_factory=list)
    tags: list[tuple[str, str]] = field(default_factory=list)
    """(key, status) of what was put without fields."""

    def init(self) -> None: ...

    async def async_kv_put(self, *, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.append((key, tag["status"]))

    async def async_kv_batch_put(self, **put: Any) -> None:
        self.puts.append(put)


@pytest.fixture(scope="session")
def verl_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """veRL's agent loop worker as ours, without an actor; `queue` holds what it put."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    from agenttrain_verl.compose import compose
    from agenttrain_verl.plan import plan_of
    from agenttrain_verl.rollout_worker import RolloutWorker

    folder = tmp_path_factory.mktemp("worker")
    job = trainable_job(prepare(str(ORDER_DESK), cwd=folder, flags={"trainer": {"group_size": 4}}))
    config = compose(plan_of(job.config, job.model, n_tasks=len(job.train)), run_dir=folder)
    with pytest.MonkeyPatch.context() as patch:
        queue = Queue()
        patch.setattr(agent_loop_tq, "tq", queue)
        worker = RolloutWorker(config, None)
        worker.queue = queue
        yield worker
