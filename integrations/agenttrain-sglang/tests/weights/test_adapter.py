"""An adapter alone in the real server: its answers are those of the merged model."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agenttrain.config import TrainerTable
from agenttrain.local import policy
from agenttrain.local.adapter import Adapter
from agenttrain.protocols import AdapterWeights

from agenttrain_sglang.weights import (
    ServerSpoiled,
    Tags,
    WeightsRefused,
    drop_adapter,
    push,
    push_adapter,
    shapes_of,
)

pytestmark = pytest.mark.sglang
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def shaken(adapter: Adapter) -> AdapterWeights:
    with torch.no_grad():
        for matrix in adapter.parameters:
            matrix.add_(0.3 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(matrix.numel())))
    return adapter.adapter_weights()


@pytest.fixture(scope="module")
def adapted(own_server: Callable[..., Any]) -> Any:
    """A server that takes adapters; the last test freezes it."""
    return own_server(adapter_rank=4, adapter_targets=TARGETS)


def test_calls_are_answered_by_the_adapter_that_they_name(adapted: Any, small_folder: Path, trained: Any) -> None:
    """The base stays; a name may be loaded again; one that is gone, or would not fit, is refused and harms nothing."""
    address = adapted.address
    base = policy.load_model(small_folder, device=torch.device("cpu"))
    adapter = Adapter(small_folder, base, settings=TrainerTable(adapter="lora", lora_rank=4), seed=1)
    tags, shapes = Tags(), shapes_of(small_folder)
    for number in (1, 2):
        pushed = push_adapter(address, shaken(adapter), tags.of(number), timeout_s=30, shapes=shapes)
        trained.model = adapter.model
        gap, told = trained.gap(address, adapter=tags.of(number))
        assert gap < 1e-4
        assert told["cached_tokens"] == 0
        assert (pushed.pause_s, pushed.n_compared) == (0.0, len(adapter.adapter_weights().tensors))
    assert trained.gap(address, adapter=tags.of(1))[0] > 1e-3
    assert trained.gap(address)[0] > 1e-3

    push_adapter(address, shaken(adapter), tags.of(2), timeout_s=30, shapes=shapes)
    gap, told = trained.gap(address, adapter=tags.of(2))
    assert gap < 1e-4
    assert told["cached_tokens"] == 0

    drop_adapter(address, tags.of(1), timeout_s=30)
    with pytest.raises(urllib.error.HTTPError):
        trained.gap(address, adapter=tags.of(1))
    with pytest.raises(WeightsRefused, match="does not exist"):
        drop_adapter(address, tags.of(1), timeout_s=30)

    alone = adapter.adapter_weights()
    wider = AdapterWeights(config={**alone.config, "r": 64}, tensors=alone.tensors)
    with pytest.raises(WeightsRefused, match="--max-lora-rank"):
        push_adapter(address, wider, tags.of(3), timeout_s=30)
    other = AdapterWeights(config=alone.config, tensors={name: torch.ones(3, 3) for name in alone.tensors})
    with pytest.raises(WeightsRefused, match="Adapt the model that the server was started with"):
        push_adapter(address, other, tags.of(3), timeout_s=30, shapes=shapes)
    assert trained.gap(address, adapter=tags.of(2))[0] < 1e-4


def test_a_server_that_freezes_in_mid_push_is_given_up_on(adapted: Any, trained: Any, linked: Any) -> None:
    """When its time is over, in the middle of a broadcast; nothing is left waiting."""
    link = linked(adapted.address, "group", timeout_s=3.0)
    norms = [(name, tensor) for name, tensor in trained.shake().items() if name.endswith("norm.weight")]

    def freezing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from norms[:2]
        for process in psutil.Process(adapted.pid).children(recursive=True):
            process.suspend()
        yield from norms[2:]

    outcome = push([link], freezing(), Tags().of(1), bucket_mib=0.00001)[adapted.address]
    assert isinstance(outcome, ServerSpoiled)
    assert "not answered within 3 s" in str(outcome)
    assert not any(thread.name.startswith("agenttrain-weights") for thread in threading.enumerate())
