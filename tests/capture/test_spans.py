"""Model calls as spans: what stands on them, and whose child they and the engine's work are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agenttrain.capture.recorder import Recorder, RecorderLimits
from agenttrain.capture.store import SqliteStore
from agenttrain.errors import EngineError
from agenttrain.protocols import Renderer
from agenttrain.records import CallSite, Ids, ModelCall, RolloutRequest, Sampling, Task
from agenttrain.telemetry import names

ASKS = ({"role": "user", "content": "secret question"},)
LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}

Open = Callable[..., Recorder]


class Said:
    """What the engine says next, and the spans in which it was asked."""

    answer: str | Exception = "secret answer<|im_end|>"
    asked_in: list[int]


@pytest.fixture
def said() -> Said:
    made = Said()
    made.asked_in = []
    return made


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def opened(
    scripted: Any, renderer: Renderer, encode: Any, tmp_path: Path, said: Said, exporter: InMemorySpanExporter
) -> Open:
    """Makes a recorder whose spans go to `exporter`."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    class Engine(scripted):  # type: ignore[misc]
        def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Any:
            said.asked_in.append(trace.get_current_span().get_span_context().span_id)
            return super().generate(prompt_ids, sampling, session=session)

    def say(prompt_ids: Ids, sampling: Sampling) -> Ids | Exception:
        return said.answer if isinstance(said.answer, Exception) else encode(said.answer)

    def make(**more: Any) -> Recorder:
        return Recorder(
            request=RolloutRequest(task=Task(id="t", input={}), phase="train", step=1),
            engine=Engine(say),
            renderer=renderer,
            store=SqliteStore(tmp_path),
            role_of=lambda site: ("trained", "default"),
            limits=RecorderLimits(),
            tracer=provider.get_tracer("test"),
            model_name="policy",
            **more,
        )

    return make


def call(*messages: Any, **more: Any) -> ModelCall:
    return ModelCall(messages=messages or ASKS, site=CallSite(node="agent"), role_reason="default", **more)


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_the_engine_is_asked_inside_the_calls_span(opened: Open, said: Said, exporter: InMemorySpanExporter) -> None:
    """So that what an engine traces, here or in its process, is a child of it."""
    opened().answer(call())
    (span,) = exporter.get_finished_spans()
    assert said.asked_in == [span.context.span_id]


def test_a_call_that_goes_on_names_the_turn_it_extends(opened: Open, exporter: InMemorySpanExporter) -> None:
    recorder = opened()
    first = recorder.answer(call())
    recorder.answer(call(*ASKS, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}))
    begun, extended = exporter.get_finished_spans()
    assert (told(begun)[names.BREAK_CAUSE], names.EXTENDS in told(begun)) == ("first_turn", False)
    assert (told(extended)[names.EXTENDS], names.BREAK_CAUSE in told(extended)) == (recorder.turns[0].id, False)


def test_how_the_template_would_write_the_reply_before_is_told(
    opened: Open, said: Said, exporter: InMemorySpanExporter
) -> None:
    """On the span of the call that goes on from it."""
    said.answer = " spaced answer<|im_end|>"
    recorder = opened()
    first = recorder.answer(call())
    spoken = {"role": "assistant", "content": first.text.strip()}
    recorder.answer(call(*ASKS, spoken, {"role": "user", "content": "And now?"}))
    begun, extended = exporter.get_finished_spans()
    assert names.RESPELLED not in told(begun)
    assert told(extended)[names.RESPELLED] == recorder.turns[1].respelled == ("text_respelled",)


def test_what_a_reply_lacks_is_told(opened: Open, exporter: InMemorySpanExporter) -> None:
    """A call was asked for, and the policy just spoke."""
    opened().answer(call(tools=(LOOK_UP,), tool_choice="required"))
    (span,) = exporter.get_finished_spans()
    assert told(span)[names.MISSED] == "tool_choice"


def test_a_call_of_the_users_own_model_is_a_span_too(opened: Open, exporter: InMemorySpanExporter) -> None:
    """By its model's name, with its turn's id, and with the type of what it failed with."""
    recorder = opened()
    site = CallSite(node="judge", model_name="gpt-4o")
    asked = ModelCall(messages=ASKS, site=site, role="auxiliary", role_reason="node: judge")
    recorder.auxiliary_ended(recorder.auxiliary_began(asked), None, None)
    recorder.auxiliary_ended(recorder.auxiliary_began(asked), ValueError("secret"), None)
    answered, failed = exporter.get_finished_spans()
    assert answered.name == "chat gpt-4o"
    assert told(answered)[names.ROLE] == "auxiliary"
    assert told(answered)[names.TURN_ID] == recorder.turns[0].id
    assert f"{answered.context.span_id:016x}" == recorder.turns[0].span_id
    assert told(failed)[names.ERROR_TYPE] == "ValueError"


@pytest.mark.parametrize("captures_content", [False, True])
def test_content_and_the_text_of_errors_only_on_request(
    opened: Open, said: Said, exporter: InMemorySpanExporter, captures_content: bool
) -> None:
    recorder = opened(captures_content=captures_content)
    recorder.answer(call())
    said.answer = ValueError("secret reason")
    with pytest.raises(EngineError):
        recorder.answer(call())
    answered, failed = exporter.get_finished_spans()
    assert ("secret" in answered.to_json() + failed.to_json()) is captures_content
    if captures_content:
        assert json.loads(told(answered)[names.OUTPUT_MESSAGES])[0]["parts"][0]["content"] == "secret answer"
        assert json.loads(told(failed)[names.INPUT_MESSAGES])[0]["parts"][0]["content"] == "secret question"
        assert failed.status.description == "secret reason"
