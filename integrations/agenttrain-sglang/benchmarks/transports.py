"""Seconds, pause and ratios of every way that new weights take into a server, for a small and a larger model.

    python benchmarks/transports.py [--repeats 5]

Each server is started here, on a free port. Beside each way stands a plain file, written and loaded by the server with
no agenttrain between: what moving the same bytes costs on this machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import torch
from agenttrain.errors import EngineError
from agenttrain.local import policy
from agenttrain.local.learnable import unique_weights
from agenttrain.testing import tiny_model
from safetensors.torch import save_file

from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.launch import launch_of
from agenttrain_sglang.server import ServerProcess, free_port
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights import Pushed, Snapshot, Tags, choose, open_link, push

SIZES = {"small": {"hidden_size": 64, "layers": 2}, "larger": {"hidden_size": 1024, "layers": 3}}
WAYS = ("group", "tensor", "disk")


def asked(address: str, path: str, body: Any = None) -> Any:
    """What a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def started(folder: Path, log: Path) -> ServerProcess:
    """A server that answers."""
    settings = SglangTable(max_running=8, cache_tokens=4096)
    launch = launch_of(settings, find_environment(settings), folder, port=free_port(), deterministic=True)
    process = ServerProcess(launch, log=log)
    while process.has_ended() is None:
        try:
            asked(process.address, "/model_info")
            return process
        except OSError:
            time.sleep(0.5)
    raise SystemExit(process.has_ended())


def plain_file(address: str, weights: dict[str, torch.Tensor], folder: Path) -> float:
    """Seconds of one file, written and loaded."""
    began = time.perf_counter()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    asked(address, "/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
    return time.perf_counter() - began


def pushes(way: str, address: str, weights: dict[str, torch.Tensor], folder: Path, repeats: int) -> list[Pushed]:
    """Pushes of one way; the first one, which may open a group, is not among them."""
    settings = SglangTable(transport=way)  # type: ignore[arg-type]
    choice = choose(settings, asked(address, "/server_info"), address=address)
    link, tags = open_link(choice, address=address, timeout_s=300), Tags()
    snapshot = Snapshot(folder / way) if way == "disk" else None
    outcomes: list[Pushed] = []
    for number in range(repeats + 1):
        outcome = push(
            [link],
            weights.items(),
            tags.of(number),
            bucket_mib=settings.bucket_mib,
            dtype=choice.dtype,
            snapshot=snapshot,
        )[address]
        if isinstance(outcome, EngineError):
            raise outcome
        outcomes.append(outcome)
    link.close()
    return outcomes[1:]


def main() -> None:
    """Print one table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    repeats = arguments.parse_args().repeats
    print("model    MiB      way         seconds (least, median, most)   pause   of a plain file   compared")
    with tempfile.TemporaryDirectory() as scratch:
        for size, shape in SIZES.items():
            measure(size, shape, Path(scratch) / size, repeats)


def measure(size: str, shape: dict[str, int], scratch: Path, repeats: int) -> None:
    """The lines of one model."""
    folder = tiny_model(scratch / "model", **shape)
    weights = unique_weights(policy.load_model(folder, device=torch.device("cpu")))
    mib = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    process = started(folder, scratch / "server.log")
    try:
        (scratch / "plain").mkdir()
        plain = [plain_file(process.address, weights, scratch / "plain") for _ in range(repeats)]
        print(line(size, mib, "plain file", plain))
        for way in WAYS:
            outcomes = pushes(way, process.address, weights, scratch, repeats)
            seconds, pause_s = [each.seconds for each in outcomes], median(each.pause_s for each in outcomes)
            rest = f"   {pause_s:5.3f}   {median(seconds) / median(plain):15.2f}   {outcomes[0].n_compared:8d}"
            print(line(size, mib, way, seconds) + rest)
    finally:
        process.kill()


def line(size: str, mib: float, way: str, seconds: list[float]) -> str:
    """The front of a line."""
    spread = "  ".join(f"{value:6.3f}" for value in (min(seconds), median(seconds), max(seconds)))
    return f"{size:7}  {mib:7.1f}  {way:10}  {spread:29}"


if __name__ == "__main__":
    main()
