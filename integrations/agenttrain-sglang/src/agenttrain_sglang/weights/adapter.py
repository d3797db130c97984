"""A LoRA adapter alone into running servers, under a name of its own for each version.

Nothing is paused and no cache is flushed: calls in flight finish with the adapter they began with, those that name the
new one are sampled with it, and the KV cache tells adapters apart. So the version of an answer is that of the adapter
that its call named, and the server's own weight version stays that of the base.

Source: SGLang 0.5.23, srt/managers/tp_worker.py (load_lora_adapter_from_tensors), lora/lora_config.py.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from agenttrain.protocols import AdapterWeights

from agenttrain_sglang import sglang_0_5_12
from agenttrain_sglang.weights.faults import ServerSpoiled, WeightsRefused
from agenttrain_sglang.weights.push import Pushed
from agenttrain_sglang.weights.server_http import Gone, Http, Refused
from agenttrain_sglang.weights.shapes import Shapes
from agenttrain_sglang.weights.tensor import encoded

WHY = "the adapter alone travels in the request's body; nothing is paused"
IGNORED = {"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none"}
"""Settings of peft that SGLang passes over, and the value with which that changes nothing."""


def push_adapter(
    address: str,
    adapter: AdapterWeights,
    name: str,
    *,
    timeout_s: float,
    n_ranks: int = 1,
    dtype: Any = None,
    shapes: Shapes | None = None,
    is_0_5_12: bool = False,
) -> Pushed:
    """Load an adapter; a call that names it from now on is sampled with it.

    Args:
        name: what calls ask for (`Tags.of`); one that the server has under it is unloaded first.
        n_ranks: the server's tensor-parallel size.
        dtype: what the matrices are cast to before they travel. None: as they are.
        shapes: the base model's; a matrix that doesn't fit beside them would end the server when it is first used.
        is_0_5_12: the server is of that version.

    Raises:
        WeightsRefused: the server takes no adapters, or not this one; it has what it had.
        ServerSpoiled: it is gone or silent.
    """
    began = time.perf_counter()
    _check_meaning(adapter.config)
    if shapes is not None:
        shapes.check_adapter(adapter.tensors, int(adapter.config["r"]))
    tensors = {n: t.detach().to("cpu", dtype=dtype or t.dtype).contiguous() for n, t in adapter.tensors.items()}
    body = {
        "lora_name": name,
        "config_dict": plain(adapter.config),
        "serialized_named_tensors": [encoded(tensors)] * n_ranks,
        "expected_checksums": {n: _sha256(t) for n, t in tensors.items()},
    }
    _load(Http(address, timeout_s=timeout_s), sglang_0_5_12.adapter_body(body) if is_0_5_12 else body, name)
    return Pushed(
        seconds=time.perf_counter() - began,
        pause_s=0.0,
        n_buckets=1,
        n_compared=len(tensors),
    )


def _load(http: Http, body: Mapping[str, Any], name: str) -> None:
    try:
        _ask(http, "/load_lora_adapter_from_tensors", body, f"The adapter {name}")
    except WeightsRefused as refusal:
        if "already loaded" not in str(refusal) and "incomplete unload" not in str(refusal):
            raise
        drop_adapter(http.address, name, timeout_s=http.timeout_s)
        _ask(http, "/load_lora_adapter_from_tensors", body, f"The adapter {name}")


def drop_adapter(address: str, name: str, *, timeout_s: float) -> None:
    """Unload an adapter; waits for the calls in flight that named it.

    Raises:
        WeightsRefused: the server has none of that name.
        ServerSpoiled: it is gone or silent, or calls in flight took longer.
    """
    http = Http(address, timeout_s=timeout_s)
    _ask(http, "/unload_lora_adapter", {"lora_name": name}, f"The end of adapter {name}")


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """peft's configuration as JSON takes it: enumerations as their values, sets as sorted lists."""
    return {key: _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _check_meaning(config: Mapping[str, Any]) -> None:
    for key, harmless in IGNORED.items():
        value = config.get(key, harmless)
        if value != harmless:
            raise WeightsRefused(
                f"The adapter has {key} = {value!r}, which SGLang passes over: it would sample from another policy. "
                f"Train with {key} = {harmless!r}, or send merged weights: sglang.adapters = false."
            )


def _ask(http: Http, path: str, body: Mapping[str, Any], what: str) -> None:
    try:
        http.post(path, body)
    except Refused as refusal:
        raise WeightsRefused(
            f"{what} was refused by the server at {http.address}: {refusal}. Start the server with --enable-lora, "
            "--max-lora-rank and --lora-target-modules that fit it, or send merged weights: sglang.adapters = false."
        ) from refusal
    except Gone as fault:
        raise ServerSpoiled(
            f"{what} did not get to the server at {http.address}: {fault}. It is gone or hangs: start it again."
        ) from fault


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()
