"""OpenTelemetry end to end: the spans and metrics that a fit leaves, whether they are all that is written of them, and
where they go."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agenttrain import telemetry
from agenttrain.capture.store import SqliteStore
from agenttrain.config import Config
from agenttrain.local.engine import LocalEngine
from agenttrain.records import RolloutRequest, RolloutSpec, Task
from agenttrain.rollout import open_runner_of
from agenttrain.telemetry import names

TOOLED = """
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langgraph.prebuilt import ToolNode

@tool
def look_up(item: str) -> str:
    "Look an item up."
    if item == "gone":
        raise ValueError("secret stock of gone")
    return f"secret price of {item}"

judge_model = FakeListChatModel(responses=["secret verdict"])

def call(state):
    asked = [{"name": "look_up", "args": {"item": item}, "id": item} for item in ("lamp", "gone")]
    return {"messages": [AIMessage("", tool_calls=asked)]}

def draft(state):
    model.invoke(state["messages"])

def judge(state):
    judge_model.invoke("Good?")

builder.add_node("call", call)
builder.add_node("tools", ToolNode([look_up], handle_tool_errors=True))
builder.add_node("draft", draft)
builder.add_node("judge", judge)
builder.add_node("agent", agent)
builder.set_entry_point("call")
builder.add_edge("call", "tools")
builder.add_edge("tools", "draft")
builder.add_edge("draft", "judge")
builder.add_edge("judge", "agent")

@trainable(model=POLICY, tasks="tasks.jsonl", verifier=score, frozen=["draft"], auxiliary=["judge"])
def graph():
    return builder.compile()
"""
"""A frozen call, one of the user's own model, a tool that answers and one that fails, and a trained call."""

FIT = ("fit", "graph.py", "--set", "trainer.steps=1", "--set", "trainer.tasks_per_step=4")


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


@pytest.fixture(scope="session")
def meter() -> InMemoryMetricReader:
    """What is counted in this process."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    return reader


def named(spans: Sequence[ReadableSpan], start: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name.startswith(start)]


def children(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[str]:
    own = parent.get_span_context()
    assert own is not None
    return sorted(span.name for span in spans if span.parent is not None and span.parent.span_id == own.span_id)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids(span: Any) -> tuple[str, str]:
    own = span.get_span_context()
    return f"{own.trace_id:032x}", f"{own.span_id:016x}"


def test_the_spans_of_a_fit(new_project: Any, command: Any, spans: InMemorySpanExporter) -> None:
    """A trace per rollout, linked to the run's; an update with what it made of each; no content anywhere."""
    project = new_project(TOOLED, decorated="")
    done = command(*FIT)
    assert done.code == 0, done.err
    seen = spans.get_finished_spans()
    check_rollouts(seen, project)
    check_calls(seen, project)
    check_update(seen, project)
    check_run(seen, project)
    check_no_content(seen)


def check_rollouts(seen: Sequence[ReadableSpan], project: Any) -> None:
    agents = named(seen, "invoke_agent graph.py:graph")
    assert len(agents) == 3 + 8 + 3
    assert len({ids(span)[0] for span in agents}) == len(agents)
    by_id = {attributes(span)["agenttrain.rollout.id"]: span for span in agents}
    for result in project.store.results():
        rollout, span = result.rollout, by_id[result.rollout.id]
        tools = ["execute_tool look_up"] * 2
        assert children(seen, span) == [
            "agenttrain.reward",
            "chat FakeListChatModel",
            "chat policy",
            "chat policy",
            *tools,
        ]
        whole, part = (dict(event.attributes or {}) for event in span.events)
        assert whole["gen_ai.evaluation.score.value"] == rollout.reward.score
        assert part["gen_ai.evaluation.name"] == rollout.reward.parts[0].name
        told = attributes(span)
        assert told["agenttrain.status"] == rollout.status
        assert (rollout.trace_id, rollout.span_id) == ids(span)
        frozen, _, trained = result.turns
        assert told["agenttrain.tokens.frozen"] == len(frozen.response_ids)
        assert told["agenttrain.tokens.trained"] == len(trained.response_ids)
        assert told["agenttrain.auxiliary_calls"] == 1
        assert told["agenttrain.weight_version"] == (1 if rollout.phase == "held_out" else 0)


def check_calls(seen: Sequence[ReadableSpan], project: Any) -> None:
    """Each call's turn knows its span, and the span its turn."""
    chats = {attributes(span)["agenttrain.turn.id"]: span for span in named(seen, "chat ")}
    turns = [turn for result in project.store.results() for turn in result.turns]
    assert len(turns) == len(chats) == 3 * 14
    for turn in turns:
        span, told = chats[turn.id], attributes(chats[turn.id])
        assert (turn.trace_id, turn.span_id) == ids(span)
        assert (told["agenttrain.role"], told["agenttrain.role_reason"]) == (turn.role, turn.role_reason)
        assert told["agenttrain.node"] == turn.site.node
        if turn.role != "auxiliary":
            assert told["gen_ai.usage.output_tokens"] == len(turn.response_ids)
            assert told["gen_ai.request.max_tokens"] == 6


def check_update(seen: Sequence[ReadableSpan], project: Any) -> None:
    (update,) = named(seen, "agenttrain.update 1")
    groups = named(seen, "agenttrain.update_group")
    assert children(seen, update) == sorted(group.name for group in groups)
    assert groups
    (row,) = project.run.metrics()
    assert attributes(update)["agenttrain.update.reward"] == row["reward"]
    assert (row["staleness_mean"], row["staleness_max"]) == (0.0, 0.0)
    rollouts = {rollout.span_id: rollout for rollout in project.store.rollouts()}
    linked = {f"{link.context.span_id:016x}": dict(link.attributes or {}) for group in groups for link in group.links}
    samples = {sample.extra_fields["rollout_id"]: sample for sample in project.store.trained_samples()}
    assert {rollouts[span_id].id for span_id in linked} == samples.keys()
    for span_id, told in linked.items():
        rollout = rollouts[span_id]
        (trained,) = project.store.trained(rollout.id)
        assert told["agenttrain.rollout.id"] == rollout.id
        assert told["agenttrain.trained_tokens"] == sum(samples[rollout.id].response_mask)
        assert told["agenttrain.advantage"] == pytest.approx(max(trained.advantages, key=abs))
        assert told["agenttrain.staleness"] == trained.staleness == 0
    for group in groups:
        (name,) = {rollouts[f"{link.context.span_id:016x}"].group_id for link in group.links}
        assert attributes(group)["agenttrain.group.id"] == name
        assert sum(attributes(group)["agenttrain.advantages"]) == pytest.approx(0, abs=1e-6)


def check_run(seen: Sequence[ReadableSpan], project: Any) -> None:
    """Phases, updates and publishing are one trace under the run's span."""
    (whole,) = named(seen, "agenttrain.fit")
    assert attributes(whole)["agenttrain.run.id"] == project.run.id
    assert children(seen, whole) == ["agenttrain.baseline", "agenttrain.held_out", "agenttrain.train"]
    (train,) = named(seen, "agenttrain.train")
    assert children(seen, train) == ["agenttrain.publish", "agenttrain.update 1"]
    for agent in named(seen, "invoke_agent"):
        assert agent.parent is None
        assert [link.context.span_id for link in agent.links] == [whole.get_span_context().span_id]


def text_of(seen: Sequence[ReadableSpan]) -> str:
    return " ".join(span.to_json() for span in seen)


def check_no_content(seen: Sequence[ReadableSpan]) -> None:
    """Neither prompts nor answers nor what tools got, gave or raised stands on a span by default."""
    text = text_of(seen)
    for content in ("secret", "Price of item", "Good?"):
        assert content not in text
    assert not {name for span in seen for name in attributes(span)} & set(names.CONTENT)


def test_content_stands_on_spans_where_it_is_asked_for(
    new_project: Any, command: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By OpenTelemetry's own variable: messages, and what tools got, gave and raised."""
    monkeypatch.setenv(names.CAPTURE_CONTENT_VARIABLE, "true")
    project = new_project(TOOLED, decorated="")
    assert command("eval", "graph.py").code == 0
    seen = spans.get_finished_spans()
    assert children(seen, *named(seen, "agenttrain.evaluation")) == ["agenttrain.eval"]
    for span in named(seen, "chat policy"):
        user, assistant, *tools = json.loads(attributes(span)["gen_ai.input.messages"])
        assert user["parts"][0]["content"].startswith("Price of item")
        assert [part["arguments"] for part in assistant["parts"]] == [{"item": "lamp"}, {"item": "gone"}]
        assert tools[0]["parts"][0]["response"] == "secret price of lamp"
        (said,) = json.loads(attributes(span)["gen_ai.output.messages"])
        assert said["finish_reason"] in ("stop", "length")
    (some, *_) = named(seen, "chat FakeListChatModel")
    assert json.loads(attributes(some)["gen_ai.input.messages"])[0]["parts"][0]["content"] == "Good?"
    results = {attributes(span).get("gen_ai.tool.call.result") for span in named(seen, "execute_tool")}
    assert json.dumps("secret price of lamp") in results
    assert '{"item": "lamp"}' in {
        attributes(span)["gen_ai.tool.call.arguments"] for span in named(seen, "execute_tool")
    }
    assert "secret stock of gone" in text_of(seen)
    assert len(project.store.rollouts()) == 3


ELSEWHERE = (
    {
        ("agenttrain.generate", name)
        for name in (*names.SPANS["agenttrain.generate"].always, *names.SPANS["agenttrain.generate"].sometimes)
    }
    | {(kind, names.ERROR_TYPE) for kind, known in names.SPANS.items() if names.ERROR_TYPE in known.sometimes}
    | {("chat", name) for name in (names.EXTENDS, names.MISSED, names.RESPELLED)}
    | {("chat", name) for name in (names.RUN_ID, names.CANARY, names.CONVERSATION_ID)}  # where a policy serves
    | {("invoke_agent", name) for name in (names.SANDBOX, names.UNENFORCED, names.TAMPERING)}
)
"""What these runs don't emit: the engine's process has a test below, failures and the rest in their parts' tests."""


def test_every_name_is_written_down_and_every_written_name_is_emitted(
    new_project: Any,
    command: Any,
    spans: InMemorySpanExporter,
    meter: InMemoryMetricReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`telemetry.names` is the list: a name that is emitted and not in it fails here, and so does one that is not."""
    monkeypatch.setenv(names.CAPTURE_CONTENT_VARIABLE, "true")
    new_project(TOOLED, decorated="")
    assert command(*FIT).code == 0
    assert command("eval", "graph.py").code == 0
    emitted = {pair for span in spans.get_finished_spans() for pair in checked_names(span)}
    written = {(kind, name) for kind, known in names.SPANS.items() for name in (*known.always, *known.sometimes)}
    assert written - ELSEWHERE <= emitted <= written
    data = meter.get_metrics_data()
    assert data is not None
    counted = {each.name: each.unit for scope in data.resource_metrics[0].scope_metrics for each in scope.metrics}
    assert counted == {name: unit for name, (unit, _) in names.METRICS.items()}


def checked_names(span: ReadableSpan) -> list[tuple[str, str]]:
    """(kind, attribute) of one span; what has to be there is."""
    kind = span.name.partition(" ")[0]
    known, prefix = names.SPANS[kind], names.UPDATE_PREFIX
    mine = {f"{prefix}*" if name.startswith(prefix) else name for name in attributes(span)}
    assert set(known.always) <= mine, span.name
    assert {event.name for event in span.events} <= set(known.events), span.name
    assert {name for link in span.links for name in link.attributes or {}} <= set(names.LINKS.get(kind, ()))
    return [(kind, name) for name in mine]


def test_rollouts_rebuilt_in_another_process_are_linked_to_the_run(
    project: Any, policy_folder: Path, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """By the context in their picklable description."""
    config = Config.model_validate({"renderer": {"family": "default"}, "limits": {"tokens": 8}})
    with telemetry.run_span("fit", run_id="desk-1", graph="desk"):
        spec = RolloutSpec(
            graph_file=project.graph,
            attribute=None,
            config=json.loads(config.model_dump_json()),
            run_dir=str(tmp_path),
            model=str(policy_folder),
            trace_context=telemetry.trace_context(),
        )
    store, engine = SqliteStore(tmp_path), LocalEngine(policy_folder)
    task = Task(id="t", input={"messages": [{"role": "user", "content": "Price?"}]})
    with open_runner_of(pickle.loads(pickle.dumps(spec)), store=store) as runner:
        runner.run(RolloutRequest(task=task, phase="train", step=1), engine)
    engine.close()
    store.close()
    seen = spans.get_finished_spans()
    (whole,), (agent,) = named(seen, "agenttrain.fit"), named(seen, "invoke_agent")
    assert [link.context.span_id for link in agent.links] == [whole.context.span_id]
    assert agent.parent is None


@pytest.mark.slow
def test_the_console_exporter_leaves_standard_output_alone(project: Any) -> None:
    """Spans and metrics go to standard error, and standard output stays one JSON object."""
    command = [sys.executable, "-m", "agenttrain", "eval", "graph.py", "--json"]
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "console"}
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == 3
    for name in (
        '"name": "invoke_agent graph.py:graph"',
        '"name": "chat policy"',
        '"name": "gen_ai.client.token.usage"',
    ):
        assert name in done.stderr
    assert f'"agenttrain.run.id": "{Path(project.run.path).name}"' in done.stderr


class Collector(ThreadingHTTPServer):
    """Keeps what is sent to it by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receives)
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    @property
    def spans(self) -> list[tuple[Any, dict[str, str]]]:
        """(span, attributes of its resource), in the order they came."""
        return [
            (span, {each.key: each.value.string_value for each in of.resource.attributes})
            for request in self.traces
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]


class _Receives(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_trace_runs_through_the_engines_process(new_project: Any, settings: str, collector: Collector) -> None:
    """The engine's process exports a child of each chat span, as the same run, to the same collector."""
    project = new_project(settings=settings.replace('process = "shared"', 'process = "own"'))
    where = f"http://127.0.0.1:{collector.server_address[1]}"
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": where}
    command = [sys.executable, "-m", "agenttrain", "eval", "graph.py"]
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chats = {span.span_id: span for span, _ in collector.spans if span.name == "chat policy"}
    generated = [span for span, _ in collector.spans if span.name == "agenttrain.generate"]
    assert len(generated) == len(chats) == 3
    known = names.SPANS["agenttrain.generate"]
    for span in generated:
        assert span.trace_id == chats[span.parent_span_id].trace_id
        told = {each.key for each in span.attributes}
        assert told == {*known.always, *known.sometimes} - {names.ERROR_TYPE}
    assert {resource[names.RUN_ID] for _, resource in collector.spans} == {project.run.id}
    assert collector.metrics
