"""A model whose weights can be changed, what a server makes of them, and servers that a test may kill."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.local import policy
from agenttrain.local.learnable import unique_weights

from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.launch import launch_of
from agenttrain_sglang.server import ServerProcess, free_port
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights import Link, choose, open_link

PROMPT = list(range(5, 60))


def asked(address: str, path: str, body: Any = None) -> Any:
    """What a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Policy:
    """The model that a test trains by shaking it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, policy.load_model(folder, device=torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(1)

    def shake(self) -> dict[str, torch.Tensor]:
        """Other weights in the same tensors."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=self._generator))
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return unique_weights(self.model)

    def gap(self, address: str, *, adapter: str | None = None, temperature: float = 1.0) -> tuple[float, Any]:
        """The largest difference between a server's log probabilities and this model's, and what it tells beside."""
        sampling = {"max_new_tokens": 8, "temperature": temperature, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "lora_path": adapter}
        answer = asked(address, "/generate", body)
        ids = answer["output_ids"]
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        theirs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        return (own - theirs).abs().max().item(), answer["meta_info"]


@pytest.fixture
def ask() -> Callable[..., Any]:
    """(address, path, body) to what that server answers."""
    return asked


@pytest.fixture
def trained(small_folder: Path) -> Policy:
    return Policy(small_folder)


@pytest.fixture
def linked(small_folder: Path) -> Iterator[Callable[..., Link]]:
    """Links to servers, by a transport of choice; closed afterwards."""
    links: list[Link] = []

    def make(address: str, transport: str = "auto", *, timeout_s: float = 30.0) -> Link:
        settings = SglangTable(transport=transport)  # type: ignore[arg-type]
        choice = choose(settings, asked(address, "/server_info"), address=address)
        links.append(open_link(choice, address=address, timeout_s=timeout_s, model_folder=small_folder))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture(scope="module")
def own_server(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that only this file's tests know; ended afterwards."""
    processes: list[ServerProcess] = []
    logs = tmp_path_factory.mktemp("own-servers")

    def start(**how: Any) -> ServerProcess:
        settings = SglangTable(max_running=32, cache_tokens=16384)
        environment = find_environment(settings)
        launch = launch_of(settings, environment, small_folder, port=free_port(), deterministic=True, **how)
        processes.append(ServerProcess(launch, log=logs / f"{len(processes)}.log"))
        _wait(processes[-1])
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def _wait(process: ServerProcess) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        assert process.has_ended() is None, process.has_ended()
        try:
            asked(process.address, "/model_info")
            return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"no answer; see {process.log}")
