"""The policy's model as the trainer holds it: what may change, what is published, what is saved and exported.

Invariant: what `published` gives are weights under the base model's own names, whatever is trained of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agenttrain.local import policy

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Weight files of the base; an export writes its own."""


class Learnable:
    """One Hugging Face folder in memory, ready for gradients."""

    def __init__(self, folder: str | Path, *, device: torch.device) -> None:
        """Load it.

        Raises:
            ModelError: the folder can't be loaded.
        """
        self.folder, self.device = Path(folder), device
        self.model = policy.load_model(folder, device=device).requires_grad_(True)
        self.logits = policy.Logits(self.model)
        self.parameters: list[torch.nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        """What the optimizer changes, in the model's order."""

    @property
    def n_parameters(self) -> int:
        """Numbers that may change."""
        return sum(p.numel() for p in self.parameters)

    def published(self) -> Mapping[str, torch.Tensor]:
        """What an engine takes, by the base model's names."""
        return unique_weights(self.model)

    def saved(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps."""
        return unique_weights(self.model)

    def restore(self, weights: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Take back what `saved` gave.

        Raises:
            ModelError: weights of another architecture.
        """
        policy.load_weights(self.model, dict(weights), where=where)

    def export(self, folder: Path) -> None:
        """A Hugging Face folder in float32, with the base's tokenizer files."""
        folder.mkdir(parents=True, exist_ok=True)
        with policy.quietly():
            self.model.save_pretrained(folder)
        for file in self.folder.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, folder / file.name)


def unique_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model with each storage once: tied weights appear under their first name."""
    weights: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen or tensor.numel() == 0:
            weights[name] = tensor
            seen.add(key)
    return weights
