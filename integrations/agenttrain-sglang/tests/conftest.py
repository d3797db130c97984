"""One real SGLang server for all tests marked `sglang`, on a tiny model; made ready by `agenttrain sglang setup`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agenttrain.config import resolve
from agenttrain.protocols import EngineContext
from agenttrain.records import Generation, Sampling
from agenttrain.testing import tiny_model

from agenttrain_sglang.engine import SglangEngine
from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.launch import Launch, launch_of
from agenttrain_sglang.plan import plan_of
from agenttrain_sglang.published import weights_of
from agenttrain_sglang.server import ServerProcess, free_port
from agenttrain_sglang.settings import SglangTable

STARTS_IN_S = 180.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers, and the folder that it serves."""

    address: str
    model: Path
    process: ServerProcess


def small_launch(model: Path, *, port: int | None = None, **others: Any) -> Launch:
    """A small server on a free port, with seeds and metrics; `others` as launch_of takes them."""
    settings = SglangTable(max_running=32, cache_tokens=16384)
    return launch_of(
        settings, find_environment(settings), model, port=port or free_port(), deterministic=True, **others
    )


def wait_until_healthy(process: ServerProcess) -> None:
    end = time.monotonic() + STARTS_IN_S
    while True:
        try:
            with urllib.request.urlopen(f"{process.address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        assert process.has_ended() is None, process.has_ended()
        assert time.monotonic() < end, f"no answer in {STARTS_IN_S} s; see {process.log}"
        time.sleep(0.25)


@pytest.fixture(scope="session")
def launch_small() -> Callable[..., Launch]:
    """small_launch, for tests that start servers of their own."""
    return small_launch


@pytest.fixture(scope="session")
def until_healthy() -> Callable[[ServerProcess], None]:
    """wait_until_healthy, for tests that start servers of their own."""
    return wait_until_healthy


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 of 10,000 parameters."""
    return tiny_model(tmp_path_factory.mktemp("sglang-model") / "model")


@pytest.fixture(scope="session")
def server(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The shared server. Its weights may be other ones than the folder's after a test that has changed them."""
    process = ServerProcess(small_launch(small_folder), log=tmp_path_factory.mktemp("sglang-server") / "server.log")
    try:
        wait_until_healthy(process)
        yield RunningServer(process.address, small_folder, process)
    finally:
        process.kill()


ODD = Path(__file__).with_name("odd_sglang.py")


class Odd:
    """An environment whose servers are tests/odd_sglang.py, and engines over it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.engines = folder, model, list[SglangEngine]()
        self.others = list[ServerProcess]()
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {ODD} {folder} "$@"\n')
        (folder / "bin" / "python").chmod(0o755)
        mark = {"ready": True, "device": "cpu", "sglang": "0.5.23", "made_by": sys.executable}
        (folder / "agenttrain-sglang.json").write_text(json.dumps(mark))
        self.does()

    def does(self, **how: Any) -> None:
        """What all its servers do from now on."""
        part = self.folder / "how.json.part"
        part.write_text(json.dumps(how))
        part.replace(self.folder / "how.json")

    def engine(self, *, trainer: Mapping[str, Any] | None = None, **table: Any) -> SglangEngine:
        """An engine; closed after the test."""
        settings = {"environment": str(self.folder), "transport": "tensor", "silence_s": 1.0, "start_s": 30.0, **table}
        config = resolve(("the test", {"sglang": settings, "trainer": dict(trainer or {})}))
        self.engines.append(SglangEngine(plan_of(EngineContext(config=config, model=str(self.model)))))
        return self.engines[-1]

    def other(self, port: int | None = None) -> ServerProcess:
        """A server that no engine has started; ended after the test."""
        port = port or free_port()
        command = (str(self.folder / "bin" / "python"), "--model-path", str(self.model), "--port", str(port))
        launch = Launch(command=command, variables=dict(os.environ), port=port, device="cpu", n_gpus=0)
        self.others.append(ServerProcess(launch, log=self.folder / "other.log"))
        self.until(self.others[-1].listens)
        return self.others[-1]

    def close(self) -> None:
        self.does()
        for engine in self.engines:
            engine.close()
        for process in self.others:
            process.kill()

    @staticmethod
    def until(condition: Callable[[], Any], *, within_s: float = 60.0) -> None:
        """Wait."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.01)

    def ask(self, engine: SglangEngine, n: int = 6, *, seed: int = 1, session: str = "s") -> Future[Generation]:
        sampling = Sampling(temperature=1.0, max_tokens=n, seed=seed, stop_ids=())
        return engine.generate((5, 9, 13, 17), sampling, session=session)

    def pid_of(self, engine: SglangEngine, replica: int = 0) -> int:
        """Of the server that is there, and the number of its group."""
        server = engine.replicas[replica].server
        assert server is not None
        assert isinstance(server.process, ServerProcess)
        return server.process.pid

    def end(self, engine: SglangEngine, replica: int = 0, number: int = signal.SIGKILL) -> None:
        """A signal to all processes of a server."""
        os.killpg(self.pid_of(engine, replica), number)

    def new_weights(self) -> Iterator[tuple[str, Any]]:
        """Others than the model's."""
        return ((name, tensor * 1.1) for name, tensor in weights_of(self.model))

    def in_flight(self, engine: SglangEngine, n: int, replica: int = 0) -> bool:
        """Whether a server works on n calls."""
        server = engine.replicas[replica].server
        return server is not None and server.n_running == n


@pytest.fixture
def odd(tmp_path: Path, small_folder: Path) -> Iterator[Odd]:
    """An environment of servers that misbehave as they are told."""
    odd = Odd(tmp_path / "odd", small_folder)
    yield odd
    odd.close()
