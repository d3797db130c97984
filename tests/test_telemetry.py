"""telemetry.py: what happens in a run becomes spans, events and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from agenttrain import telemetry


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


def ended(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def rollout() -> Any:
    return telemetry.rollout_span(graph="desk", rollout_id="r1", task_id="t1", phase="train", step=3, group="3-t1")


def test_a_rollout_is_an_agent_invocation_inside_its_phase(spans: InMemorySpanExporter) -> None:
    """Names and attributes of the GenAI conventions, and ours beside them."""
    with telemetry.phase_span("train"), rollout(), telemetry.reward_span("r1"):
        assert telemetry.is_recording()
    seen = ended(spans)
    agent, reward = seen["invoke_agent desk"], seen["agenttrain.reward"]
    assert dict(agent.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "agenttrain",
        "gen_ai.agent.name": "desk",
        "gen_ai.conversation.id": "r1",
        "agenttrain.rollout.id": "r1",
        "agenttrain.task.id": "t1",
        "agenttrain.phase": "train",
        "agenttrain.step": 3,
        "agenttrain.group.id": "3-t1",
    }
    assert agent.parent is not None
    assert reward.parent is not None
    assert agent.parent.span_id == seen["agenttrain.train"].context.span_id
    assert reward.parent.span_id == agent.context.span_id


def test_a_reward_is_an_evaluation_event(spans: InMemorySpanExporter) -> None:
    """One for the whole and one per verifier."""
    with rollout() as span:
        telemetry.reward_event(span, score=0.5, status="completed", success=False, parts={"answer": 0.5})
    (done,) = spans.get_finished_spans()
    assert [(event.name, dict(event.attributes or {})) for event in done.events] == [
        (
            "gen_ai.evaluation.result",
            {
                "gen_ai.evaluation.name": "reward",
                "gen_ai.evaluation.score.value": 0.5,
                "gen_ai.evaluation.score.label": "fail",
            },
        ),
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "answer", "gen_ai.evaluation.score.value": 0.5}),
    ]
    assert done.attributes is not None
    assert done.attributes["agenttrain.reward"] == 0.5
    assert done.status.status_code is StatusCode.UNSET


def test_a_broken_environment_is_an_error_without_a_reward(spans: InMemorySpanExporter) -> None:
    """No event, no number: a missing reward is never 0."""
    with rollout() as span:
        telemetry.reward_event(span, score=None, status="environment_failure", success=False)
    (done,) = spans.get_finished_spans()
    assert done.events == ()
    assert "agenttrain.reward" not in (done.attributes or {})
    assert done.status.status_code is StatusCode.ERROR


def test_an_update_is_linked_per_group_and_never_over_the_limit(spans: InMemorySpanExporter) -> None:
    """130 rollouts take two spans; one that was not traced is left out."""
    with rollout() as span:
        ids = telemetry.ids_of(span)
    telemetry.update_spans(3, 4, {"big": [ids] * 130, "small": [ids, ("", "")]}, {"reward": 0.5})
    seen = [done for done in spans.get_finished_spans() if done.name.startswith("agenttrain.update")]
    assert [(done.name, len(done.links)) for done in seen] == [
        ("agenttrain.update_group big", 128),
        ("agenttrain.update_group big", 2),
        ("agenttrain.update_group small", 1),
        ("agenttrain.update 3", 0),
    ]
    assert trace.format_span_id(seen[0].links[0].context.span_id) == ids[1]
    assert dict(seen[-1].attributes or {}) == {
        "agenttrain.step": 3,
        "agenttrain.weight_version": 4,
        "agenttrain.update.reward": 0.5,
    }


def test_a_trace_goes_on_in_another_process(spans: InMemorySpanExporter) -> None:
    with telemetry.phase_span("train"):
        carrier = telemetry.trace_context()
    with telemetry.continued_from(carrier), telemetry.publish_span(5):
        pass
    seen = ended(spans)
    assert seen["agenttrain.publish"].parent is not None
    assert seen["agenttrain.publish"].parent.span_id == seen["agenttrain.train"].context.span_id


def test_metrics_have_their_names_units_and_attributes() -> None:
    """A rollout without a reward leaves no mark on the reward's histogram."""
    reader = InMemoryMetricReader()
    made = telemetry.Instruments.of(MeterProvider(metric_readers=[reader]).get_meter("test"))
    made.chat("tiny", "trained", input_tokens=5, output_tokens=2, seconds=0.1)
    made.rollout("completed", 1.0)
    made.rollout("environment_failure", None)
    made.update(3)
    data = reader.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {name: metric.unit for name, metric in found.items()} == {
        "gen_ai.client.token.usage": "{token}",
        "gen_ai.client.operation.duration": "s",
        "agenttrain.rollouts": "{rollout}",
        "agenttrain.rollout.reward": "1",
        "agenttrain.updates": "{update}",
        "agenttrain.update.groups": "{group}",
    }
    tokens = {
        (point.attributes or {})["gen_ai.token.type"]: point.sum
        for point in found["gen_ai.client.token.usage"].data.data_points
    }
    assert tokens == {"input": 5, "output": 2}
    assert [point.count for point in found["agenttrain.rollout.reward"].data.data_points] == [1]


@pytest.mark.parametrize(
    ("value", "captured"),
    [(None, False), ("", False), ("false", False), ("event_only", False), ("true", True), ("SPAN_AND_EVENT", True)],
)
def test_content_is_left_out_unless_asked_for(value: str | None, captured: bool) -> None:
    capture = telemetry.captures_content(value)
    assert capture is captured
    attributes = telemetry.content_attributes(capture=capture, input_messages=[{"role": "user", "content": "hi"}])
    expected = {"gen_ai.input.messages": json.dumps([{"role": "user", "content": "hi"}])}
    assert attributes == (expected if captured else {})


def test_without_an_sdk_nothing_is_recorded_and_nothing_fails() -> None:
    """In a process of its own: no ids, no context, and the SDK is not imported."""
    program = """
import sys
from agenttrain import telemetry
with telemetry.rollout_span(graph="g", rollout_id="r", task_id="t", phase="train") as span:
    assert not telemetry.is_recording()
    assert telemetry.ids_of(span) == telemetry.ids_of(None) == ("", "")
    assert telemetry.trace_context() == {}
    telemetry.reward_event(span, score=1.0, status="completed", success=True)
    telemetry.reward_event(None, score=None, status="aborted", success=False)
    telemetry.instruments().chat("m", "trained", input_tokens=1, output_tokens=1, seconds=0.1)
telemetry.update_spans(1, 1, {"g": [("", "")]}, {"reward": 1.0})
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
