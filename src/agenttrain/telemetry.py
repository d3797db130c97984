"""What happens in a run becomes OpenTelemetry spans, events and metrics; every name stands here.

    phase_span    one an evaluation
    rollout_span  a trace of its own (invoke_agent) ── chat, execute_tool (made where calls are recorded), reward_span
                  its reward is an event gen_ai.evaluation.result
    update_spans  one span a step, under it one a group, linked to the rollouts that it trained
    publish_span  new weights to the engine

Only the OpenTelemetry API is used: without an SDK every call is a no-op of microseconds. Spans take plain values, no
records. Prompts and completions are left out unless the user asks for them. The names under `gen_ai` are those of the
semantic conventions 1.41; what they have no word for is under `agenttrain`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, TraceFlags

SCOPE = "agenttrain"
"""Name of the tracer and the meter, and the value of gen_ai.provider.name for the policy."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
ERROR_TYPE = "error.type"

EVALUATION_EVENT = "gen_ai.evaluation.result"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"
EVALUATION_LABEL = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"

RUN_ID = "agenttrain.run.id"
PHASE = "agenttrain.phase"
STEP = "agenttrain.step"
TASK_ID = "agenttrain.task.id"
GROUP_ID = "agenttrain.group.id"
ROLLOUT_ID = "agenttrain.rollout.id"
TURN_ID = "agenttrain.turn.id"
TRAJECTORY = "agenttrain.trajectory"
ROLE = "agenttrain.role"
STATUS = "agenttrain.status"
REWARD = "agenttrain.reward"
SUCCESS = "agenttrain.success"
ADVANTAGE = "agenttrain.advantage"
WEIGHT_VERSION = "agenttrain.weight_version"
UPDATE_PREFIX = "agenttrain.update."
"""Before the name of each of a step's metrics."""

TOKEN_USAGE_METRIC = "gen_ai.client.token.usage"
DURATION_METRIC = "gen_ai.client.operation.duration"
ROLLOUTS_METRIC = "agenttrain.rollouts"
REWARD_METRIC = "agenttrain.rollout.reward"
UPDATES_METRIC = "agenttrain.updates"
TRAINED_GROUPS_METRIC = "agenttrain.update.groups"

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Read by the caller; its value goes to `captures_content`."""
MAX_LINKS = 128
"""Links that one span may have by OpenTelemetry's default; more would be dropped without a word."""

SpanIds = tuple[str, str]
"""Trace id and span id, hexadecimal; both empty where nothing was traced."""
FAILURES = ("environment_failure", "aborted", "incomplete")
"""Statuses that mark a rollout's span as an error; a policy that did wrong is a result."""


def tracer() -> trace.Tracer:
    """The tracer of agenttrain, of whatever provider is set."""
    return trace.get_tracer(SCOPE)


def meter() -> metrics.Meter:
    """The meter of agenttrain, of whatever provider is set."""
    return metrics.get_meter(SCOPE)


def is_recording() -> bool:
    """True when the span of here is kept: worth the work of describing what happens inside."""
    return trace.get_current_span().is_recording()


def ids_of(span: Span | None) -> SpanIds:
    """Trace id and span id of a span as text, empty without a tracer."""
    where = span.get_span_context() if span is not None else None
    if where is None or not where.is_valid:
        return "", ""
    return trace.format_trace_id(where.trace_id), trace.format_span_id(where.span_id)


def trace_context() -> dict[str, str]:
    """The span of here as headers, to go on from in another process; empty without a tracer."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


@contextmanager
def continued_from(carrier: Mapping[str, str]) -> Iterator[None]:
    """Make spans inside the block children of the span that `trace_context` described."""
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


def phase_span(phase: str) -> AbstractContextManager[Span]:
    """A part of the run: baseline, train, held_out, eval."""
    return tracer().start_as_current_span(f"agenttrain.{phase}", attributes={PHASE: phase})


def rollout_span(
    *, graph: str, rollout_id: str, task_id: str, phase: str, step: int = 0, group: str = ""
) -> AbstractContextManager[Span]:
    """One execution of the graph on one task; what it does are the spans inside."""
    attributes: dict[str, str | int] = {
        OPERATION: "invoke_agent",
        PROVIDER: SCOPE,
        AGENT_NAME: graph,
        CONVERSATION_ID: rollout_id,
        ROLLOUT_ID: rollout_id,
        TASK_ID: task_id,
        PHASE: phase,
        STEP: step,
        GROUP_ID: group,
    }
    return tracer().start_as_current_span(f"invoke_agent {graph}", attributes=attributes)


def reward_span(rollout_id: str) -> AbstractContextManager[Span]:
    """The verifiers at work on one rollout."""
    return tracer().start_as_current_span("agenttrain.reward", attributes={ROLLOUT_ID: rollout_id})


def reward_event(
    span: Span | None,
    *,
    score: float | None,
    status: str,
    success: bool,
    parts: Mapping[str, float] | None = None,
) -> None:
    """How a rollout ended, on its span and in the metrics.

    Args:
        span: of the rollout. None: only the metrics are told.
        score: the reward. None: there is none, so there is no event either.
        parts: verifier to its score; each is an event of its own.
    """
    instruments().rollout(status, score)
    if span is None or not span.is_recording():
        return
    span.set_attributes({STATUS: status, SUCCESS: success})
    if status in FAILURES:
        span.set_attribute(ERROR_TYPE, status)
        span.set_status(Status(StatusCode.ERROR, status))
    if score is not None:
        span.set_attribute(REWARD, score)
        label = "pass" if success else "fail"
        span.add_event(EVALUATION_EVENT, {EVALUATION_NAME: "reward", EVALUATION_SCORE: score, EVALUATION_LABEL: label})
    for name, value in (parts or {}).items():
        span.add_event(EVALUATION_EVENT, {EVALUATION_NAME: name, EVALUATION_SCORE: value})


def update_spans(
    step: int, weight_version: int, groups: Mapping[str, Sequence[SpanIds]], step_metrics: Mapping[str, float]
) -> None:
    """One update: a span for the step, and under it one per group with links to the rollouts it trained.

    Args:
        step: training step, from 1.
        weight_version: of the weights that it published.
        groups: group id to the spans of its trained rollouts; a group of more than 128 takes several spans.
        step_metrics: numbers of the step.
    """
    instruments().update(len(groups))
    numbers = {UPDATE_PREFIX + name: float(value) for name, value in step_metrics.items()}
    attributes: dict[str, str | int | float] = {STEP: step, WEIGHT_VERSION: weight_version, **numbers}
    with tracer().start_as_current_span(f"agenttrain.update {step}", attributes=attributes) as span:
        if not span.is_recording():
            return
        for group, spans in groups.items():
            for links in _linked(spans):
                _group_span(step, group, links)


def publish_span(weight_version: int) -> AbstractContextManager[Span]:
    """New weights on their way to the engine."""
    return tracer().start_as_current_span("agenttrain.publish", attributes={WEIGHT_VERSION: weight_version})


def captures_content(value: str | None) -> bool:
    """True when the value of `CAPTURE_CONTENT_VARIABLE` asks for prompts and completions on spans."""
    return (value or "").strip().lower() in ("true", "1", "span_only", "span_and_event")


def content_attributes(
    *,
    capture: bool,
    input_messages: Sequence[Mapping[str, Any]] = (),
    output_messages: Sequence[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Messages as JSON attributes; nothing unless capture is asked for."""
    if not capture:
        return {}
    named = {INPUT_MESSAGES: input_messages, OUTPUT_MESSAGES: output_messages}
    return {name: json.dumps(list(messages), default=str) for name, messages in named.items() if messages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The metrics of one meter."""

    token_usage: metrics.Histogram
    duration: metrics.Histogram
    rollouts: metrics.Counter
    reward: metrics.Histogram
    updates: metrics.Counter
    trained_groups: metrics.Counter

    @classmethod
    def of(cls, source: metrics.Meter) -> Instruments:
        """Make them, once per meter."""
        return cls(
            token_usage=source.create_histogram(TOKEN_USAGE_METRIC, "{token}", "Tokens of a model call"),
            duration=source.create_histogram(DURATION_METRIC, "s", "Duration of a model call"),
            rollouts=source.create_counter(ROLLOUTS_METRIC, "{rollout}", "Rollouts that ended, by status"),
            reward=source.create_histogram(REWARD_METRIC, "1", "Reward of a rollout"),
            updates=source.create_counter(UPDATES_METRIC, "{update}", "Training steps that published weights"),
            trained_groups=source.create_counter(TRAINED_GROUPS_METRIC, "{group}", "Groups that were trained"),
        )

    def chat(self, model: str, role: str, *, input_tokens: int, output_tokens: int, seconds: float) -> None:
        """A model call has ended."""
        named = {OPERATION: "chat", PROVIDER: SCOPE, REQUEST_MODEL: model, ROLE: role}
        self.token_usage.record(input_tokens, {**named, TOKEN_TYPE: "input"})
        self.token_usage.record(output_tokens, {**named, TOKEN_TYPE: "output"})
        self.duration.record(seconds, named)

    def rollout(self, status: str, score: float | None) -> None:
        """A rollout has ended; no reward leaves no mark on the histogram."""
        self.rollouts.add(1, {STATUS: status})
        if score is not None:
            self.reward.record(score, {STATUS: status})

    def update(self, n_groups: int) -> None:
        """A training step has ended."""
        self.updates.add(1)
        self.trained_groups.add(n_groups)


@functools.cache
def instruments() -> Instruments:
    """The metrics of the provider that is set, or will be."""
    return Instruments.of(meter())


def _group_span(step: int, group: str, links: Sequence[Link]) -> None:
    """One group's part in an update."""
    attributes: dict[str, str | int] = {STEP: step, GROUP_ID: group}
    tracer().start_span(f"agenttrain.update_group {group}", links=links, attributes=attributes).end()


def _linked(spans: Sequence[SpanIds]) -> Iterator[list[Link]]:
    """Links to the spans that were traced, at most 128 at a time."""
    links = [_link(trace_id, span_id) for trace_id, span_id in spans if trace_id and span_id]
    for start in range(0, len(links), MAX_LINKS):
        yield links[start : start + MAX_LINKS]


def _link(trace_id: str, span_id: str) -> Link:
    return Link(
        SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    )
