"""The table [sglang]: where rollouts are sampled, and how weights get there."""

from __future__ import annotations

from typing import Literal

from agenttrain.config import Table
from pydantic import Field


class SglangTable(Table):
    servers: list[str] = Field([])
    """Addresses of running servers, such as "http://10.0.0.7:30000". Empty: servers are started here."""
    replicas: int = Field(1, ge=1)
    """Servers that are started; on CUDA each on GPUs of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": what the virtual environment was made for."""
    environment: str | None = None
    """Folder of SGLang's virtual environment. None: the one that `agenttrain sglang setup` made."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """"auto": float32 on the CPU, where it costs nothing and agrees with the trainer to 1e-5; bfloat16 on CUDA."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one server."""
    arguments: list[str] = Field([])
    """More arguments of sglang.launch_server, such as ["--mem-fraction-static", "0.7"]; the last word."""
    max_running: int = Field(128, ge=1)
    """Calls that one server works on at once; more wait here."""
    cache_tokens: int | None = Field(None, ge=256)
    """Positions of one server's KV cache. None: as many as fit on CUDA; 65536 on the CPU."""
    deterministic: bool | None = None
    """Draw each token from its seed and position. None: on the CPU, where it costs nothing."""
    transport: Literal["auto", "group", "tensor", "disk"] = "auto"
    """How new weights travel: by process group, in the request's body, or by a file. "auto": what both sides allow."""
    shared_folder: str | None = None
    """A folder that the trainer and all servers see under this name, for transport "disk"."""
    bucket_mib: int = Field(256, ge=1)
    """Weights that travel together, and that are in memory twice meanwhile."""
    adapters: bool = True
    """With LoRA, send the adapter alone. False: send the merged weights of the adapted layers."""
    routed_experts: bool | None = None
    """Record which experts each token went through. None: where the model is a mixture of experts."""
    restarts: int = Field(8, ge=0)
    """How often one server may be replaced in a run."""
    start_s: float = Field(300.0, gt=0)
    """How long a server may take until it answers."""
    silence_s: float = Field(60.0, gt=0)
    """How long a server may leave its health check unanswered before it is taken for hung."""
    update_s: float = Field(300.0, gt=0)
    """How long one bucket of new weights may take to arrive."""
