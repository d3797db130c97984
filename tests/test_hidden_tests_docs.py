"""docs/hidden-tests.md tells the truth: its Python judges a program, and verifiers may take as long as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agenttrain import SandboxLimits, SandboxSpec, Task, open_sandbox
from agenttrain.errors import SandboxError
from agenttrain.graph.load import load_module
from agenttrain.trainable import trainables_in
from agenttrain.verifiers import command_exits, hidden_cases, hidden_tests

DOC = (Path(__file__).parents[1] / "docs" / "hidden-tests.md").read_text(encoding="utf-8")
BUILDER = """
from langgraph.graph import MessagesState, StateGraph
builder = StateGraph(MessagesState)
"""
FILES = {"test_a.py": "def test_a(): pass"}


@pytest.mark.parametrize(("written", "score"), [("def add(a, b): return a + b\n", 1.0), (None, 0.0)])
def test_the_example_judges_what_an_agent_left(tmp_path: Path, written: str | None, score: float) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    for path, text in {
        "graph.py": BUILDER + block,
        "programs/adds/shop.py": "def add(a, b): return a - b\n",
        "hidden/adds/test_shop.py": "from shop import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (noted,) = trainables_in(load_module(tmp_path / "graph.py")).values()
    task = Task(id="adds", input={})
    try:
        opened = open_sandbox(noted.sandbox, task=task, folder=tmp_path)
        with opened as sandbox:
            if written is not None:
                sandbox.write("shop.py", written)
            sandbox.settle()
            (part,) = noted.verifiers.values()
            answer = part.function(task=task, sandbox=sandbox)
    except SandboxError as error:
        pytest.skip(f"no sandbox of this machine keeps all that is asked: {error}")
    assert (answer["score"], answer["evidence"]["tampering"]) == (score, [])


def test_the_example_of_cases_is_judged() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", DOC, re.DOTALL)
    task = Task(**json.loads(block))
    try:
        with open_sandbox(SandboxSpec(files={"program.py": "def add(a, b): return a + b\n"})) as sandbox:
            sandbox.settle()
            answer = hidden_cases()(task=task, sandbox=sandbox)
    except SandboxError as error:
        pytest.skip(f"no sandbox of this machine keeps all that is asked: {error}")
    assert (answer["score"], answer["comment"]) == (1.0, "2 of 2 pass")


@pytest.mark.parametrize(
    ("verifier", "seconds"),
    [
        (hidden_cases(seconds=7.0), 7 + 20),
        (command_exits(["true"]), 10 + 20),
        (command_exits(["true"], seconds=99.0), 10 + 20),
        (command_exits(["true"], limits=SandboxLimits(seconds=3.0)), 3 + 20),
        (hidden_tests(files=FILES), 10 + 10 + 20),
        (hidden_tests(files=FILES, apart=False, seconds=4.0), 2 * 4 + 10 + 20),
    ],
)
def test_a_verifier_may_take_as_long_as_it_says(verifier: Any, seconds: float) -> None:
    assert verifier.most_seconds(SandboxLimits(seconds=10.0)) == seconds
