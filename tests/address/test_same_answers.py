"""The order desk over HTTP answers as its graph does with the policy inside."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

import agenttrain
from agenttrain.address.app import Address, Settings
from agenttrain.serving.attached import open_serving

ROOT = Path(__file__).parents[2]
DESK = ROOT / "examples" / "order-desk"
N_TASKS = 8


@pytest.fixture
def run_of_the_desk(tmp_path: Path) -> Path:
    """A run with the order desk's policy, whose engine is in this process."""
    (tmp_path / "desk-1").mkdir()
    (tmp_path / "desk-1" / "policy").symlink_to(DESK / "policy")
    (tmp_path / "desk-1" / "config.toml").write_text('[engine]\nprocess = "shared"\n[renderer]\nfamily = "default"\n')
    return tmp_path / "desk-1"


def new_graph(name: str) -> Any:
    """The order desk's graph, of a module of its own: its ChatOpenAI reads the address when it is made."""
    spec = importlib.util.spec_from_file_location(name, DESK / "graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.builder.compile()


def said(messages: list[AnyMessage]) -> list[Any]:
    """What stands in a conversation, and how many ids each call had; ids of calls left out."""
    return [_said(message) for message in messages if isinstance(message, AIMessage | ToolMessage)]


def _said(message: AIMessage | ToolMessage) -> Any:
    if isinstance(message, ToolMessage):
        return message.content
    usage = message.usage_metadata
    assert usage is not None
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    broken = [call["args"] for call in message.invalid_tool_calls]
    return message.text, calls, broken, usage["input_tokens"], usage["output_tokens"]


@pytest.mark.slow
def test_the_order_desk_over_http_answers_as_with_the_policy_inside(
    run_of_the_desk: Path, answered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily: every text, call, observation and length of every task."""
    lines = (DESK / "tasks.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines[-N_TASKS:]]
    inside = agenttrain.attach(new_graph("desk_inside"), run_of_the_desk)
    try:
        expected = [said(inside.invoke(t["input"], context=t["context"])["messages"]) for t in tasks]
    finally:
        inside.close()
    assert max(map(len, expected)) >= 5
    serving = open_serving(run_of_the_desk)
    try:
        with answered(Address(serving, Settings(name="desk"))) as url:
            monkeypatch.setenv("OPENAI_BASE_URL", url)
            graph = new_graph("desk_over_http")
            over_http = [said(graph.invoke(t["input"], context=t["context"])["messages"]) for t in tasks]
    finally:
        serving.close()
    assert over_http == expected
