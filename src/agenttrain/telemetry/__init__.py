"""What happens in a run becomes OpenTelemetry spans, events and metrics.

    run_span           the run, and under it
      phase_span         each evaluation, and training
        update_spans       one span a step, under it one a group, linked to the rollouts that it trained
        publish_span       new weights to the engine
    rollout_span       a trace of its own (invoke_agent), linked to the run's; inside it
      chat               a model call, made in capture/spans, with its token range's address: the turn's id
        generate_span      the same call in the engine's process
      execute_tool       a tool call, made in graph/spans
      reward_span        the verifiers; their scores are events gen_ai.evaluation.result of the rollout

`names` has every name, and what stands on which span. Only the OpenTelemetry API is used here: without an SDK every
call is a no-op of microseconds. Spans take plain values, no records. Prompts, completions, what tools got and gave, and
the texts of errors are left out unless the user asks for them (`content`).
"""

from __future__ import annotations

from agenttrain.telemetry.metrics import Instruments, instruments, meter
from agenttrain.telemetry.spans import (
    SpanIds,
    TrainedRollout,
    continued_from,
    fail,
    generate_span,
    generated,
    ids_of,
    is_recording,
    is_traced,
    phase_span,
    publish_span,
    reward_event,
    reward_span,
    rollout_span,
    rollout_tokens,
    run_span,
    sandbox_attributes,
    trace_context,
    tracer,
    update_spans,
)

__all__ = [
    "Instruments",
    "SpanIds",
    "TrainedRollout",
    "continued_from",
    "fail",
    "generate_span",
    "generated",
    "ids_of",
    "instruments",
    "is_recording",
    "is_traced",
    "meter",
    "phase_span",
    "publish_span",
    "reward_event",
    "reward_span",
    "rollout_span",
    "rollout_tokens",
    "run_span",
    "sandbox_attributes",
    "trace_context",
    "tracer",
    "update_spans",
]
