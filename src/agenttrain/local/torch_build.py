"""What the installed torch was built for, and what it sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Facts of one installation of torch."""

    version: str
    accelerator: str | None
    """Such as "CUDA 12.8" or "ROCm 6.2". None: the CPU alone."""
    n_gpus: int
    cpu_capability: str
    """torch's own word for the kernels it chose, such as "AVX512"."""
    n_threads: int
    """Operation threads of this process."""


def torch_build() -> TorchBuild:
    """Of this process; imports torch.

    Raises:
        Exception: whatever a broken installation raises at import.
    """
    import torch

    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    return TorchBuild(
        version=str(torch.__version__),
        accelerator=f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else None,
        n_gpus=torch.cuda.device_count(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        n_threads=torch.get_num_threads(),
    )
