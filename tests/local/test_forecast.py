"""What a run of the local trainer will need: sizes by hand, and what each setting changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agenttrain.config import Config
from agenttrain.errors import ConfigError, ModelError
from agenttrain.local.adapter import open_learnable
from agenttrain.local.forecast import forecast, shape_of
from agenttrain.protocols import ForecastContext
from agenttrain.testing import tiny_model

Folder = Callable[[str], Path]
ARCHITECTURES = ["qwen3", "llama", "gpt2", "gemma2", "mamba"]


def parts(folder: Path, n_rollouts: int = 4, **tables: Any) -> dict[str, int]:
    found = forecast(ForecastContext(config=Config(**tables), model=str(folder), n_rollouts=n_rollouts))
    return {f"{part.process} {part.name}": part.n_bytes for part in found.parts}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes_are_those_of_the_loaded_model(architecture: str, adapter: str, model_folder: Folder) -> None:
    """Known without its weights: parameters, those trained and those published."""
    config = Config(trainer={"adapter": adapter})  # type: ignore[arg-type]
    shape = shape_of(model_folder(architecture), config=config)
    loaded = open_learnable(model_folder(architecture), device=torch.device("cpu"), config=config)
    assert (shape.n_parameters, shape.n_trained) == (loaded.n_parameters, loaded.n_trained_parameters)
    assert shape.n_published == sum(tensor.numel() for tensor in dict(loaded.published()).values())
    assert shape.is_adapter is (adapter == "lora")


def test_no_weights_are_needed(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert parts(folder)["trainer weights"] > 0


def test_the_parts_by_hand(tmp_path: Path) -> None:
    """Vocabulary 320, 16 wide, 2 layers of 4 heads of 4, 2 of them for keys, and 32 wide inside."""
    folder = tiny_model(tmp_path / "model")
    n_workers = min(8, len(os.sched_getaffinity(0)))
    n = shape_of(folder, config=Config()).n_parameters
    found = parts(
        folder,
        trainer={"micro_batch_tokens": 100, "kl_coefficient": 0.1},
        limits={"tokens": 50},
    )
    outputs = 2 * (16 + 8 + 8 + 16 + 32 + 32 + 16)
    assert found["trainer weights"] == found["engine weights"] == found["trainer reference"] == 4 * n
    assert found["trainer gradients"] == 4 * n * (n_workers + 1)
    assert (found["trainer optimizer"], found["trainer undo"]) == (8 * n, 12 * n)
    assert found["trainer activations"] == 4 * (2.5 * outputs + 3.5 * 0.5 * 320) * 100 * n_workers
    assert found["engine cache"] == 4 * (2 * 2 * 2 * 4) * 4 * 50 * 3 // 2
    assert found["engine sampling"] == 20 * 4 * 320


def test_an_adapter_needs_less(model_folder: Folder) -> None:
    """No gradient, moment or copy of the base, and no reference beside it."""
    full = parts(model_folder("qwen3"), trainer={"kl_coefficient": 0.1})
    lora = parts(model_folder("qwen3"), trainer={"kl_coefficient": 0.1, "adapter": "lora", "lora_rank": 1})
    smaller = {name for name in full if lora[name] < full[name]}
    gone = {"trainer reference", "trainer gradients", "trainer optimizer", "trainer undo", "engine arriving weights"}
    assert smaller == gone
    assert lora["trainer reference"] == 0


def test_few_rollouts_do_not_fill_a_micro_batch(model_folder: Folder) -> None:
    many = parts(model_folder("qwen3"), trainer={"tasks_per_step": 2, "group_size": 8})
    few = parts(model_folder("qwen3"), trainer={"tasks_per_step": 1, "group_size": 2})
    assert many["trainer activations"] == 8 * few["trainer activations"]


def test_an_engine_in_this_process_has_no_program_of_its_own(model_folder: Folder) -> None:
    own = parts(model_folder("qwen3"))
    shared = parts(model_folder("qwen3"), engine={"process": "shared"})
    assert set(own) - set(shared) == {"engine program"}
    assert not any(name.startswith("engine") for name in parts(model_folder("qwen3"), engine={"name": "sglang"}))


def test_checkpoints_of_an_adapter_are_small(model_folder: Folder) -> None:
    def disk(**trainer: Any) -> int:
        context = ForecastContext(
            config=Config(trainer=trainer),  # type: ignore[arg-type]
            model=str(model_folder("qwen3")),
            n_rollouts=1,
        )
        return forecast(context).disk_bytes

    shape = shape_of(model_folder("qwen3"), config=Config(trainer={"adapter": "lora", "lora_rank": 2}))  # type: ignore[arg-type]
    assert disk() == 12 * shape.n_parameters * 3 + 8 * shape.n_parameters
    assert disk(adapter="lora", lora_rank=2) == 12 * shape.n_trained * 3 + 8 * shape.n_parameters


def test_an_adapter_that_was_not_asked_for_is_told(model_folder: Folder) -> None:
    def notes(**trainer: Any) -> tuple[str, ...]:
        config = Config(trainer=trainer)  # type: ignore[arg-type]
        return forecast(ForecastContext(config=config, model=str(model_folder("qwen3")), n_rollouts=1)).notes

    (note,) = notes(adapter_above=1000)
    assert note.startswith(
        "The model has 5,680 parameters, more than trainer.adapter_above (1,000): a LoRA adapter of "
    )
    assert notes() == notes(adapter="lora") == ()


def test_a_folder_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ModelError, match="can't build a causal language model"):
        parts(tmp_path)


def test_layers_that_the_model_has_not_are_refused_before_it_is_loaded(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="lora_targets names 'query'"):
        parts(model_folder("llama"), trainer={"adapter": "lora", "lora_targets": ["query"]})
