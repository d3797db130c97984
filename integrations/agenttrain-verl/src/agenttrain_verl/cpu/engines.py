"""veRL's FSDP2 engines under device "cpu"; veRL registers them for cuda and npu alone.

Imported in a training process after veRL's own engines: this module imports those, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
from verl.workers.engine.base import EngineRegistry

from agenttrain_verl.cpu.platform import NAME

BACKEND = "fsdp2"


@contextmanager
def unpinned() -> Iterator[None]:
    """P2: a model that only reads is offloaded to pinned memory, which the CPU hasn't (transformer_impl.py, 0.9.1)."""
    policy = fsdp.CPUOffloadPolicy
    fsdp.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)
    try:
        yield
    finally:
        fsdp.CPUOffloadPolicy = policy


class OnCpu:
    """What both engines do otherwise on the CPU."""

    def _build_fsdp_module(self, module: Any) -> Any:
        with unpinned():
            return super()._build_fsdp_module(module)  # type: ignore[misc]

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged weights as they are: veRL sends them in bfloat16, whatever they are trained in (0.9.1)."""
        with fsdp.merged_lora_context(self.module, backup_adapters=True):  # type: ignore[attr-defined]
            params = fsdp.normalize_peft_param_name(self.module.state_dict())  # type: ignore[attr-defined]
            for name, param in fsdp.convert_weight_keys(params, self.module).items():  # type: ignore[attr-defined]
                yield name, param.full_tensor() if isinstance(param, fsdp.DTensor) else param.detach().clone()


class CpuLanguageModel(OnCpu, fsdp.FSDPEngineWithLMHead):  # type: ignore[misc]
    """The policy, or its reference."""


class CpuValueModel(OnCpu, fsdp.FSDPEngineWithValueHead):  # type: ignore[misc]
    """The critic."""


def register() -> None:
    """Make veRL find them; safe twice."""
    for kind, engine in (("language_model", CpuLanguageModel), ("value_model", CpuValueModel)):
        if NAME not in EngineRegistry._engines.get(kind, {}).get(BACKEND, {}):
            partial(EngineRegistry.register, model_type=kind, backend=[BACKEND], device=NAME)()(engine)
