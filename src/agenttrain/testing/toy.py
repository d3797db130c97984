"""A folder that `agenttrain fit graph.py` trains: a small agent, its tasks, its settings and a tiny model.

For the tests of a plugin in a whole run: name the plugin in the tables, fit, look at the report and the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.alarms import Alarm
from agenttrain.capture.store import StoreView, read_store
from agenttrain.fit import fit
from agenttrain.prepare import prepare
from agenttrain.records import RolloutResult
from agenttrain.run_folder import RunFolder, new_run
from agenttrain.testing.small_model import tiny_model

GRAPH = '''\
"""An agent that calls its model once; what it says is worth the share of its odd characters."""

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph

from agenttrain import Task, trainable

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused", max_tokens=6)


def agent(state: MessagesState) -> dict:
    """Ask the model."""
    return {"messages": [model.invoke(state["messages"])]}


def odd_share(task: Task, state: dict) -> float:
    """0 for a model that says nothing, 1 for one that says odd characters only."""
    text = repr([m.content for m in state["messages"][1:]])
    return sum(ord(character) % 2 for character in text) / len(text)


@trainable(model="model", tasks="tasks.jsonl", verifier=odd_share)
def graph():
    """The agent, ready to run."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.set_entry_point("agent")
    return builder.compile()
'''
SETTINGS = """\
[trainer]
steps = 1
tasks_per_step = 2
group_size = 2
learning_rate = 0.01
[engine]
process = "shared"
[limits]
tokens = 64
[renderer]
family = "default"
"""


@dataclass(frozen=True, slots=True)
class ToyProject:
    """graph.py, tasks.jsonl, agenttrain.toml and model/ in one folder."""

    folder: Path

    @property
    def graph(self) -> Path:
        return self.folder / "graph.py"

    def fit(self, *, plugins: Mapping[str, Any] | None = None, **tables: Any) -> ToyRun:
        """What `agenttrain fit graph.py` does, in this process.

        Args:
            plugins: modules or objects with hook implementations that are no installed distribution, by name.
            tables: of the configuration, as the command line would set them.

        Raises:
            AgenttrainError: what ended the run.

        Example: project.fit(engine={"name": "mine"}).report["tokens"]["trained"]
        """
        job = prepare(str(self.graph), cwd=self.folder, flags=tables, extra_plugins=plugins)
        run = new_run(self.folder / "runs", "toy")
        return ToyRun(run, fit(job, run, watcher=_Nobody()))


@dataclass(frozen=True, slots=True)
class ToyRun:
    """A run that has ended."""

    folder: RunFolder
    report: Mapping[str, Any]
    """report.json."""

    @property
    def store(self) -> StoreView:
        """Its rollouts, turns and trajectories."""
        return read_store(self.folder.rollouts)


class _Nobody:
    """Watches a run and shows nothing."""

    def began(self, phase: str, total: int) -> None: ...

    def rollout_done(self, result: RolloutResult) -> None: ...

    def ended(self, phase: str, summary: Mapping[str, Any]) -> None: ...

    def step_done(self, row: Mapping[str, Any], n_steps: int, seconds_left: float) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...


def toy_project(folder: str | Path, *, settings: str = "", n_tasks: int = 6) -> ToyProject:
    """Write the project.

    Args:
        folder: made with its parents.
        settings: TOML that stands behind the toy's own in agenttrain.toml; tables of your plugin, say.
        n_tasks: rows of tasks.jsonl; the last third is held out.
    """
    folder = Path(folder)
    tiny_model(folder / "model")
    (folder / "graph.py").write_text(GRAPH, encoding="utf-8")
    (folder / "agenttrain.toml").write_text(SETTINGS + settings, encoding="utf-8")
    rows = [
        {
            "id": f"toy-{i}",
            "input": {"messages": [{"role": "user", "content": f"Say something about {i}."}]},
            "split": "held_out" if 3 * i >= 2 * n_tasks else "train",
        }
        for i in range(n_tasks)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ToyProject(folder)
