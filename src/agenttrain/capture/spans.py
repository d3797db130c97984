"""A model call becomes an OpenTelemetry span, by the API alone.

The span is a child of the span around it, in whichever thread the call is made; where that thread knows no span of the
rollout's trace (the context was not copied), it is a child of the span in which the recorder was made. The turn's id on
it, and its own ids on the Turn, join it with the tokens that the call sampled.

Source: OpenTelemetry semantic conventions for generative AI, spans of kind `chat`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from opentelemetry import context as contexts
from opentelemetry import trace

from agenttrain import telemetry
from agenttrain.telemetry import names
from agenttrain.telemetry.content import input_messages, output_message

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from agenttrain.protocols import Parsed
    from agenttrain.records import InvalidCall, ModelCall, OwnAnswer, ParsedCall, Sampling, Turn


class CallSpans:
    """Makes the spans of one rollout's calls. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, *, model: str, rollout_id: str, captures_content: bool = False) -> None:
        self._tracer, self._model, self._rollout_id = tracer, model, rollout_id
        self._captures_content = captures_content
        self._around: Context = contexts.get_current()

    def start(self, call: ModelCall, *, turn_id: str, sampling: Sampling) -> Span:
        """The policy is about to be asked."""
        span = self._start(call, turn_id, self._model)
        if span.is_recording():
            span.set_attributes(
                {
                    names.PROVIDER: names.SCOPE,
                    names.REQUEST_TEMPERATURE: sampling.temperature,
                    names.REQUEST_MAX_TOKENS: sampling.max_tokens,
                }
            )
        return span

    def start_auxiliary(self, call: ModelCall, *, turn_id: str, chosen: str = "") -> Span:
        """Another model than the policy is about to be asked.

        Args:
            chosen: name of the one in the policy's place. Empty: the call's own.
        """
        return self._start(call, turn_id, chosen or call.site.model_name or call.site.model_class)

    def end(self, span: Span, turn: Turn, parsed: Parsed, *, n_cached: int) -> None:
        """End a call's span with what was sampled, and count its tokens and seconds."""
        telemetry.instruments().chat(
            self._model,
            turn.role,
            input_tokens=len(turn.prompt_ids),
            output_tokens=len(turn.response_ids),
            seconds=turn.ended_at - turn.started_at,
        )
        if span.is_recording():
            _describe(span, turn, n_cached)
            if turn.missed:
                span.set_attribute(names.MISSED, turn.missed)
            if self._captures_content:
                span.set_attributes(_said(parsed, turn, reasoning=parsed.reasoning))
        span.end()

    def end_auxiliary(self, span: Span, turn: Turn, error: BaseException | None, answer: OwnAnswer | None) -> None:
        """It answered, or failed."""
        if error is not None:
            self.fail(span, error)
            return
        if span.is_recording() and answer is not None:
            told = {names.INPUT_TOKENS: turn.n_prompt_tokens, names.OUTPUT_TOKENS: turn.n_response_tokens}
            span.set_attribute(names.FINISH_REASONS, (turn.stop_reason,))
            span.set_attributes({name: n for name, n in told.items() if n is not None})
            if self._captures_content:
                span.set_attributes(_said(answer, turn, reasoning=None))
        span.end()

    def fail(self, span: Span, error: BaseException) -> None:
        """End a call's span with the error that kept its answer away."""
        if span.is_recording():
            telemetry.fail(span, error, str(error) if self._captures_content else None)
        span.end()

    def _start(self, call: ModelCall, turn_id: str, model: str) -> Span:
        if self._tracer is None:
            return trace.INVALID_SPAN
        span = self._tracer.start_span(f"chat {model}".rstrip(), self._parent(), kind=trace.SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes(
                {
                    names.OPERATION: "chat",
                    names.ROLLOUT_ID: self._rollout_id,
                    names.TURN_ID: turn_id,
                    names.ROLE: call.role,
                    names.ROLE_REASON: call.role_reason,
                    **{key: value for key, value in _known(call, model).items() if value},
                }
            )
            if self._captures_content:
                span.set_attributes(input_messages(call.messages))
        return span

    def _parent(self) -> Context:
        here = trace.get_current_span().get_span_context()
        around = trace.get_current_span(self._around).get_span_context()
        return contexts.get_current() if here.is_valid and here.trace_id == around.trace_id else self._around


def around(span: Span) -> AbstractContextManager[object]:
    """Make what the engine does a child of a call's span; free where nothing is traced."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False) if span.is_recording() else _NONE


_NONE = nullcontext()


def _known(call: ModelCall, model: str) -> dict[str, str]:
    return {names.REQUEST_MODEL: model, names.NODE: call.site.node or ""}


def _describe(span: Span, turn: Turn, n_cached: int) -> None:
    span.set_attributes(
        {
            names.FINISH_REASONS: (turn.stop_reason,),
            names.INPUT_TOKENS: len(turn.prompt_ids),
            names.CACHED_TOKENS: n_cached,
            names.OUTPUT_TOKENS: len(turn.response_ids),
            names.EXTENDS if turn.extends else names.BREAK_CAUSE: turn.extends or turn.break_cause or "",
        }
    )
    if turn.respelled:
        span.set_attribute(names.RESPELLED, turn.respelled)
    if turn.weight_versions:
        span.set_attributes(
            {
                names.FIRST_WEIGHT_VERSION: turn.weight_versions[0],
                names.WEIGHT_VERSION: turn.weight_versions[-1],
            }
        )


def _said(parsed: Parsed | OwnAnswer, turn: Turn, *, reasoning: str | None) -> dict[str, str]:
    made: list[ParsedCall | InvalidCall] = [*parsed.tool_calls, *parsed.invalid_tool_calls]
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in made]
    return output_message(text=parsed.text, reasoning=reasoning, tool_calls=calls, finish_reason=turn.stop_reason)
