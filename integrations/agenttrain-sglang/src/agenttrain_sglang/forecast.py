"""What the servers of a run will hold on this machine, from the model's configuration alone.

program   what Python, torch and SGLang take in a server's processes
weights   in the server's own type, and as much again while a bucket of new ones arrives
cache     keys and values of `cache_tokens` positions; on CUDA the server takes what is free, which is not forecast
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agenttrain.config import plugin_table
from agenttrain.protocols import MemoryPart

from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.launch import CPU_CACHE_TOKENS
from agenttrain_sglang.settings import SglangTable

if TYPE_CHECKING:
    from agenttrain.protocols import ForecastContext

PROGRAM_BYTES = 1400 * 2**20
"""Without pages of files, of three processes of SGLang 0.5.23 on the CPU."""
MIB = 2**20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def forecast(context: ForecastContext) -> list[MemoryPart]:
    """The parts of the servers that are started here; none where they are given.

    Raises:
        ConfigError: there is no virtual environment to start them in.
        ModelError: the folder's configuration is that of no causal language model.
    """
    from agenttrain.local.forecast import shape_of

    settings = plugin_table(SglangTable, "sglang", context.config)
    if settings.servers:
        return []
    on_cpu = find_environment(settings).device == "cpu"
    shape = shape_of(Path(context.model), config=context.config)
    default = "float32" if on_cpu else "bfloat16"
    n_bytes = BYTES[settings.dtype if settings.dtype != "auto" else default]
    memory, n = ("machine" if on_cpu else "gpu"), settings.replicas
    weights = n_bytes * shape.n_parameters
    tokens = settings.cache_tokens or (CPU_CACHE_TOKENS if on_cpu else 0)
    return [
        _part("program", "machine", n * PROGRAM_BYTES),
        _part("weights", memory, n * weights),
        _part("arriving weights", memory, n * min(weights, settings.bucket_mib * MIB)),
        _part("cache", memory, n * n_bytes * shape.n_cached * tokens),
    ]


def _part(name: str, memory: str, n_bytes: int) -> MemoryPart:
    return MemoryPart(process="sglang", name=name, memory=memory, n_bytes=n_bytes)
