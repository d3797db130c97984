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
from agenttrain.telemetry import names
from agenttrain.telemetry.content import captures_content, input_messages, output_message


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


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def rollout(**more: Any) -> Any:
    return telemetry.rollout_span(
        graph="desk", rollout_id="r1", task_id="t1", phase="train", step=3, group="3-t1", **more
    )


def trained(ids: tuple[str, str], advantage: float | None = 0.5) -> telemetry.TrainedRollout:
    return telemetry.TrainedRollout(rollout_id="r1", ids=ids, staleness=1, n_tokens=7, advantage=advantage)


def test_a_rollout_is_an_agent_invocation_and_a_trace_of_its_own(spans: InMemorySpanExporter) -> None:
    """Names and attributes of the GenAI conventions, and ours beside them; linked to the run, and no child of it."""
    with telemetry.run_span("fit", run_id="desk-1", graph="desk"):
        run = telemetry.trace_context()
        with telemetry.phase_span("train"), rollout(run=run), telemetry.reward_span("r1"):
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
        "agenttrain.attempt": 0,
        "agenttrain.remake": 0,
        "agenttrain.life": 0,
    }
    whole = seen["agenttrain.fit"]
    assert dict(whole.attributes or {}) == {
        "agenttrain.run.id": "desk-1",
        "gen_ai.agent.name": "desk",
        "agenttrain.life": 0,
    }
    assert agent.parent is None
    assert [link.context.span_id for link in agent.links] == [whole.context.span_id]
    assert parent_of(seen["agenttrain.train"]) == whole.context.span_id
    assert parent_of(reward) == agent.context.span_id


def test_what_ends_a_span_stands_on_it_by_its_type_alone(spans: InMemorySpanExporter) -> None:
    """The text of an error may quote what the policy said."""
    with pytest.raises(ValueError), telemetry.reward_span("r1"):
        raise ValueError("could not convert string to float: 'the secret answer'")
    (done,) = spans.get_finished_spans()
    assert (done.attributes or {})["error.type"] == "ValueError"
    assert done.status.status_code is StatusCode.ERROR
    assert "secret" not in done.to_json()


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


def test_what_kept_a_sandbox_apart_and_what_was_tampered_with(spans: InMemorySpanExporter) -> None:
    """Only what there is: no attribute of a sandbox that a rollout had not."""
    with rollout() as boxed, rollout() as plain:
        telemetry.sandbox_attributes(boxed, backend="plain", unenforced=("network",), n_tampering=2)
        telemetry.sandbox_attributes(plain, backend="", unenforced=(), n_tampering=0)
        telemetry.sandbox_attributes(None, backend="plain", unenforced=(), n_tampering=1)
    told = [
        {name: value for name, value in (done.attributes or {}).items() if "sandbox" in name or "tampering" in name}
        for done in spans.get_finished_spans()
    ]
    assert told == [
        {},
        {"agenttrain.sandbox": "plain", "agenttrain.sandbox.unenforced": ("network",), "agenttrain.tampering": 2},
    ]


def test_an_update_is_linked_per_group_and_never_over_the_limit(spans: InMemorySpanExporter) -> None:
    """130 rollouts take two spans; one that was not traced has no link, and counts."""
    with rollout() as span:
        ids = telemetry.ids_of(span)
    groups = {"big": [trained(ids)] * 130, "small": [trained(ids, -0.5), trained(("", ""), 1.5)]}
    telemetry.update_spans(3, 4, groups, {"reward": 0.5})
    seen = [done for done in spans.get_finished_spans() if done.name.startswith("agenttrain.update")]
    assert [(done.name, len(done.links)) for done in seen] == [
        ("agenttrain.update_group big", 128),
        ("agenttrain.update_group big", 2),
        ("agenttrain.update_group small", 1),
        ("agenttrain.update 3", 0),
    ]
    link = seen[2].links[0]
    assert trace.format_span_id(link.context.span_id) == ids[1]
    assert dict(link.attributes or {}) == {
        "agenttrain.rollout.id": "r1",
        "agenttrain.staleness": 1,
        "agenttrain.trained_tokens": 7,
        "agenttrain.advantage": -0.5,
    }
    assert dict(seen[2].attributes or {}) == {
        "agenttrain.step": 3,
        "agenttrain.weight_version": 4,
        "agenttrain.group.id": "small",
        "agenttrain.staleness": 1.0,
        "agenttrain.trained_tokens": 14,
        "agenttrain.advantages": (-0.5, 1.5),
    }
    assert dict(seen[-1].attributes or {}) == {
        "agenttrain.step": 3,
        "agenttrain.weight_version": 4,
        "agenttrain.update.reward": 0.5,
    }


def test_advantages_that_the_trainer_did_not_tell_are_left_out(spans: InMemorySpanExporter) -> None:
    with rollout() as span:
        ids = telemetry.ids_of(span)
    telemetry.update_spans(3, 4, {"g": [trained(ids, None)]}, {})
    group = ended(spans)["agenttrain.update_group g"]
    assert "agenttrain.advantages" not in (group.attributes or {})
    assert "agenttrain.advantage" not in (group.links[0].attributes or {})


def test_where_the_tokens_of_a_rollout_stand(spans: InMemorySpanExporter) -> None:
    """Every reason has its number, those without tokens 0; versions only where the policy sampled."""
    for versions in ([2, 3], []):
        with rollout() as span:
            telemetry.rollout_tokens(
                span,
                phase="train",
                tokens={"trained": 5, "context": 2},
                n_trajectories=1,
                n_auxiliary=1,
                weight_versions=versions,
            )
    first, second = (dict(span.attributes or {}) for span in spans.get_finished_spans())
    assert {name: first["agenttrain.tokens." + name] for name in names.MASK_REASONS} == {
        "trained": 5,
        "frozen": 0,
        "context": 2,
        "retried": 0,
        "aborted": 0,
        "other_trajectory": 0,
        "dropped": 0,
    }
    assert (first["agenttrain.trajectories"], first["agenttrain.auxiliary_calls"]) == (1, 1)
    assert (first["agenttrain.first_weight_version"], first["agenttrain.weight_version"]) == (2, 3)
    assert "agenttrain.weight_version" not in second


def test_a_trace_goes_on_in_another_process(spans: InMemorySpanExporter) -> None:
    with telemetry.phase_span("train"):
        carrier = telemetry.trace_context()
    with telemetry.continued_from(carrier), telemetry.publish_span(5):
        pass
    seen = ended(spans)
    assert parent_of(seen["agenttrain.publish"]) == seen["agenttrain.train"].context.span_id


def test_a_call_goes_on_in_the_engines_process(spans: InMemorySpanExporter) -> None:
    """A child of the span that asked; an answer without ids has no weight version."""
    with telemetry.phase_span("train"):
        carrier = telemetry.trace_context()
    for version in (4, None):
        span = telemetry.generate_span(carrier, 9)
        telemetry.generated(span, n_sampled=3, n_cached=5, stop_reason="stop", weight_version=version)
        span.end()
    phase, *calls = spans.get_finished_spans()
    assert [parent_of(call) for call in calls] == [phase.context.span_id] * 2
    assert dict(calls[0].attributes or {}) == {
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
        "agenttrain.weight_version": 4,
    }
    assert "agenttrain.weight_version" not in (calls[1].attributes or {})


def test_metrics_have_their_names_units_and_attributes() -> None:
    """A rollout without a reward leaves no mark on the reward's histogram."""
    reader = InMemoryMetricReader()
    made = telemetry.Instruments.of(MeterProvider(metric_readers=[reader]).get_meter("test"))
    made.chat("tiny", "trained", input_tokens=5, output_tokens=2, seconds=0.1)
    made.rollout("completed", 1.0)
    made.rollout("environment_failure", None)
    made.rollout_tokens({"trained": 5, "frozen": 0}, "train")
    made.update(3, [0, 2])
    data = reader.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {name: metric.unit for name, metric in found.items()} == {
        "gen_ai.client.token.usage": "{token}",
        "gen_ai.client.operation.duration": "s",
        "agenttrain.rollouts": "{rollout}",
        "agenttrain.rollout.reward": "1",
        "agenttrain.rollout.tokens": "{token}",
        "agenttrain.updates": "{update}",
        "agenttrain.update.groups": "{group}",
        "agenttrain.update.staleness": "{update}",
    }
    assert found.keys() == names.METRICS.keys()
    (tokens_by_reason,) = found["agenttrain.rollout.tokens"].data.data_points
    assert dict(tokens_by_reason.attributes or {}) == {"agenttrain.mask_reason": "trained", "agenttrain.phase": "train"}
    assert [(point.count, point.sum) for point in found["agenttrain.update.staleness"].data.data_points] == [(2, 2)]
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
def test_which_values_ask_for_content(value: str | None, captured: bool) -> None:
    """`event_only` asks for events, and content is on spans here."""
    assert captures_content(value) is captured


def test_messages_have_the_conventions_form() -> None:
    """Parts by type: text, tool calls with their arguments, and what a tool answered."""
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"item": "lämp"}}}
    told = input_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
        ]
    )
    assert json.loads(told["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "look_up", "arguments": {"item": "lämp"}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "12"}]},
    ]
    asked = {"id": "c1", "name": "look_up", "arguments": {"item": "lamp"}}
    said = output_message(text="So:", reasoning="Hm.", tool_calls=[asked], finish_reason="stop")
    assert json.loads(said["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "Hm."},
                {"type": "text", "content": "So:"},
                {"type": "tool_call", **asked},
            ],
            "finish_reason": "stop",
        }
    ]


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
trained = telemetry.TrainedRollout(rollout_id="r", ids=("", ""), staleness=0, n_tokens=1, advantage=1.0)
telemetry.update_spans(1, 1, {"g": [trained]}, {"reward": 1.0})
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
