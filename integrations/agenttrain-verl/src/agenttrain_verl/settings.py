"""The table [verl]: where veRL runs, and how rollouts and updates go together."""

from __future__ import annotations

from typing import Any, Literal

from agenttrain.config import Table
from pydantic import Field


class VerlTable(Table):
    rollout: Literal["engine", "stock"] = "engine"
    """What answers the policy's calls: "engine": replicas that hold the engine of `engine.name`; "stock": veRL's own
    SGLang rollout, on GPUs."""
    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """"sync": rollouts, then the update. The others begin rollouts of later steps early: "colocate_async" on the same
    devices, where they stand still during the update and go on after it; "separate_async" on others."""
    max_staleness: int = Field(1, ge=1)
    """How many updates ahead of its own a rollout may be begun, in the modes that are not sync: no trained sample's
    oldest token is older than that."""
    correction: Literal["none", "token", "sequence"] = "none"
    """What importance weights are taken over, where trainer.importance_cap caps them; "none" with it means "token"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": CUDA where a GPU is seen or a cluster is named."""
    address: str | None = None
    """Of a running Ray cluster, such as "auto" or "10.0.0.1:6379". None: one is started here, and ended."""
    nodes: int = Field(1, ge=1)
    """Machines with trainer ranks."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Trainer ranks on each. None: one per GPU; one on the CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that one replica's engine spans ("stock")."""
    replicas: int = Field(1, ge=1)
    """Engines beside the trainer ("separate_async"). Elsewhere there is one for every tensor_parallel ranks."""
    rollout_workers: int | None = Field(None, ge=1)
    """Processes in which graphs run. None: one per node of the cluster, one here."""
    worker_restarts: int = Field(8, ge=0)
    """How often rollout workers may be replaced in a run."""
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the trainer's passes. "auto": float32 on the CPU, bfloat16 on CUDA."""
    loggers: list[str] = Field(["file"])
    """veRL's own: file (in the run's verl/), tensorboard, wandb, mlflow …"""
    silence_s: float = Field(600.0, gt=0)
    """How long nothing may come back while rollouts are made before the run ends."""
    overrides: dict[str, Any] = Field({})
    """veRL's own configuration, the last word: [verl.overrides.actor_rollout_ref.actor] entropy_coeff = 0.01."""
