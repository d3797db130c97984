"""Tool calls as spans."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracer, StatusCode

from agenttrain.errors import RolloutStop
from agenttrain.graph.spans import ToolSpans, tool_spans


@tool
def double(x: int) -> int:
    """Double a number."""
    if x < 0:
        raise ValueError("negative")
    return 2 * x


@tool
def leave() -> str:
    """End the rollout."""
    raise RolloutStop("budget")


def calls(*asked: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    called = [{"name": name, "args": args, "id": f"t{i}"} for i, (name, args) in enumerate(asked)]
    return {"messages": [AIMessage("", tool_calls=called)]}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> ToolSpans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return ToolSpans(provider.get_tracer("test"))


def test_each_tool_call_is_a_span(graph_of: Any, rollout: Any, Route: Any, spans: Any, exporter: Any) -> None:
    """Named and attributed as the GenAI conventions say; errors carry their type."""
    graph = graph_of(ToolNode([double], handle_tool_errors=True))
    asked = calls(("double", {"x": 2}), ("double", {"x": -1}), ("double", {"x": "no"}))
    assert rollout(graph, Route(), asked, callbacks=[spans]).error is None
    ended = sorted(exporter.get_finished_spans(), key=lambda span: span.attributes["gen_ai.tool.call.id"])
    assert [span.name for span in ended] == ["execute_tool double"] * 3
    assert dict(ended[0].attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "double",
        "gen_ai.tool.call.id": "t0",
    }
    assert ended[1].attributes["error.type"] == "ValueError"
    assert [span.status.status_code for span in ended] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]


@pytest.mark.parametrize("captures_content", [False, True])
def test_arguments_results_and_the_text_of_errors_only_on_request(
    graph_of: Any, rollout: Any, Route: Any, exporter: Any, captures_content: bool
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = ToolSpans(provider.get_tracer("test"), captures_content=captures_content)
    graph = graph_of(ToolNode([double], handle_tool_errors=True))
    rollout(graph, Route(), calls(("double", {"x": 21}), ("double", {"x": -1})), callbacks=[spans])
    worked, failed = sorted(exporter.get_finished_spans(), key=lambda span: span.attributes["gen_ai.tool.call.id"])
    assert worked.attributes.get("gen_ai.tool.call.arguments") == ('{"x": 21}' if captures_content else None)
    assert worked.attributes.get("gen_ai.tool.call.result") == ('"42"' if captures_content else None)
    assert failed.status.description == ("negative" if captures_content else None)


def test_the_end_of_a_rollout_is_no_tool_error(
    graph_of: Any, rollout: Any, Route: Any, spans: Any, exporter: Any
) -> None:
    """Its span ends without an error."""
    ending = rollout(graph_of(ToolNode([leave])), Route(), calls(("leave", {})), callbacks=[spans])
    assert type(ending.error) is RolloutStop
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.UNSET


def test_without_a_recording_tracer_nothing_is_kept(graph_of: Any, rollout: Any, Route: Any) -> None:
    spans = ToolSpans(NoOpTracer())
    rollout(graph_of(ToolNode([double])), Route(), calls(("double", {"x": 2})), callbacks=[spans])
    assert spans._spans == {}


def test_close_ends_what_was_abandoned(spans: Any, exporter: Any) -> None:
    """A tool that outlives its rollout leaves a span with error.type abandoned."""
    from uuid import uuid4

    spans.on_tool_start({"name": "slow"}, "", run_id=uuid4())
    spans.close()
    assert exporter.get_finished_spans()[0].attributes["error.type"] == "abandoned"


def test_the_spans_of_a_rollout_end_with_it(exporter: Any) -> None:
    """Where its own span is kept; else there is no callback at all."""
    from uuid import uuid4

    with tool_spans(captures_content=False) as callbacks:
        assert callbacks == ()
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("rollout"), tool_spans(captures_content=False) as (spans,):
        spans.on_tool_start({"name": "slow"}, "", run_id=uuid4())
    exporter.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["execute_tool slow", "rollout"]
