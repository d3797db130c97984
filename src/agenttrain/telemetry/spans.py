"""Runs, phases, rollouts, rewards and updates become spans, linked and nested as the package's docstring draws.

An error stands on a span by its type alone: its text may quote what the policy said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agenttrain.telemetry import names
from agenttrain.telemetry.metrics import instruments

MAX_LINKS = 128
"""Links that one span may have by OpenTelemetry's default; more would be dropped without a word."""
FAILURES = ("environment_failure", "aborted", "incomplete")
"""Statuses that mark a rollout's span as an error; a policy that did wrong is a result."""

SpanIds = tuple[str, str]
"""Trace id and span id, hexadecimal; both empty where nothing was traced."""
Attributes = Mapping[str, str | bool | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRollout:
    """What an update tells of one rollout that it trained."""

    rollout_id: str
    ids: SpanIds
    """Of the rollout's span."""
    staleness: int
    """Of its oldest sample."""
    n_tokens: int
    """At mask 1."""
    advantage: float | None
    """Mean over these tokens. None: the trainer did not tell."""


def tracer() -> trace.Tracer:
    """The tracer of agenttrain, of whatever provider is set."""
    return trace.get_tracer(names.SCOPE)


def is_recording() -> bool:
    """True when the span of here is kept: worth the work of describing what happens inside."""
    return trace.get_current_span().is_recording()


def is_traced() -> bool:
    """True when the span of here is kept, in this process or in the one that `continued_from` goes on from."""
    where = trace.get_current_span().get_span_context()
    return where.is_valid and where.trace_flags.sampled


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


def run_span(kind: str, *, run_id: str, graph: str, life: int = 0) -> AbstractContextManager[Span]:
    """A whole run.

    Args:
        kind: fit or evaluation.
    """
    attributes: Attributes = {names.RUN_ID: run_id, names.AGENT_NAME: graph, names.LIFE: life}
    return _span(f"agenttrain.{kind}", attributes)


def phase_span(phase: str) -> AbstractContextManager[Span]:
    """A part of the run: baseline, train, held_out, eval."""
    return _span(f"agenttrain.{phase}", {names.PHASE: phase})


def rollout_span(
    *,
    graph: str,
    rollout_id: str,
    task_id: str,
    phase: str,
    step: int = 0,
    group: str = "",
    attempt: int = 0,
    remake: int = 0,
    life: int = 0,
    run: Mapping[str, str] | None = None,
) -> AbstractContextManager[Span]:
    """One execution of the graph on one task; what it does are the spans inside.

    Args:
        run: `trace_context` of the run, which this trace is linked to.
    """
    attributes: Attributes = {
        names.OPERATION: "invoke_agent",
        names.PROVIDER: names.SCOPE,
        names.AGENT_NAME: graph,
        names.CONVERSATION_ID: rollout_id,
        names.ROLLOUT_ID: rollout_id,
        names.TASK_ID: task_id,
        names.PHASE: phase,
        names.STEP: step,
        names.GROUP_ID: group,
        names.ATTEMPT: attempt,
        names.REMAKE: remake,
        names.LIFE: life,
    }
    whole_run = trace.get_current_span(propagate.extract(run or {})).get_span_context()
    links = [Link(whole_run)] if whole_run.is_valid else []
    return _span(f"invoke_agent {graph}", attributes, around=context.Context(), links=links)


def reward_span(rollout_id: str) -> AbstractContextManager[Span]:
    """The verifiers at work on one rollout."""
    return _span("agenttrain.reward", {names.ROLLOUT_ID: rollout_id})


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
    span.set_attributes({names.STATUS: status, names.SUCCESS: success})
    if status in FAILURES:
        _mark(span, status)
    if score is not None:
        span.set_attribute(names.REWARD, score)
        named = {names.EVALUATION_NAME: "reward", names.EVALUATION_LABEL: "pass" if success else "fail"}
        span.add_event(names.EVALUATION_EVENT, {**named, names.EVALUATION_SCORE: score})
    for name, value in (parts or {}).items():
        span.add_event(names.EVALUATION_EVENT, {names.EVALUATION_NAME: name, names.EVALUATION_SCORE: value})


def sandbox_attributes(span: Span | None, *, backend: str, unenforced: Sequence[str], n_tampering: int) -> None:
    """What kept a rollout's sandbox apart, and whether it changed what judges it, on its span.

    Args:
        backend: empty: it had no sandbox.
    """
    if span is None:
        return
    if backend:
        span.set_attribute(names.SANDBOX, backend)
    if unenforced:
        span.set_attribute(names.UNENFORCED, list(unenforced))
    if n_tampering:
        span.set_attribute(names.TAMPERING, n_tampering)


def rollout_tokens(
    span: Span | None,
    *,
    phase: str,
    tokens: Mapping[str, int],
    n_trajectories: int,
    n_auxiliary: int,
    weight_versions: Sequence[int],
) -> None:
    """Where the tokens of a rollout stand, on its span and in the metrics.

    Args:
        span: of the rollout. None: only the metrics are told.
        tokens: by a reason of `names.MASK_REASONS`.
        n_auxiliary: calls that the user's own models answered.
        weight_versions: of all that the policy sampled; empty: it sampled nothing.
    """
    instruments().rollout_tokens(tokens, phase)
    if span is None or not span.is_recording():
        return
    counts = {names.TOKENS_PREFIX + reason: tokens.get(reason, 0) for reason in names.MASK_REASONS}
    span.set_attributes({names.TRAJECTORIES: n_trajectories, names.AUXILIARY_CALLS: n_auxiliary, **counts})
    if weight_versions:
        oldest, newest = min(weight_versions), max(weight_versions)
        span.set_attributes({names.FIRST_WEIGHT_VERSION: oldest, names.WEIGHT_VERSION: newest})


def update_spans(
    step: int, weight_version: int, groups: Mapping[str, Sequence[TrainedRollout]], step_metrics: Mapping[str, float]
) -> None:
    """One update: a span for the step, and under it one per group with links to the rollouts it trained.

    Args:
        step: training step, from 1.
        weight_version: of the weights that it published.
        groups: group id to its trained rollouts; a group of more than 128 takes several spans.
        step_metrics: numbers of the step.
    """
    instruments().update(len(groups), (rollout.staleness for group in groups.values() for rollout in group))
    numbers = {names.UPDATE_PREFIX + name: float(value) for name, value in step_metrics.items()}
    attributes: Attributes = {names.STEP: step, names.WEIGHT_VERSION: weight_version, **numbers}
    with _span(f"agenttrain.update {step}", attributes) as span:
        if not span.is_recording():
            return
        for group, rollouts in groups.items():
            for start in range(0, len(rollouts), MAX_LINKS):
                _group_span(step, weight_version, group, rollouts[start : start + MAX_LINKS])


def publish_span(weight_version: int) -> AbstractContextManager[Span]:
    """New weights on their way to the engine."""
    return _span("agenttrain.publish", {names.WEIGHT_VERSION: weight_version})


def generate_span(carrier: Mapping[str, str], n_prompt: int) -> Span:
    """A model call in the engine's process, as a child of its chat span; the caller ends it.

    Args:
        carrier: `trace_context` of the chat span.
    """
    around = propagate.extract(carrier)
    attributes = {names.INPUT_TOKENS: n_prompt}
    return tracer().start_span("agenttrain.generate", around, kind=SpanKind.SERVER, attributes=attributes)


def generated(span: Span, *, n_sampled: int, n_cached: int, stop_reason: str, weight_version: int | None) -> None:
    """What the engine answered, on its span.

    Args:
        weight_version: of the last id. None: it sampled nothing.
    """
    span.set_attributes(
        {names.OUTPUT_TOKENS: n_sampled, names.CACHED_TOKENS: n_cached, names.FINISH_REASONS: (stop_reason,)}
    )
    if weight_version is not None:
        span.set_attribute(names.WEIGHT_VERSION, weight_version)


def fail(span: Span, error: BaseException, text: str | None = None) -> None:
    """Mark a span with the type of what ended it, and its text where the user asked for content."""
    _mark(span, type(error).__qualname__, text)


def _mark(span: Span, error_type: str, text: str | None = None) -> None:
    span.set_attribute(names.ERROR_TYPE, error_type)
    span.set_status(Status(StatusCode.ERROR, text))


@contextmanager
def _span(
    name: str,
    attributes: Attributes,
    *,
    around: context.Context | None = None,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """A span that is current inside the block; what ends the block is marked by its type."""
    with tracer().start_as_current_span(
        name, around, attributes=attributes, links=links, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise


def _group_span(step: int, weight_version: int, group: str, rollouts: Sequence[TrainedRollout]) -> None:
    """One group's part in an update, linked to its rollouts that were traced."""
    advantages = [rollout.advantage for rollout in rollouts if rollout.advantage is not None]
    span = tracer().start_span(
        f"agenttrain.update_group {group}",
        links=[_link(rollout) for rollout in rollouts if all(rollout.ids)],
        attributes={
            names.STEP: step,
            names.GROUP_ID: group,
            names.WEIGHT_VERSION: weight_version,
            names.STALENESS: sum(rollout.staleness for rollout in rollouts) / len(rollouts),
            names.N_TRAINED: sum(rollout.n_tokens for rollout in rollouts),
        },
    )
    if advantages:
        span.set_attribute(names.ADVANTAGES, advantages)
    span.end()


def _link(rollout: TrainedRollout) -> Link:
    trace_id, span_id = (int(id, 16) for id in rollout.ids)
    attributes: dict[str, str | int | float] = {
        names.ROLLOUT_ID: rollout.rollout_id,
        names.STALENESS: rollout.staleness,
        names.N_TRAINED: rollout.n_tokens,
    }
    if rollout.advantage is not None:
        attributes[names.ADVANTAGE] = rollout.advantage
    flags = TraceFlags(TraceFlags.SAMPLED)
    return Link(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags), attributes)
