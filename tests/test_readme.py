"""The README tells the truth: its Python runs, its commands and options exist, its keys are keys."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import Interrupt
from typer.main import get_command

from agenttrain import plugins as plugins_module
from agenttrain.cli import app
from agenttrain.config import INTEGRATIONS, parse_assignments, resolve
from agenttrain.graph.human import check_on_interrupt
from agenttrain.graph.world import World, check_setup
from agenttrain.records import Task
from agenttrain.reward.score import check_verifiers
from agenttrain.trainable import trainable_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MY_AGENT = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini", api_key="unused")

def agent(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}

builder = StateGraph(MessagesState)
builder.add_node("agent", agent)
builder.add_edge(START, "agent")
"""


def commands_of_readme() -> list[str]:
    """`agenttrain …` in code: lines of blocks, and inline; those of an integration are held by its own tests."""
    lines = re.findall(r"^\$ (agenttrain .+)$", README, re.MULTILINE) + re.findall(r"`(agenttrain [^`]+)`", README)
    return [line for line in lines if line.split()[1] not in INTEGRATIONS]


@functools.cache
def the_commands() -> dict[str, Any]:
    """By name."""
    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def test_first_block_is_a_graph_that_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python block, with somebody's agent beside it, gives a decorated factory of a graph that runs."""
    (tmp_path / "my_agent.py").write_text(MY_AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "readme", "__file__": str(tmp_path / "graph.py")}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    noted = trainable_of(names["graph"])
    assert noted is not None
    assert noted.model == "policy"
    assert "agent" in names["graph"]().nodes  # type: ignore[operator]
    sys.modules.pop("my_agent", None)


def test_the_world_and_the_human_are_taken(tmp_path: Path) -> None:
    """The second block's functions pass the checks of the start, and the world gives a database."""
    names: dict[str, Any] = {}
    exec(compile(PYTHON[1], "README.md", "exec"), names)
    check_setup(names["shop"])
    check_on_interrupt(names["human"])
    world = World(names["shop"], Task(id="1", input={}))
    assert world.given.context["db"].execute("select 1").fetchone() == (1,)
    assert world.leave(10.0) == ""
    assert names["human"](None, Interrupt(value="Refund?", id="1")) == "yes"


def test_the_block_on_rewards_declares_what_it_says(tmp_path: Path) -> None:
    """The third block: a sandbox, an outcome, a gate, a cost, and a tool with a stand-in."""
    names: dict[str, Any] = {"__name__": "readme", "__file__": str(tmp_path / "graph.py"), "builder": None}
    exec(compile(PYTHON[2], "README.md", "exec"), names)
    noted = trainable_of(names["graph"])
    assert noted is not None
    assert noted.sandbox is not None
    check_verifiers(noted.verifiers)
    assert {name: part.kind for name, part in noted.verifiers.items()} == {
        "tests": "outcome",
        "honest": "safety",
        "turns": "cost",
    }
    assert noted.tools["send_mail"].stand_in("you", "hello") == "sent"


@pytest.mark.slow
def test_serving_block_answers_with_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth block, beside somebody's agent and a policy, runs as it stands; what it attached answers too."""
    (tmp_path / "my_agent.py").write_text(MY_AGENT)
    (tmp_path / "policy").symlink_to(ROOT / "examples" / "order-desk" / "policy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "readme"}
    try:
        exec(compile(PYTHON[3], "README.md", "exec"), names)
        said = names["served"].invoke({"messages": [("user", "Where is A41?")]})["messages"][-1]
        assert said.response_metadata["model_provider"] == "agenttrain"
    finally:
        names["served"].close()
        sys.modules.pop("my_agent", None)


def test_plugin_block_registers_its_estimator() -> None:
    """The plugin block registers an advantage estimator by the hook."""
    import types

    module = types.ModuleType("readme_plugin")
    exec(compile(PYTHON[4], "README.md", "exec"), vars(module))
    plugins = plugins_module.Plugins.load(only="")
    plugins.add(module, "readme")
    assert plugins.advantage("best")([0.0, 1.0, 0.5]) == [0.0, 1.0, 0.0]


def test_no_placeholder_is_left() -> None:
    """No word in capitals stands where a measured figure or real output belongs."""
    assert re.findall(r"\b(?:OUTPUT|MEASURED|MEASUREMENTS|TODO|TBD|SECONDS)\b", README) == []


def test_every_python_block_is_tested_here() -> None:
    """A new Python block needs a test of its own."""
    assert len(PYTHON) == 5


@pytest.mark.parametrize("line", commands_of_readme())
def test_commands_and_options_exist(line: str) -> None:
    """Each command that the README writes exists, with each option that stands behind it."""
    words = line.split()
    command = the_commands()[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_keys_named_are_keys() -> None:
    """`--set key=value` in the README resolves."""
    found = re.findall(r"--set ([a-z._]+=[^\s`]+)", README)
    assignments = [each for each in found if each != "key=value"]
    assert assignments
    resolve(("README.md", parse_assignments(assignments)))


def test_files_named_are_there() -> None:
    """Each path of the tree that the README names exists."""
    named = set(re.findall(r"(?<![\w/-])((?:src|scripts|examples|benchmarks|docs|integrations)/[\w./-]+)", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
