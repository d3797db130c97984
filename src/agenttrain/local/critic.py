"""A policy's hidden states to what it may expect from there: the value head of PPO.

The head reads the state that the output layer reads, and sends no gradient back into the policy: the trunk moves by
the policy's loss alone, whatever the head still has to learn, and an adapter or a frozen base changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from agenttrain.errors import ConfigError, ModelError


class ValueHead:
    """One hidden layer; every value is 0 before the first update."""

    def __init__(self, n_hidden: int, *, seed: int, device: torch.device) -> None:
        """Draw it.

        Args:
            n_hidden: width of the policy's hidden states.
            seed: of its first numbers; nobody else's random numbers change.
        """
        generator = torch.Generator().manual_seed(seed)
        inner = torch.randn(n_hidden, n_hidden, generator=generator) / math.sqrt(n_hidden)
        start = {
            "inner.weight": inner,
            "inner.bias": torch.zeros(n_hidden),
            "outer.weight": torch.zeros(1, n_hidden),
            "outer.bias": torch.zeros(1),
        }
        self._by_name = {name: torch.nn.Parameter(tensor.to(device)) for name, tensor in start.items()}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer changes."""
        return list(self._by_name.values())

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] states -> [N]."""
        own = self._by_name
        normal = torch.nn.functional.layer_norm(hidden.detach(), hidden.shape[-1:])
        inner = torch.nn.functional.linear(normal, own["inner.weight"], own["inner.bias"]).tanh()
        return torch.nn.functional.linear(inner, own["outer.weight"], own["outer.bias"])[:, 0]

    def saved(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps."""
        return {name: parameter.detach() for name, parameter in self._by_name.items()}

    def restore(self, weights: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Take back what `saved` gave.

        Raises:
            ModelError: a part is missing, or of another width.
        """
        for name, parameter in self._by_name.items():
            if name not in weights or weights[name].shape != parameter.shape:
                seen = list(weights[name].shape) if name in weights else "missing"
                raise ModelError(
                    f"The value head in {where}: {name!r} is {seen}, and {list(parameter.shape)} is needed. Resume "
                    "from a checkpoint of this run."
                )
        with torch.no_grad():
            for name, parameter in self._by_name.items():
                parameter.copy_(weights[name])


def hidden_width(model: Any) -> int:
    """Width of the states that a model's output layer reads.

    Raises:
        ConfigError: the model has no output layer of its own.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f'trainer.algorithm is "ppo", and {type(model).__name__} has no output layer whose input a value head '
            'could read. Choose another algorithm, such as trainer.algorithm = "rloo".'
        )
    return int(head.weight.shape[1])
