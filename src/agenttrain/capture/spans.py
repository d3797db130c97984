"""A model call becomes an OpenTelemetry span, by the API alone.

The span is a child of the span around it, in whichever thread the call is made; where that thread knows no span of the
rollout's trace (the context was not copied), it is a child of the span in which the recorder was made.

Source: OpenTelemetry semantic conventions for generative AI, spans of kind `chat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry import context as contexts
from opentelemetry import trace

from agenttrain.records import Sampling, Turn

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ROLE: Final = "agenttrain.role"
TURN_ID: Final = "agenttrain.turn.id"
WEIGHT_VERSION: Final = "agenttrain.weight_version"
ERROR_TYPE: Final = "error.type"


class CallSpans:
    """Makes the spans of one rollout's calls. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, *, model: str, provider: str) -> None:
        self._tracer, self._model, self._provider = tracer, model, provider
        self._around: Context = contexts.get_current()

    def start(self, *, turn_id: str, role: str, sampling: Sampling) -> Span:
        if self._tracer is None:
            return trace.INVALID_SPAN
        span = self._tracer.start_span(f"chat {self._model}", self._parent(), kind=trace.SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes(
                {
                    OPERATION: "chat",
                    PROVIDER: self._provider,
                    REQUEST_MODEL: self._model,
                    REQUEST_TEMPERATURE: sampling.temperature,
                    REQUEST_MAX_TOKENS: sampling.max_tokens,
                    ROLE: role,
                    TURN_ID: turn_id,
                }
            )
        return span

    def _parent(self) -> Context:
        here = trace.get_current_span().get_span_context()
        around = trace.get_current_span(self._around).get_span_context()
        return contexts.get_current() if here.is_valid and here.trace_id == around.trace_id else self._around


def end(span: Span, turn: Turn) -> None:
    """End a call's span with what was sampled."""
    if span.is_recording():
        span.set_attributes(
            {
                FINISH_REASONS: (turn.stop_reason,),
                INPUT_TOKENS: len(turn.prompt_ids),
                OUTPUT_TOKENS: len(turn.response_ids),
                WEIGHT_VERSION: turn.weight_versions[-1] if turn.weight_versions else -1,
            }
        )
    span.end()


def fail(span: Span, error: BaseException) -> None:
    """End a call's span with the error that kept its answer away."""
    if span.is_recording():
        span.set_attribute(ERROR_TYPE, type(error).__qualname__)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    span.end()
