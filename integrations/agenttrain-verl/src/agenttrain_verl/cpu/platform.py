"""veRL's questions about a device, answered for the CPU: one device, nothing to synchronise, no memory of its own."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"


def register() -> None:
    """Make VERL_PLATFORM=cpu mean this platform."""
    if PlatformRegistry.get(NAME) is not CpuPlatform:
        PlatformRegistry.register(platform=NAME)(CpuPlatform)


class CpuDevice(types.ModuleType):
    """torch.cpu, and of torch.cuda what veRL calls on whatever module a platform gives it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """Free and whole memory of the machine, in bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def empty_cache(self, *_: Any, **__: Any) -> None:
        """There is none."""

    ipc_collect = set_device = synchronize = reset_peak_memory_stats = empty_cache
    set_per_process_memory_fraction = empty_cache


DEVICE = CpuDevice("agenttrain_verl.cpu.device")


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The platform "cpu"; it is taken where VERL_PLATFORM names it, and never guessed."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> types.ModuleType:
        return DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        """The device itself: FSDP and Tensor.to take a bare index for an accelerator's (0.9.1)."""
        return torch.device(NAME)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs behind."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The allocator is the system's."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no profiler."""

    def profiler_stop(self) -> None:
        """There is no profiler."""

    def ray_resource_name(self) -> str:
        """A number of "GPU" that Ray is told: veRL's placement asks for one per rank, and counts no other resource
        (single_controller/ray/base.py, 0.9.1)."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        """There is none."""
