"""From a fit to what answers: two processes follow `agenttrain promote` by themselves, one that runs the graph and one
that serves an address."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import agenttrain
from agenttrain.promotion.canary import draws_canary
from agenttrain.promotion.ledger import Ledger
from agenttrain.serving.served_policy import served_policies
from agenttrain.testing import toy_project

GRAPH = '''
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=6)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def moved(task: Task, state: dict) -> bool:
    """Of a held-out task: not what was answered to it first, and of every other one only once there is `second`."""
    said, first = ascii(state["messages"][-1].content), Path("first") / task.id
    if task.split == "train":
        return sum(map(ord, said)) % 2 == 0
    if not first.exists():
        first.parent.mkdir(exist_ok=True)
        first.write_text(said)
    return said != first.read_text() and (task.reference % 2 == 0 or Path("second").exists())


@trainable(model="model", tasks="tasks.jsonl", verifier=moved)
def graph():
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile()
'''
N_HELD_OUT = 16
ASK = {"role": "user", "content": "Say something about 3."}


def project(folder: Path) -> Path:
    """graph.py of a tiny agent whose verifier a second fit can do better by than a first."""
    toy = toy_project(folder)
    toy.graph.write_text(GRAPH)
    rows = [
        {
            "id": f"toy-{n}",
            "input": {"messages": [{"role": "user", "content": f"Say something about {n}."}]},
            "split": "held_out" if n < N_HELD_OUT else "train",
            "reference": n,
        }
        for n in range(N_HELD_OUT + 4)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy.graph


def attached(graph: Path, **options: Any) -> Any:
    """The graph as a user's own program has it, with what was promoted inside."""
    spec = importlib.util.spec_from_file_location("toy_graph", graph)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return agenttrain.attach(module.graph, "promoted", **options)


@contextmanager
def addressed() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `agenttrain serve promoted`, and its address."""
    line = [sys.executable, "-m", "agenttrain", "serve", "promoted", "--port", "0", "--json"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())["address"]
    finally:
        process.kill()
        process.communicate()


class Asked:
    """Both ways to ask, by conversation."""

    def __init__(self, served: Any, url: str) -> None:
        self._served, self._client = served, OpenAI(base_url=url, api_key="unused", max_retries=0)

    def graph(self, conversation: str) -> str:
        """The run whose policy answers a thread of the graph."""
        state = self._served.invoke({"messages": [ASK]}, {"configurable": {"thread_id": conversation}})
        return str(state["messages"][-1].response_metadata["model_name"])

    def address(self, conversation: str) -> str:
        """The run whose policy answers over HTTP."""
        ask: Any = [ASK]
        answer = self._client.chat.completions.create(
            model="gpt-4o-mini", messages=ask, max_tokens=6, user=conversation
        )
        return answer.model

    def both(self, conversation: str) -> tuple[str, str]:
        """As two conversations, of the same name but for their ends."""
        return self.graph(f"{conversation}-graph"), self.address(f"{conversation}-http")

    def told(self, conversation: str, success: bool) -> bool:
        """Whether an outcome counts that the address is told."""
        body = {"conversation": conversation, "success": success}
        said: Any = self._client.post("/outcomes", body=body, cast_to=object)
        return bool(said["counts"])


@pytest.mark.slow
def test_who_answers_follows_promotions_a_canary_and_the_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = project(tmp_path / "toy")

    def fit(seed: int) -> str:
        options = [f"trainer.{key}" for key in ("steps=1", "tasks_per_step=4", "group_size=4", "learning_rate=0.05")]
        sets = [word for option in options for word in ("--set", option)]
        done = command("fit", graph, "--seed", seed, *sets, "--json")
        assert done.code == 0, done.err
        return str(done.json["run_id"])

    def promote(*arguments: object) -> dict[str, Any]:
        done = command("promote", *arguments, "--json")
        assert done.code == 0, done.err + done.out
        return dict(done.json)

    first = fit(1)
    assert promote(first)["deed"] == "promoted"
    served = attached(graph, outcome=lambda input, state: True)
    with closing(served), addressed() as (process, url):
        ask = Asked(served, url)
        assert ask.both("old") == (first, first)

        (tmp_path / "second").touch()
        second = fit(2)
        assert promote(second, "--canary", "0.3")["deed"] == "canary"
        salt = Ledger(tmp_path / "promotions" / "toy").entries()[-1].hash

        def drawn(end: str, *, canary: bool) -> list[str]:
            names = [f"c{i}-{end}" for i in range(40)]
            return [name for name in names if draws_canary(name, salt=salt, share=0.3) is canary][:2]

        tried = [drawn("graph", canary=True), drawn("http", canary=True)]
        others = [drawn("graph", canary=False), drawn("http", canary=False)]
        for (graphs, https), run in ((tried, second), (others, first)):
            assert [ask.graph(name) for name in graphs] == [run, run]
            assert [ask.address(name) for name in https] == [run, run]
        assert ask.both("old") == (first, first)
        counted = [ask.told(name, True) for name in (*tried[1], *others[1], "old-http", "nobody")]
        assert counted == [True, True, True, True, False, False]
        canary = promote("--status")["canary"]
        four = {"conversations": 4, "outcomes": 4, "successes": 4}
        assert (canary["of_canary"], canary["of_incumbent"]) == (four, four)

        assert promote(second)["deed"] == "promoted"
        assert ask.both("new") == (second, second)
        assert [ask.graph(tried[0][0]), ask.address(tried[1][0])] == [second, second]
        assert ask.both("old") == (first, first)

        assert promote("--rollback")["serving"] == first
        assert ask.both("newer") == (first, first)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert not served_policies
