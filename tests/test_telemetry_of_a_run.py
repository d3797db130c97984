"""OpenTelemetry end to end: the spans that a fit leaves, and where they go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TOOLED = """
from langchain_core.messages import AIMessage
from langgraph.prebuilt import ToolNode

@tool
def look_up(item: str) -> str:
    "Look an item up."
    return f"secret price of {item}"

def call(state):
    return {"messages": [AIMessage("", tool_calls=[{"name": "look_up", "args": {"item": "lamp"}, "id": "c1"}])]}

builder.add_node("call", call)
builder.add_node("tools", ToolNode([look_up]))
builder.add_node("agent", agent)
builder.set_entry_point("call")
builder.add_edge("call", "tools")
builder.add_edge("tools", "agent")
"""


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Spans that end during the test, of whatever provider this process has."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


def named(spans: Sequence[ReadableSpan], start: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name.startswith(start)]


def children(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[str]:
    own = parent.get_span_context()
    assert own is not None
    return sorted(span.name for span in spans if span.parent is not None and span.parent.span_id == own.span_id)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_the_spans_of_a_fit(new_project: Any, command: Any, spans: InMemorySpanExporter) -> None:
    """A trace per rollout with its calls, tools and reward; an update linked to the rollouts it trained."""
    project = new_project(TOOLED)
    done = command("fit", "graph.py", "--set", "trainer.steps=1", "--set", "trainer.tasks_per_step=4")
    assert done.code == 0, done.err
    seen = spans.get_finished_spans()
    check_rollouts(seen, project)
    check_update(seen, project)
    assert [attributes(span) for span in named(seen, "agenttrain.publish")] == [{"agenttrain.weight_version": 1}]
    assert {"agenttrain.baseline", "agenttrain.held_out"} <= {span.name for span in seen}
    check_no_content(seen)


def check_rollouts(seen: Sequence[ReadableSpan], project: Any) -> None:
    agents = named(seen, "invoke_agent graph.py:graph")
    assert len(agents) == 3 + 8 + 3
    assert len({span.get_span_context().trace_id for span in agents if span.get_span_context()}) == len(agents)
    for span in agents:
        assert children(seen, span) == ["agenttrain.reward", "chat policy", "execute_tool look_up"]
    by_id = {attributes(span)["agenttrain.rollout.id"]: span for span in agents}
    for rollout in project.store.rollouts():
        span = by_id[rollout.id]
        (event,) = span.events
        assert event.name == "gen_ai.evaluation.result"
        assert dict(event.attributes or {})["gen_ai.evaluation.score.value"] == rollout.reward.score
        assert attributes(span)["agenttrain.status"] == rollout.status
        assert rollout.span_id == f"{span.get_span_context().span_id:016x}"
    for span in named(seen, "chat "):
        assert attributes(span)["gen_ai.usage.output_tokens"] > 0
        assert attributes(span)["gen_ai.request.max_tokens"] == 6
    for span in named(seen, "execute_tool"):
        assert attributes(span)["gen_ai.tool.call.id"] == "c1"


def check_update(seen: Sequence[ReadableSpan], project: Any) -> None:
    (update,) = named(seen, "agenttrain.update 1")
    groups = named(seen, "agenttrain.update_group")
    assert children(seen, update) == sorted(group.name for group in groups)
    assert groups
    linked = {f"{link.context.span_id:016x}" for group in groups for link in group.links}
    assert all(0 < len(group.links) <= 128 for group in groups)
    trained = {sample.extra_fields["rollout_id"] for sample in project.store.trained_samples()}
    assert linked == {rollout.span_id for rollout in project.store.rollouts() if rollout.id in trained}
    group_of = {rollout.span_id: rollout.group_id for rollout in project.store.rollouts()}
    for group in groups:
        (name,) = {group_of[f"{link.context.span_id:016x}"] for link in group.links}
        assert attributes(group)["agenttrain.group.id"] == name
    for span in named(seen, "invoke_agent"):
        assert attributes(span)["agenttrain.group.id"] == group_of[f"{span.get_span_context().span_id:016x}"]
    (row,) = project.run.metrics()
    assert attributes(update)["agenttrain.update.reward"] == row["reward"]


def check_no_content(seen: Sequence[ReadableSpan]) -> None:
    """Neither prompts nor answers nor tool results stand on a span by default."""
    text = " ".join(json.dumps([attributes(span), [dict(e.attributes or {}) for e in span.events]]) for span in seen)
    assert "secret price" not in text
    assert "Price of item" not in text


def test_the_console_exporter_leaves_standard_output_alone(project: Any) -> None:
    """Spans and metrics go to standard error, and standard output stays one JSON object."""
    command = [sys.executable, "-m", "agenttrain", "eval", "graph.py", "--json"]
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "console"}
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == 3
    for name in (
        '"name": "invoke_agent graph.py:graph"',
        '"name": "chat policy"',
        '"name": "gen_ai.client.token.usage"',
    ):
        assert name in done.stderr
    assert f'"agenttrain.run.id": "{Path(project.run.path).name}"' in done.stderr
