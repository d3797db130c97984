"""LoRA adapters in one server: the one that calls name, and the one that arrives beside it.

A server has room for two. Invariant: the one that calls name now stays loaded while another one arrives.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agenttrain.protocols import AdapterWeights

from agenttrain_sglang.launch import ADAPTERS_AT_ONCE
from agenttrain_sglang.weights import Pushed, Shapes, WeightsRefused, drop_adapter, push_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as it was when it was published: the trainer goes on changing its own."""

    weights: AdapterWeights
    name: str
    version: int

    @classmethod
    def copied(cls, weights: AdapterWeights, *, name: str, version: int) -> Adapter:
        own = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
        return cls(weights=AdapterWeights(config=weights.config, tensors=own), name=name, version=version)


@dataclass(slots=True)
class Loaded:
    """What one server has loaded."""

    address: str
    timeout_s: float
    """For each adapter; the end of one waits for the calls that named it."""
    names: list[str] = field(default_factory=list)
    """The oldest first."""

    def load(
        self,
        adapter: Adapter,
        *,
        beside: str | None,
        n_ranks: int,
        dtype: Any = None,
        shapes: Shapes | None = None,
        is_0_5_12: bool = False,
    ) -> Pushed:
        """Load an adapter beside the one that calls name now.

        Raises:
            WeightsRefused: the server has what it had.
            ServerSpoiled: it is gone or silent.
        """
        if adapter.name in self.names:
            self._drop(adapter.name)
        while len(self.names) >= ADAPTERS_AT_ONCE:
            self._drop(next(name for name in self.names if name != beside))
        pushed = push_adapter(
            self.address,
            adapter.weights,
            adapter.name,
            timeout_s=self.timeout_s,
            n_ranks=n_ranks,
            dtype=dtype,
            shapes=shapes,
            is_0_5_12=is_0_5_12,
        )
        self.names.append(adapter.name)
        return pushed

    def _drop(self, name: str) -> None:
        self.names.remove(name)
        with suppress(WeightsRefused):  # it has none of that name any more
            drop_adapter(self.address, name, timeout_s=self.timeout_s)
