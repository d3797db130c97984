"""veRL's checkpoint as a Hugging Face folder: shards joined, adapters merged, nothing rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agenttrain.config import resolve
from agenttrain.errors import RunError
from agenttrain.testing.small_model import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agenttrain_verl.exporting import described, export_checkpoint, joined, read_shards
from agenttrain_verl.plan import plan_of


def test_what_a_rank_saved_is_what_is_exported(tmp_path: Path) -> None:
    """In float32, under the base's names, with its tokenizer."""
    base = tiny_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-6)  # bfloat16 would lose it
    actor = tmp_path / "actor"
    actor.mkdir()
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    plan = plan_of(resolve(("test", {"model": str(base), "trainer": {"name": "verl"}})), base, n_tasks=100)
    (tmp_path / "out").mkdir()
    export_checkpoint(actor, base=Path(base), folder=tmp_path / "out", plan=plan)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in exported.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_adapter_is_exported_merged_and_alone(tmp_path: Path) -> None:
    """W + alpha / rank · B · A under the base's names, and in adapter/ what peft reads."""
    base = tiny_model(tmp_path / "base")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    actor, out = tmp_path / "actor", tmp_path / "out"
    actor.mkdir()
    torch.save(adapted.state_dict(), actor / "model_world_size_1_rank_0.pt")
    tables = {"model": str(base), "trainer": {"name": "verl", "adapter": "lora", "lora_rank": 4, "lora_alpha": 12}}
    out.mkdir()
    export_checkpoint(actor, base=Path(base), folder=out, plan=plan_of(resolve(("test", tables)), base, n_tasks=100))
    whole = {name: tensor.clone() for name, tensor in adapted.merge_and_unload().state_dict().items()}
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    alone = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out / "adapter"
    ).merge_and_unload()
    for found in (exported.state_dict(), alone.state_dict()):
        assert set(found) == set(whole)
        assert all(torch.allclose(found[name], whole[name], atol=1e-6) for name in whole)


def test_an_adapter_is_described_as_the_local_trainer_does(tmp_path: Path) -> None:
    """Its settings, and how many numbers it has."""
    base = tiny_model(tmp_path / "base")
    tables = {"model": str(base), "trainer": {"name": "verl", "adapter": "lora", "lora_rank": 4}}
    settings, n = described(plan_of(resolve(("test", tables)), base, n_tasks=100))
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert settings is not None
    assert settings["rank"] == 4
    assert n == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_a_rank_whose_weights_are_missing_is_named(tmp_path: Path) -> None:
    """A folder that not all machines share looks like that."""
    torch.save({}, tmp_path / "model_world_size_2_rank_0.pt")
    with pytest.raises(RunError, match=r"holds the weights of ranks \[0\] of 2"):
        read_shards(tmp_path)


def test_megatrons_weights_are_left_to_verls_own_merger(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    verl = {"strategy": "megatron", "device": "cuda", "ranks_per_node": 1}
    plan = plan_of(resolve(("test", {"model": str(base), "trainer": {"name": "verl"}, "verl": verl})), base, n_tasks=9)
    with pytest.raises(RunError, match=r"verl\.model_merger merge --backend megatron"):
        export_checkpoint(tmp_path, base=Path(base), folder=tmp_path, plan=plan)


def test_tensors_that_every_rank_has_whole_are_taken_once() -> None:
    """As buffers are."""
    assert torch.equal(joined([{"a": torch.ones(2)}, {"a": torch.ones(2)}])["a"], torch.ones(2))
