"""One real SGLang server for all tests marked `sglang`, on a tiny model; made ready by `agenttrain sglang setup`."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agenttrain.testing import tiny_model

from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.launch import Launch, launch_of
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
