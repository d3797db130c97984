"""Tool calls of one rollout become OpenTelemetry spans.

One `execute_tool {tool}` span per call, ended with the call. Arguments, results and the texts of errors stand on it
only where the user asks for content. Invariant: nothing here raises into the agent, and with a tracer that doesn't
record nothing is kept.

Source: OpenTelemetry semantic conventions for generative AI, "Execute tool span".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langgraph.errors import GraphBubbleUp
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer

from agenttrain.errors import RolloutStop
from agenttrain.telemetry import is_recording, names, tracer
from agenttrain.telemetry.content import as_json


class ToolSpans(BaseCallbackHandler):
    """LangChain callback handler; one per rollout, given to `run_graph` among the callbacks."""

    run_inline = True
    """In async graphs too: no thread for an event that costs microseconds."""
    ignore_llm = True
    ignore_chat_model = True
    ignore_chain = True
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, tracer: Tracer, *, captures_content: bool = False) -> None:
        self._tracer, self._captures_content = tracer, captures_content
        self._spans: dict[UUID, Span] = {}

    def on_tool_start(self, serialized: dict[str, Any] | None, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        """Begin the span of one call."""
        name = str((serialized or {}).get("name") or kwargs.get("name") or "tool")
        attributes = {names.OPERATION: "execute_tool", names.TOOL_NAME: name}
        if call_id := kwargs.get("tool_call_id"):
            attributes[names.TOOL_CALL_ID] = str(call_id)
        if self._captures_content:
            attributes[names.TOOL_ARGUMENTS] = as_json(kwargs.get("inputs") or input_str)
        span = self._tracer.start_span(f"execute_tool {name}", kind=SpanKind.INTERNAL, attributes=attributes)
        if span.is_recording():
            self._spans[run_id] = span

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End it; an answer of status "error" is an error."""
        failed = getattr(output, "status", None) == "error"
        if self._captures_content and run_id in self._spans:
            self._spans[run_id].set_attribute(names.TOOL_RESULT, as_json(getattr(output, "content", output)))
        self._end(run_id, "tool_error" if failed else None, "")

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End it with the exception's type; an interrupt or the rollout's end is no error of the tool."""
        if isinstance(error, (GraphBubbleUp, RolloutStop)):
            self._end(run_id, None, "")
            return
        self._end(run_id, type(error).__qualname__, str(error)[:200])

    def close(self) -> None:
        """End what is still open, such as tools that outlived their rollout."""
        for run_id in list(self._spans):
            self._end(run_id, "abandoned", "")

    def _end(self, run_id: UUID, error_type: str | None, description: str) -> None:
        span = self._spans.pop(run_id, INVALID_SPAN)
        if error_type is not None:
            span.set_attribute(names.ERROR_TYPE, error_type)
            span.set_status(Status(StatusCode.ERROR, description if self._captures_content else None))
        span.end()


@contextmanager
def tool_spans(*, captures_content: bool) -> Iterator[tuple[ToolSpans, ...]]:
    """The callbacks of one rollout; none where its span is not kept, and all spans ended when the graph has."""
    if not is_recording():
        yield ()
        return
    spans = ToolSpans(tracer(), captures_content=captures_content)
    try:
        yield (spans,)
    finally:
        spans.close()
