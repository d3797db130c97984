"""A server's spans join the trace of the rollout whose call it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agenttrain.testing import toy_project
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SETTINGS = """
[eval]
tasks = 2
[sglang]
max_running = 4
cache_tokens = 4096
"""


@dataclass(slots=True)
class Collector:
    """Takes OTLP over HTTP; keeps the spans, with the service that sent each."""

    address: str = ""
    spans: list[tuple[str, Any]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """On a free port, in this process."""
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                taken.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    taken.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield taken
    server.shutdown()
    server.server_close()


@pytest.mark.sglang
def test_a_servers_spans_are_in_the_rollouts_trace(collector: Collector, tmp_path: Path) -> None:
    """Of every call; their ancestors lead to the call's own span."""
    toy_project(tmp_path, settings=SETTINGS)
    command = [sys.executable, "-m", "agenttrain", "eval", "graph.py", "--run", "base", "--engine", "sglang"]
    variables = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "OTEL_METRICS_EXPORTER": "none"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ours = {span.span_id: span for service, span in collector.spans if service == "agenttrain"}
    theirs = {span.span_id: span for service, span in collector.spans if service != "agenttrain"}
    calls = [span for span in ours.values() if span.name.startswith("chat")]
    assert len(calls) == 2
    for call in calls:
        of_call = [span for span in theirs.values() if span.trace_id == call.trace_id]
        assert of_call, f"no span of a server in {call.trace_id.hex()}"
        assert any(span.parent_span_id == call.span_id for span in of_call)
        assert all(span.parent_span_id in {call.span_id, *(other.span_id for other in of_call)} for span in of_call)
