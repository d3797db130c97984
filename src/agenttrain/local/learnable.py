"""The policy's model as the trainer holds it: what may change, what is published, what is saved and exported.

Invariant: what `published` gives are weights under the base model's own names, whatever is trained of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agenttrain.local import policy
from agenttrain.protocols import AdapterWeights

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Weight files of the base; an export writes its own."""


class Learnable:
    """One Hugging Face folder in memory, all of it ready for gradients."""

    adapter: Mapping[str, Any] | None = None
    """What is trained beside a frozen base, as a report shows it. None: the model's own weights are trained."""

    def __init__(self, folder: str | Path, model: Any) -> None:
        """Take a loaded model.

        Args:
            folder: where it was loaded from.
        """
        self.folder, self.model = Path(folder), model.requires_grad_(True)
        self.device: torch.device = next(model.parameters()).device
        self.n_parameters = policy.n_parameters(model)
        self.logits = policy.Logits(model)
        self.parameters: list[torch.nn.Parameter] = list(model.parameters())
        """What the optimizer changes, in the model's order."""
        self._reference: policy.Logits | None = None

    @property
    def n_trained_parameters(self) -> int:
        """Numbers that may change."""
        return sum(p.numel() for p in self.parameters)

    @contextmanager
    def reference(self) -> Iterator[policy.Logits]:
        """The logits of the weights that the run began with: a frozen copy, loaded when it is first wanted."""
        if self._reference is None:
            self._reference = policy.Logits(policy.load_model(self.folder, device=self.device))
        yield self._reference

    def published(self) -> Mapping[str, torch.Tensor]:
        """What an engine takes, by the base model's names."""
        return unique_weights(self.model)

    def adapter_weights(self) -> AdapterWeights | None:
        """What is learned beside a frozen base, for an engine that can sample with it. None: it is the base itself."""
        return None

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
            self.model.save_pretrained(folder, state_dict=self._whole())
        for file in self.folder.iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, folder / file.name)

    def _whole(self) -> Mapping[str, torch.Tensor]:
        """All weights of now by the base's names, as transformers saves them."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict()
        return state


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
