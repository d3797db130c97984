"""Loading a folder, and logits at chosen positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agenttrain.errors import ModelError
from agenttrain.local.policy import Logits, load_model, max_length, read_weights, vocabulary_size

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "gemma2", "gemma3", "mamba"])
def test_logits_at_positions_are_the_models(
    architecture: str, model_folder: Callable[[str], Path], plain_model: Callable[[str], Any]
) -> None:
    """Also where the model caps its logits afterwards."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    model = load_model(model_folder(architecture), device=CPU)
    with torch.no_grad():
        picked = Logits(model).at(torch.tensor([1, 3, 4]), ids, use_cache=False)
        whole = plain_model(architecture)(ids).logits
        unpicked = model(ids).logits
    assert torch.allclose(picked, torch.stack([whole[0, 1], whole[0, 3], whole[1, 0]]), atol=1e-5)
    assert torch.allclose(unpicked, whole, atol=1e-5)


def test_what_is_read_from_a_model(model_folder: Callable[[str], Path]) -> None:
    model = load_model(model_folder("gpt2"), device=CPU)
    assert (max_length(model.config), vocabulary_size(model), model.dtype) == (256, 61, torch.float32)


def test_a_folder_that_transformers_can_not_load_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ModelError, match="can't load"):
        load_model(tmp_path, device=CPU)


def test_weights_of_another_shape_are_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        read_weights(tmp_path)
    with pytest.raises(ModelError, match="has not"):
        load_model(model_folder("qwen3"), device=CPU, weights_from=model_folder("gpt2"))
