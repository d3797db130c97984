"""An adapter alone in the real server: its answers are those of the merged model."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.config import TrainerTable
from agenttrain.local import policy
from agenttrain.local.adapter import Adapter
from agenttrain.protocols import AdapterWeights

from agenttrain_sglang.weights import Tags, WeightsRefused, drop_adapter, push_adapter, shapes_of

pytestmark = pytest.mark.sglang
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def shaken(adapter: Adapter) -> AdapterWeights:
    with torch.no_grad():
        for matrix in adapter.parameters:
            matrix.add_(0.3 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(matrix.numel())))
    return adapter.adapter_weights()


def test_calls_are_answered_by_the_adapter_that_they_name(
    own_server: Callable[..., Any], small_folder: Path, trained: Any
) -> None:
    """The base stays; a name may be loaded again; one that is gone, or would not fit, is refused and harms nothing."""
    address = own_server(adapter_rank=4, adapter_targets=TARGETS).address
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
