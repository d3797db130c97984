"""What a model's files say that weights look like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agenttrain.local import policy
from agenttrain.local.learnable import unique_weights
from agenttrain.testing import tiny_model

from agenttrain_sglang.weights import WeightsRefused, shapes_of
from agenttrain_sglang.weights.buckets import in_buckets


@pytest.mark.parametrize("experts", [None, 4])
def test_all_that_a_trainer_publishes_fits_its_own_model(experts: int | None, tmp_path: Path) -> None:
    """Mixtures too, whose experts are named otherwise in memory than in files."""
    folder = tiny_model(tmp_path / "model", experts=experts)
    shapes = shapes_of(folder)
    assert shapes is not None
    weights = unique_weights(policy.load_model(folder, device=torch.device("cpu")))
    for bucket in in_buckets(weights.items(), n_bytes=4096):
        shapes.check(bucket)


def test_files_that_can_not_be_read_from_here_say_nothing(tmp_path: Path) -> None:
    """A name on a hub, or a folder of another machine."""
    assert shapes_of("Qwen/Qwen3-0.6B") is None
    assert shapes_of(tmp_path) is None


def test_an_adapter_fits_beside_its_layers(tmp_path: Path) -> None:
    """A is [rank, in] and B is [out, rank]; anything else is named."""
    shapes = shapes_of(tiny_model(tmp_path / "model", hidden_size=16))
    assert shapes is not None
    front = "base_model.model.model.layers.0.self_attn.o_proj"
    shapes.check_adapter({f"{front}.lora_A.weight": torch.ones(2, 16), f"{front}.lora_B.weight": torch.ones(16, 2)}, 2)
    with pytest.raises(WeightsRefused, match=r"lora_A.weight' has shape \[3, 16\], and \[2, 16\] fits beside"):
        shapes.check_adapter({f"{front}.lora_A.weight": torch.ones(3, 16)}, 2)
    with pytest.raises(WeightsRefused, match="has no such layer"):
        shapes.check_adapter({"base_model.model.model.layers.7.mlp.up_proj.lora_B.weight": torch.ones(1, 2)}, 2)
