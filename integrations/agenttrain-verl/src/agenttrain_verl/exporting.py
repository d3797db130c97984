"""veRL's checkpoint becomes a Hugging Face folder, in float32 and with adapters merged, as the local trainer exports.

veRL's own merger (verl/model_merger, 0.9.1) rounds to bfloat16. Reads FSDP2 shards: files of one dict each, whose
DTensors are joined along the dimension that they are cut at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from agenttrain.errors import RunError
from agenttrain.local import policy
from agenttrain.local.adapter import Adapter, adapted_layers
from agenttrain.local.learnable import Learnable

if TYPE_CHECKING:
    from agenttrain_verl.plan import Plan

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
PEFT = "base_model.model."
"""Before the names of a model inside peft's."""


def export_checkpoint(actor: Path, *, base: Path, folder: Path, plan: Plan) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder; an adapter stands in adapter/ too, as peft reads it.

    Args:
        actor: `global_step_N/actor` of veRL's checkpoint.
        base: what it was trained from: configuration and tokenizer.
        folder: an empty one.

    Raises:
        RunError: the checkpoint's shards are not all there, or not FSDP2's.
    """
    if plan.settings.strategy == "megatron":
        raise RunError(
            "A checkpoint of verl.strategy megatron is in Megatron's own format, which agenttrain doesn't export. Use "
            "veRL's merger on checkpoints/global_step_N/actor of the run: python -m verl.model_merger merge --backend "
            "megatron --local_dir … --target_dir …"
        )
    learned = _learned(base, policy.load_model(base, device=torch.device("cpu")), plan)
    weights = {name.removeprefix(PEFT): tensor for name, tensor in joined(read_shards(actor)).items()}
    learned.restore({name: weights[name].float() for name in learned.saved()}, where=str(actor))
    learned.export(folder)


def _learned(base: Path, model: Any, plan: Plan) -> Learnable:
    """What the local trainer would hold of it: it knows what is saved, and how that is exported."""
    if plan.adapter_rank is None:
        return Learnable(base, model)
    return Adapter(base, model, settings=plan.config.trainer, seed=plan.config.seed)


def described(plan: Plan) -> tuple[Mapping[str, Any] | None, int]:
    """(the adapter's settings for the report, its numbers); (None, 0) where all weights are trained."""
    if plan.adapter_rank is None:
        return None, 0
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plan.model))
    layers = adapted_layers(model, plan.config.trainer.lora_targets)
    shapes = [model.get_submodule(name).weight.shape for name in layers]
    settings = {
        "kind": "lora",
        "rank": plan.adapter_rank,
        "alpha": plan.config.trainer.lora_alpha,
        "targets": sorted({name.rpartition(".")[2] for name in layers}),
        "layers": len(layers),
    }
    return settings, sum(plan.adapter_rank * (rows + columns) for rows, columns in shapes)


def read_shards(actor: Path) -> list[Mapping[str, Any]]:
    """Each rank's part of the weights, by rank.

    Raises:
        RunError: some are missing.
    """
    found = {int(match[2]): (int(match[1]), path) for path in actor.iterdir() if (match := _SHARD.fullmatch(path.name))}
    n_ranks = next(iter(found.values()))[0] if found else 0
    if not found or sorted(found) != list(range(n_ranks)):
        raise RunError(
            f"{actor} holds the weights of ranks {sorted(found)} of {n_ranks}: model_world_size_* of every rank must "
            "be there. On several machines the run's folder must be one that all of them share."
        )
    return [torch.load(found[rank][1], map_location="cpu", weights_only=False) for rank in range(n_ranks)]


def joined(shards: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole tensors of what each rank holds a part of."""
    return {name: _joined([shard[name] for shard in shards]) for name in shards[0]}


def _joined(parts: Sequence[Any]) -> torch.Tensor:
    first = parts[0]
    if not hasattr(first, "_local_tensor"):
        return first.detach()
    (placement, *others) = first.placements
    if others:
        raise RunError(f"Weights that are cut along {1 + len(others)} dimensions of ranks can't be exported here.")
    local = [part._local_tensor.detach() for part in parts]
    if not placement.is_shard():
        return local[0]
    return torch.cat(local, dim=placement.dim)
