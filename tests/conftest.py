"""Projects in temporary folders for the tests of the whole: a small graph.py, the order desk's policy, a few tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # The models here are tiny: threads that wait for each other cost most.

from agenttrain.capture.store import StoreView, read_store
from agenttrain.cli import main
from agenttrain.run_folder import RunFolder

POLICY = Path(__file__).parents[1] / "examples" / "order-desk" / "policy"

HEAD = f"""\
import time
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from agenttrain import Limits, PolicyFailure, Task, current_task, trainable

POLICY = {str(POLICY)!r}
model = ChatOpenAI(model="gpt-4o", api_key="unused", max_tokens=6)
builder = StateGraph(MessagesState)

def agent(state: MessagesState):
    return {{"messages": [model.invoke(state["messages"])]}}

def score(task: Task, state: dict) -> float:
    last = state["messages"][-1]
    calls = getattr(last, "tool_calls", ()), getattr(last, "invalid_tool_calls", ())
    return sum(map(ord, repr((last.content, calls)))) % 5 / 4
"""
"""What every graph of these tests begins with; the verifier gives nearly any two answers different scores."""

AGENT = """
builder.add_node("agent", agent)
builder.set_entry_point("agent")
"""
TRAINABLE = """
@trainable(model=POLICY, tasks="tasks.jsonl", verifier=score)
def graph():
    return builder.compile()
"""
SETTINGS = """
[engine]
process = "shared"
[trainer]
steps = 2
tasks_per_step = 2
group_size = 2
[sampling]
temperature = 2.0
[limits]
turns = 4
tokens = 64
seconds = 20
[renderer]
family = "default"
"""
TASKS = [
    {
        "id": f"task-{i}",
        "input": {"messages": [{"role": "user", "content": f"Price of item {i}?"}]},
        "reference": i,
        "split": "held_out" if i >= 4 else "train",
        "metadata": {"kind": "even" if i % 2 == 0 else "odd"},
    }
    for i in range(7)
]


@dataclass(frozen=True)
class Project:
    """A folder with graph.py, tasks.jsonl and agenttrain.toml, which is the current directory too."""

    folder: Path

    @property
    def graph(self) -> str:
        return str(self.folder / "graph.py")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def line_of(self, text: str) -> int:
        """Number of the first line of graph.py that holds a text."""
        lines = (self.folder / "graph.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, start=1) if text in line)

    def write_tasks(self, rows: Sequence[Mapping[str, Any]], name: str = "tasks.jsonl") -> Path:
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    @property
    def runs(self) -> list[RunFolder]:
        """The runs made here, by name."""
        return [RunFolder(path) for path in sorted((self.folder / "runs").glob("*")) if path.is_dir()]

    @property
    def run(self) -> RunFolder:
        """The only run made here."""
        (run,) = self.runs
        return run

    @property
    def store(self) -> StoreView:
        return read_store(self.run.rollouts)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        value: dict[str, Any] = json.loads(self.out)
        return value


NewProject = Callable[..., Project]
Command = Callable[..., Done]


@pytest.fixture
def new_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewProject:
    """Makes a project: body stands between the head and the decorated factory of graph.py."""

    def make(
        body: str = AGENT,
        *,
        decorated: str = TRAINABLE,
        tasks: Sequence[Mapping[str, Any]] = TASKS,
        settings: str = SETTINGS,
        head: str = HEAD,
    ) -> Project:
        folder = tmp_path / "desk"
        folder.mkdir()
        project = Project(folder)
        project.write("graph.py", head + body + decorated)
        project.write("agenttrain.toml", settings)
        project.write_tasks(tasks)
        monkeypatch.chdir(folder)
        return project

    return make


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """The plain one: a node, a model call, a verifier."""
    return new_project()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        seen = capsys.readouterr()
        code = exit_.value.code
        return Done(code=code if isinstance(code, int) else int(code is not None), out=seen.out, err=seen.err)

    return run


@pytest.fixture(scope="session")
def policy_folder() -> Path:
    """The order desk's policy; not to be changed."""
    return POLICY


@pytest.fixture
def task_rows() -> list[dict[str, Any]]:
    """The rows of a project's tasks.jsonl: four to train, three held out."""
    return json.loads(json.dumps(TASKS))  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def settings() -> str:
    """What every agenttrain.toml here holds."""
    return SETTINGS


@pytest.fixture(scope="session")
def head() -> str:
    """What every graph.py here begins with."""
    return HEAD
