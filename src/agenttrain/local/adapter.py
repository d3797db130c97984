"""A LoRA adapter as what is learned: the base is frozen, and two small matrices beside each linear layer change.

W becomes W + B·A · alpha / rank (LoRA, arXiv:2106.09685, section 4.1). Invariants: no number of the base ever changes;
what is published are merged weights under the base's own names, those of adapted layers only; what is saved is the
adapter alone. peft makes the layers; it is imported here and nowhere else, when an adapter is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agenttrain.config import Config, TrainerTable
from agenttrain.errors import ConfigError
from agenttrain.local import policy
from agenttrain.local.learnable import Learnable
from agenttrain.protocols import AdapterWeights

FOLDER = "adapter"
"""Inside an exported policy: the adapter alone, as peft reads it."""
NAME = "default"
"""Of the one adapter, inside peft."""
INSIDE = "model"
"""Where a model lies while peft puts layers into it."""
NOT_ADAPTED = {"mamba": "out_proj", "mamba2": "out_proj", "falcon_mamba": "out_proj", "falcon_h1": "out_proj"}
"""Model type to the layers whose weights its own code reads past the adapter; peft refuses them too."""


class Adapter(Learnable):
    """A Hugging Face folder in memory, frozen, with an adapter ready for gradients."""

    def __init__(self, folder: str | Path, model: Any, *, settings: TrainerTable, seed: int) -> None:
        """Take a loaded base and put an adapter of no effect yet beside its linear layers.

        Args:
            seed: of the adapter's first numbers.

        Raises:
            ConfigError: trainer.lora_targets names a layer that the model has not.
        """
        super().__init__(folder, model)
        self.model.requires_grad_(False)
        layers = adapted_layers(self.model, settings.lora_targets)
        self._config = _inject(self.model, layers, settings, seed)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.adapter = {
            "kind": "lora",
            "rank": settings.lora_rank,
            "alpha": settings.lora_alpha,
            "targets": sorted({name.rpartition(".")[2] for name in layers}),
            "layers": len(layers),
        }
        self._layer_by_name: dict[str, Any] = {name: self.model.get_submodule(name) for name in layers}

    def published(self) -> Mapping[str, torch.Tensor]:
        """The merged weights of adapted layers, each computed when it is asked for."""
        return _Merged(self._layer_by_name)

    def adapter_weights(self) -> AdapterWeights:
        """The adapter as peft names it; the tensors are those that go on being trained."""
        return AdapterWeights(config=self._config.to_dict(), tensors=self._named_as_peft())

    def saved(self) -> Mapping[str, torch.Tensor]:
        """The adapter's matrices."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def export(self, folder: Path) -> None:
        """The merged model as a plain Hugging Face folder, and in adapter/ the adapter alone in peft's format."""
        super().export(folder)
        target = folder / FOLDER
        target.mkdir()
        self._config.save_pretrained(target)
        matrices = {name: tensor.cpu().contiguous() for name, tensor in self._named_as_peft().items()}
        save_file(matrices, target / "adapter_model.safetensors", metadata={"format": "pt"})

    def _named_as_peft(self) -> dict[str, torch.Tensor]:
        return {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor.detach()
            for name, tensor in self.saved().items()
        }

    def _whole(self) -> dict[str, torch.Tensor]:
        merged = self.published()
        weights = {}
        for name, tensor in self.model.state_dict().items():
            layer, _, rest = name.partition(".base_layer.")
            plain = f"{layer}.{rest}" if rest else name
            if f".{NAME}." not in name:
                weights[plain] = merged.get(plain, tensor)
        return weights

    @contextmanager
    def reference(self) -> Iterator[policy.Logits]:
        """The base's logits, by leaving the adapter out meanwhile; no other pass may run."""
        for layer in self._layer_by_name.values():
            layer.enable_adapters(False)
        try:
            yield self.logits
        finally:
            for layer in self._layer_by_name.values():
                layer.enable_adapters(True)


def open_learnable(folder: str | Path, *, device: torch.device, config: Config) -> Learnable:
    """Load a folder as what a run learns: the model itself, or an adapter beside it.

    Raises:
        ModelError: the folder can't be loaded.
        ConfigError: trainer.lora_targets names a layer that the model has not.
    """
    model = policy.load_model(folder, device=device)
    if wants_adapter(config.trainer, policy.n_parameters(model)):
        return Adapter(folder, model, settings=config.trainer, seed=config.seed)
    return Learnable(folder, model)


class _Merged(Mapping[str, torch.Tensor]):
    """Name of a base's weight to W + B·A · alpha / rank in float32."""

    def __init__(self, layer_by_name: Mapping[str, Any]) -> None:
        self._layer_by_name = {f"{name}.weight": layer for name, layer in layer_by_name.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        layer = self._layer_by_name[name]
        with torch.no_grad():
            merged: torch.Tensor = layer.base_layer.weight + layer.get_delta_weight(NAME)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._layer_by_name)

    def __len__(self) -> int:
        return len(self._layer_by_name)


def wants_adapter(settings: TrainerTable, n_parameters: int) -> bool:
    """Whether a model of this size gets an adapter."""
    return settings.adapter == "lora" or (settings.adapter == "auto" and n_parameters > settings.adapter_above)


def adapted_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Full names of the layers that an adapter stands beside.

    Args:
        targets: ends of names, such as "q_proj" or "self_attn.q_proj". Empty: all linear layers but the output head.

    Raises:
        ConfigError: an end that no linear layer's name has, or a model without any.
    """
    names = linear_layers(model)
    if not names:
        raise ConfigError(
            f"trainer.adapter puts LoRA beside linear layers, and this {type(model).__name__} has none but its output "
            'head. Train all of its weights: trainer.adapter = "none".'
        )
    for target in targets:
        if not any(_ends_in(name, target) for name in names):
            seen = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"trainer.lora_targets names {target!r}, and no linear layer of this {type(model).__name__} is called "
                f"so. Its layers: {', '.join(seen)}. Name some of them, or leave the key out for all."
            )
    return [name for name in names if not targets or any(_ends_in(name, target) for target in targets)]


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def linear_layers(model: Any) -> list[str]:
    """Full names of all linear layers but the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    left_out = NOT_ADAPTED.get(model.config.model_type)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and module is not head
        and not (left_out and _ends_in(name, left_out))
    ]


def _inject(model: Any, layers: Sequence[str], settings: TrainerTable, seed: int) -> Any:
    """Put an adapter beside the layers; gives peft's configuration of it."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=list(layers),
        fan_in_fan_out=isinstance(model.get_submodule(layers[0]), Conv1D),
        base_model_name_or_path=str(model.config.name_or_path),
    )
    # By a model's configuration peft (0.21) takes the dense layers of a mixture for its experts: it must not see one.
    inside = replace(config, target_modules=[f"{INSIDE}.{name}" for name in layers])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(inside, torch.nn.ModuleDict({INSIDE: model}), adapter_name=NAME)
    return config
