"""Real servers that are killed, stopped or stand behind an odd proxy: everything is answered, counted and goes on.

Each test leaves the engine with a server that answers. What takes many servers is in test_replica.py,
test_published.py and test_fleet.py, over small ones.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agenttrain.config import resolve
from agenttrain.local import policy
from agenttrain.protocols import AdapterWeights, EngineContext
from agenttrain.records import Generation, Sampling
from agenttrain.testing import tiny_model
from agenttrain.testing.toy import ToyRun, toy_project

from agenttrain_sglang.engine import SglangEngine
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.plan import plan_of
from agenttrain_sglang.published import weights_of
from agenttrain_sglang.server import ServerProcess

pytestmark = pytest.mark.sglang

PROMPT = (5, 9, 13, 17)
SMALL = {"cache_tokens": 16384, "max_running": 32, "start_s": 180.0, "restarts": 30}
SILENCE_S = 4.0


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights travel in several buckets of 1 MiB."""
    return tiny_model(tmp_path_factory.mktemp("wide") / "model", hidden_size=192)


@pytest.fixture(scope="module")
def engine(wide_folder: Path) -> Iterator[SglangEngine]:
    """Over a server of its own, which the tests take from it."""
    table = {**SMALL, "silence_s": SILENCE_S, "bucket_mib": 1}
    config = resolve(("the test", {"sglang": table}))
    engine = SglangEngine(plan_of(EngineContext(config=config, model=str(wide_folder))))
    yield engine
    engine.close()


def ask(engine: SglangEngine, n: int, *, seed: int = 1, session: str = "s", **how: Any) -> Future[Generation]:
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": n, "seed": seed, "stop_ids": (), **how})
    return engine.generate(PROMPT, sampling, session=session)


def greedy(engine: SglangEngine) -> Generation:
    return ask(engine, 6, temperature=0.0).result(120)


def shaken(folder: Path, factor: float) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor * factor) for name, tensor in weights_of(folder))


def server_of(engine: SglangEngine) -> Server:
    server = engine.replicas[0].server
    assert server is not None
    return server


def process_of(engine: SglangEngine) -> ServerProcess:
    process = server_of(engine).process
    assert isinstance(process, ServerProcess)
    return process


def scheduler_of(engine: SglangEngine) -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process(process_of(engine).pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    ]
    return found


def until(condition: Callable[[], Any], *, within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def begun(engine: SglangEngine, n: int, n_ids: int) -> list[Future[Generation]]:
    """Calls that a server works on."""
    asked = [ask(engine, n_ids, seed=i, session=f"s{i}") for i in range(n)]
    until(lambda: server_of(engine).n_running == n)
    return asked


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_killed_in_mid_generation(engine: SglangEngine, wide_folder: Path) -> None:
    """32 calls in flight: one replacement, with the weights of now, answers all of them."""
    engine.update_weights(shaken(wide_folder, 1.05), 3)
    before = greedy(engine)
    engine.news()
    stats = engine.stats()
    asked = begun(engine, 32, 200)
    left = process_of(engine)
    os.killpg(left.pid, signal.SIGKILL)
    answers = [future.result(180) for future in asked]
    assert [(len(each.token_ids), set(each.weight_versions)) for each in answers] == [(200, {3})] * 32
    after = greedy(engine)
    assert (after.token_ids, set(after.weight_versions)) == (before.token_ids, {3})
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
    (news,) = engine.news()
    assert "takes the place of one that was gone (it was ended by SIGKILL" in news
    now = {name: value - stats[name] for name, value in engine.stats().items()}
    assert (now["restarts"], now["asked_again"], now["sampled_ids"]) == (1, 32, 6406)
    assert now["server_sampled_ids"] >= now["sampled_ids"]
    assert not psutil.pid_exists(left.pid)


def test_killed_in_mid_push(engine: SglangEngine, wide_folder: Path) -> None:
    """After the first of several buckets; what the next server gets is whole."""
    engine.update_weights(shaken(wide_folder, 1.2), 5)
    expected = greedy(engine)
    weights = list(shaken(wide_folder, 1.2))

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:-1]
        os.killpg(process_of(engine).pid, signal.SIGKILL)
        yield weights[-1]

    engine.update_weights(dying(), 6)
    after = greedy(engine)
    assert (after.token_ids, set(after.weight_versions)) == (expected.token_ids, {6})
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.long
def test_a_scheduler_that_is_killed_alone(engine: SglangEngine) -> None:
    """The server's other processes don't outlive it for long, and its calls are asked again."""
    n, version = engine.stats()["restarts"], engine.weight_version
    asked = begun(engine, 4, 200)
    scheduler_of(engine).kill()
    assert [set(future.result(180).weight_versions) for future in asked] == [{version}] * 4
    assert engine.stats()["restarts"] == n + 1


# ── silent, or only slow ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_scheduler_that_is_stopped_alone(engine: SglangEngine) -> None:
    """A hung server is found by its health check, which asks its scheduler too."""
    n, version = engine.stats()["restarts"], engine.weight_version
    engine.news()
    asked = begun(engine, 4, 200)
    scheduler_of(engine).suspend()
    assert [set(future.result(180).weight_versions) for future in asked] == [{version}] * 4
    assert engine.stats()["restarts"] == n + 1
    assert f"left its health check unanswered for {SILENCE_S:g} s" in engine.news()[-1]


def test_a_server_that_is_paused_for_new_weights_is_not_taken_for_hung(engine: SglangEngine, wide_folder: Path) -> None:
    """They take longer to arrive than a health check may, with calls in flight."""
    n = engine.stats()["restarts"]
    asked = begun(engine, 4, 240)

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(shaken(wide_folder, 1.1)):
            yield pair
            if i == 12:
                time.sleep(1.5 * SILENCE_S)

    engine.update_weights(slow(), 9)
    assert [len(future.result(60).token_ids) for future in asked] == [240] * 4
    assert set(greedy(engine).weight_versions) == {9}
    assert engine.stats()["restarts"] == n


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def adapter_engine(small_folder: Path) -> Iterator[SglangEngine]:
    """Over a server of its own that takes adapters of rank 4."""
    tables = {"sglang": SMALL, "trainer": {"adapter": "lora", "lora_rank": 4}}
    engine = SglangEngine(plan_of(EngineContext(config=resolve(("the test", tables)), model=str(small_folder))))
    yield engine
    engine.close()


def adapter_of(folder: Path, seed: int) -> AdapterWeights:
    """Random matrices beside every linear layer."""
    from agenttrain.local.adapter import Adapter

    config = resolve(("the test", {"trainer": {"adapter": "lora", "lora_rank": 4}}))
    learned = Adapter(folder, policy.load_model(folder, device=torch.device("cpu")), settings=config.trainer, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learned.parameters:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return learned.adapter_weights()


def test_adapters_come_one_after_the_other_and_a_replaced_server_has_the_last(
    adapter_engine: SglangEngine, small_folder: Path
) -> None:
    """More than fit at once; calls in flight end with the one that they began with."""
    engine = adapter_engine
    assert engine.takes_adapters
    seen = [greedy(engine)]
    for version in range(1, 4):
        asked = begun(engine, 2, 200)
        engine.update_adapter(adapter_of(small_folder, version), version)
        assert {v for future in asked for v in future.result(60).weight_versions} == {version - 1}
        seen.append(greedy(engine))
    assert [set(each.weight_versions) for each in seen] == [{0}, {1}, {2}, {3}]
    assert len({each.logprobs for each in seen}) == 4
    asked = begun(engine, 4, 200)
    os.killpg(process_of(engine).pid, signal.SIGKILL)
    assert {v for future in asked for v in future.result(180).weight_versions} == {3}
    after = greedy(engine)
    assert after.token_ids == seen[-1].token_ids
    assert after.logprobs == pytest.approx(seen[-1].logprobs, abs=1e-5)


def fitted(folder: Path, address: str, **tables: Any) -> ToyRun:
    """A small run over a server that is there."""
    project = toy_project(folder)
    sglang = {"servers": [address], **tables.pop("sglang", {})}
    trainer = {"steps": 2, "tasks_per_step": 2, "group_size": 4, **tables.pop("trainer", {})}
    return project.fit(engine={"name": "sglang"}, sglang=sglang, trainer=trainer, **tables)


def versions_of(run: ToyRun) -> set[int]:
    """Of the weights that its tokens were sampled from."""
    turns = [turn for rollout in run.store.rollouts() for turn in run.store.turns(rollout.id)]
    return {version for turn in turns for version in turn.weight_versions}


def check_counts(run: ToyRun) -> None:
    tokens = run.report["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert sum(tokens["dropped_by_cause"].values()) == tokens["dropped"]
    assert tokens["drifted"] == 0
    assert tokens["trained"] > 0


def test_a_run_publishes_its_adapter_alone(adapter_engine: SglangEngine, tmp_path: Path) -> None:
    """To a server of somebody else's; what it samples is what the trainer holds."""
    address = process_of(adapter_engine).address
    run = fitted(tmp_path, address, trainer={"adapter": "lora", "lora_rank": 4, "steps": 3})
    check_counts(run)
    assert run.report["logprob_gap"]["max"] <= 1e-4
    assert any("the adapter alone travels" in alarm["message"] for alarm in run.report["alarms"])
    assert versions_of(run) == {0, 1, 2, 3}


@pytest.mark.long
def test_a_run_publishes_merged_weights(server: Any, tmp_path: Path) -> None:
    """Where the server takes no adapters."""
    settings = {"adapter": "lora", "lora_rank": 4, "steps": 3}
    run = fitted(tmp_path, server.address, trainer=settings, sglang={"adapters": False})
    check_counts(run)
    assert run.report["logprob_gap"]["max"] <= 1e-4
    assert versions_of(run) == {0, 1, 2, 3}


# ── an odd proxy in front of a good server ───────────────────────────────────────────────────────────────────────────


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "meta_info": {**answer["meta_info"], "output_token_logprobs": None}}


def one_too_few(answer: dict[str, Any]) -> dict[str, Any]:
    told = answer["meta_info"]["output_token_logprobs"]
    return {**answer, "meta_info": {**answer["meta_info"], "output_token_logprobs": told[:-1]}}


def nothing_sampled(answer: dict[str, Any]) -> dict[str, Any]:
    told = {"output_token_logprobs": [], "weight_versions": None, "completion_tokens": 0}
    return {**answer, "output_ids": [], "meta_info": {**answer["meta_info"], **told}}


ODDITIES: dict[str, Any] = {
    "HTTP 500": (500, {"detail": "broken"}),
    "HTTP 400: Duplicate request ID": (400, {"error": {"message": "Duplicate request ID"}}),
    "ids without log probabilities": without_logprobs,
    "log probabilities for": one_too_few,
    "with no ids, though": nothing_sampled,
}


class OddProxy:
    """Passes on what is asked; the answers of every third call are odd, in turn."""

    def __init__(self, address: str) -> None:
        self.n_calls = self.n_odd = 0
        proxy, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
                request = urllib.request.Request(address + self.path, body, {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=120) as answer:
                        status, content = answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    status, content = error.code, error.read()
                if self.path == "/generate":
                    with lock:
                        proxy.n_calls += 1
                        if proxy.n_calls % 3 == 0:
                            status, content = proxy.oddly(json.loads(content))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def oddly(self, answer: dict[str, Any]) -> tuple[int, bytes]:
        odd = list(ODDITIES.values())[self.n_odd % len(ODDITIES)]
        self.n_odd += 1
        status, content = odd if isinstance(odd, tuple) else (200, odd(answer))
        return status, json.dumps(content).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def test_a_whole_run_behind_an_odd_proxy(server: Any, tmp_path: Path) -> None:
    """What can't be trained is an environment failure with its reason, is made again, and the counts hold."""
    proxy = OddProxy(server.address)
    try:
        run = fitted(tmp_path, proxy.address)
    finally:
        proxy.close()
    check_counts(run)
    assert proxy.n_odd >= len(ODDITIES)
    rollouts = list(run.store.rollouts())
    causes = [each.cause for each in rollouts if each.status == "environment_failure"]
    assert len(causes) == proxy.n_odd
    for words in ODDITIES:
        assert any(words in (cause or "") for cause in causes), (words, causes)
    assert run.report["logprob_gap"]["max"] <= 1e-4
