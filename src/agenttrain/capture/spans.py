"""A model call becomes an OpenTelemetry span, by the API alone.

The span is a child of the span around it, in whichever thread the call is made; where that thread knows no span of the
rollout's trace (the context was not copied), it is a child of the span in which the recorder was made.

Source: OpenTelemetry semantic conventions for generative AI, spans of kind `chat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import context as contexts
from opentelemetry import trace

from agenttrain import telemetry
from agenttrain.records import Sampling, Turn

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


class CallSpans:
    """Makes the spans of one rollout's calls. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, *, model: str) -> None:
        self._tracer, self._model = tracer, model
        self._around: Context = contexts.get_current()

    def start(self, *, turn_id: str, role: str, sampling: Sampling) -> Span:
        if self._tracer is None:
            return trace.INVALID_SPAN
        span = self._tracer.start_span(f"chat {self._model}", self._parent(), kind=trace.SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes(
                {
                    telemetry.OPERATION: "chat",
                    telemetry.PROVIDER: telemetry.SCOPE,
                    telemetry.REQUEST_MODEL: self._model,
                    telemetry.REQUEST_TEMPERATURE: sampling.temperature,
                    telemetry.REQUEST_MAX_TOKENS: sampling.max_tokens,
                    telemetry.ROLE: role,
                    telemetry.TURN_ID: turn_id,
                }
            )
        return span

    def _parent(self) -> Context:
        here = trace.get_current_span().get_span_context()
        around = trace.get_current_span(self._around).get_span_context()
        return contexts.get_current() if here.is_valid and here.trace_id == around.trace_id else self._around


def end(span: Span, turn: Turn, model: str) -> None:
    """End a call's span with what was sampled, and count its tokens and seconds."""
    telemetry.instruments().chat(
        model,
        turn.role,
        input_tokens=len(turn.prompt_ids),
        output_tokens=len(turn.response_ids),
        seconds=turn.ended_at - turn.started_at,
    )
    if span.is_recording():
        span.set_attributes(
            {
                telemetry.FINISH_REASONS: (turn.stop_reason,),
                telemetry.INPUT_TOKENS: len(turn.prompt_ids),
                telemetry.OUTPUT_TOKENS: len(turn.response_ids),
                telemetry.WEIGHT_VERSION: turn.weight_versions[-1] if turn.weight_versions else -1,
            }
        )
    span.end()


def fail(span: Span, error: BaseException) -> None:
    """End a call's span with the error that kept its answer away."""
    if span.is_recording():
        span.set_attribute(telemetry.ERROR_TYPE, type(error).__qualname__)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    span.end()
