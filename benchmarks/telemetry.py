"""What does telemetry cost? The same rollouts with nothing exported, with OTLP, and with content on the spans.

    python benchmarks/telemetry.py [--rollouts 128] [--rounds 3] [--repeats 5]

Each mode is a process of its own (a tracer provider is set once), started in turns; it rolls out held-out tasks of the
order desk as `agenttrain eval` does, with the engine in its process, once to warm up and then `--repeats` times. OTLP
goes to a server in this process that answers and keeps nothing. Prints one JSON object: by mode the seconds and the CPU
seconds of rollouts and engine together, the ratios of their medians, and the CPU microseconds that one model call's
span and metrics take without an SDK. On a machine that does other work too, only CPU seconds mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agenttrain.telemetry import names

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
MODES = ("off", "otlp", "content")
N_CALLS = 20_000


class Sink(BaseHTTPRequestHandler):
    """Answers and keeps nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def seconds_of(mode: str, rollouts: int, repeats: int) -> list[tuple[float, float]]:
    """(seconds, CPU seconds) of each repeat, in this process and its engine's."""
    from agenttrain import telemetry
    from agenttrain.evaluation import evaluation_requests, opened
    from agenttrain.exporters import exporting
    from agenttrain.prepare import prepare
    from agenttrain.protocols import EngineContext
    from agenttrain.run_folder import new_run

    job = prepare(str(EXAMPLE / "graph.py"), cwd=Path.cwd(), flags={"eval": {"tasks": rollouts}})
    seconds: list[tuple[float, float]] = []
    with exporting(None if mode == "off" else "otlp", "benchmark"), tempfile.TemporaryDirectory() as folder:
        engine = job.plugins.engine("local")(EngineContext(config=job.config, model=str(job.model)))
        run = new_run(Path(folder), "telemetry")
        with telemetry.run_span("evaluation", run_id=run.id, graph="desk"), opened(job, run) as (store, _, pool):
            for repeat in range(repeats + 1):
                began, worked = time.perf_counter(), time.process_time() + engine.stats()["cpu_s"]
                requests = evaluation_requests(job.held_out, "eval", 1, 0.0, 0)
                pool.run(engine, [_apart(request, repeat) for request in requests])
                store.flush()
                cpu_s = time.process_time() + engine.stats()["cpu_s"] - worked
                seconds.append((time.perf_counter() - began, cpu_s))
        engine.close()
    return seconds[1:]


def _apart(request: Any, repeat: int) -> Any:
    """The same rollout under another id, as the store asks."""
    from dataclasses import replace

    return replace(request, remake=repeat)


def microseconds_of_a_call() -> float:
    """One chat span, its attributes and metrics, where no SDK is set up."""
    from agenttrain import telemetry
    from agenttrain.capture.spans import CallSpans, around
    from agenttrain.protocols import Parsed
    from agenttrain.records import CallSite, ModelCall, Sampling, Turn

    spans = CallSpans(telemetry.tracer(), model="policy", rollout_id="r")
    call = ModelCall(messages=({"role": "user", "content": "hi"},))
    sampling = Sampling(temperature=1.0, max_tokens=8, seed=0, stop_ids=())
    turn = Turn(id="r#0", rollout_id="r", index=0, role="trained", role_reason="", site=CallSite())
    parsed = Parsed(text="", reasoning=None, tool_calls=(), invalid_tool_calls=())
    began = time.process_time()
    for _ in range(N_CALLS):
        span = spans.start(call, turn_id="r#0", sampling=sampling)
        with around(span):
            telemetry.is_recording()
        spans.end(span, turn, parsed, n_cached=0)
    return (time.process_time() - began) / N_CALLS * 1e6


def measured(mode: str, chosen: argparse.Namespace, endpoint: str) -> list[tuple[float, float]]:
    """The same in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    if mode == "content":
        environment[names.CAPTURE_CONTENT_VARIABLE] = "true"
    command = [sys.executable, __file__, "--mode", mode]
    command += ["--rollouts", str(chosen.rollouts), "--repeats", str(chosen.repeats)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [(wall, cpu) for wall, cpu in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rollouts", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--mode", choices=MODES, help="Measure this one here and print its seconds.")
    chosen = arguments.parse_args()
    if chosen.mode is not None:
        print(json.dumps(seconds_of(chosen.mode, chosen.rollouts, chosen.repeats)))
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(chosen.rounds):
            for mode in MODES:
                seconds[mode] += measured(mode, chosen, endpoint)
        server.shutdown()
    told: dict[str, Any] = {"rollouts": chosen.rollouts, "cpu_us_per_call_off": microseconds_of_a_call()}
    for i, what in enumerate(("seconds", "cpu_seconds")):
        medians = {mode: statistics.median(each[i] for each in seconds[mode]) for mode in MODES}
        told |= {f"{what}_ratio_{mode}_to_off": medians[mode] / medians["off"] for mode in MODES[1:]}
    print(json.dumps({**told, "seconds_and_cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
