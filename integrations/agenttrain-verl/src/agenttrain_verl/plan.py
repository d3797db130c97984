"""A run's configuration to what the cluster will be: everything that can be wrong is found here, and nothing starts.

A plan is made twice, for the check before a run and for the run; both times from the same configuration. Neither veRL
nor Ray is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agenttrain.config import Config, plugin_table
from agenttrain.errors import ConfigError, ModelError

from agenttrain_verl import algorithms, overrides
from agenttrain_verl.algorithms import VerlAlgorithm
from agenttrain_verl.settings import VerlTable
from agenttrain_verl.versions import check_versions, installed

Device = Literal["cpu", "cuda"]
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
GIB_PER_PROCESS = (0.6, 0.9)
"""Least and most memory of one of veRL's processes on the CPU: each imports torch, transformers and veRL."""
N_SERVICES = 4
"""Processes beside ranks, engines and rollout workers: two of the transfer queue, its storage, the load balancer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What veRL's cluster of a run will be."""

    settings: VerlTable
    config: Config
    model: Path
    n_tasks: int
    """Of the training split."""
    device: Device
    n_ranks: int
    """Trainer ranks on all nodes."""
    n_replicas: int
    """Engines that answer the policy's calls."""
    n_rollout_workers: int | None
    """Processes in which graphs run. None: one per node of the cluster."""
    algorithm: VerlAlgorithm
    adapter_rank: int | None
    """None: all weights are trained."""
    dtype: str
    """Of the trainer's passes: "float32" or "bfloat16"."""
    max_length: int
    """Positions that the model has."""
    is_mixture: bool
    """Whether the model sends tokens through experts."""

    @property
    def n_devices(self) -> int:
        """What Ray must have of "GPU", which on the CPU is a number and nothing else."""
        apart = self.n_replicas * self.settings.tensor_parallel if self.settings.mode == "separate_async" else 0
        return self.n_ranks + apart

    @property
    def ranks_per_node(self) -> int:
        return self.n_ranks // self.settings.nodes

    @property
    def n_processes(self) -> int:
        """About how many there will be, this one included."""
        return 1 + self.n_ranks + self.n_replicas + (self.n_rollout_workers or self.settings.nodes) + N_SERVICES


def plan_of(config: Config, model: str | Path, *, n_tasks: int) -> Plan:
    """Read the configuration of a run.

    Args:
        model: folder of the policy.
        n_tasks: of the training split.

    Raises:
        ConfigError: settings that don't go together, or that veRL can't do.
        ModelError: the folder's configuration can't be read.
    """
    settings, folder = plugin_table(VerlTable, "verl", config), Path(model)
    algorithm = algorithms.of(config.trainer)
    model_config = _model_config(folder)
    device = _device(settings)
    n_ranks = settings.nodes * _ranks_per_node(settings, device)
    apart = settings.mode == "separate_async"
    plan = Plan(
        settings=settings,
        config=config,
        model=folder,
        n_tasks=n_tasks,
        device=device,
        n_ranks=n_ranks,
        n_replicas=settings.replicas if apart else max(1, n_ranks // settings.tensor_parallel),
        n_rollout_workers=settings.rollout_workers or (None if settings.address else 1),
        algorithm=algorithm,
        adapter_rank=config.trainer.lora_rank if _wants_adapter(config, folder) else None,
        dtype=_dtype(settings, device),
        max_length=_max_length(model_config, folder),
        is_mixture=any(key in model_config for key in ("num_experts", "num_local_experts", "n_routed_experts")),
    )
    _refuse(plan)
    overrides.refuse(settings.overrides, strategy=settings.strategy)
    _refuse_batches(plan)
    return plan


def check_plan(plan: Plan) -> tuple[str, ...]:
    """Hold the plan against what is installed; starts nothing, and gives notes.

    Raises:
        ConfigError: verl.overrides has a key that the installed veRL doesn't know.
        PluginError: veRL or what it needs is missing, or of another version.
    """
    check_versions()
    overrides.refuse_unknown(plan.settings.overrides, strategy=plan.settings.strategy)
    return (_where(plan), *_notes(plan))


# ── what a user sees before a run ────────────────────────────────────────────────────────────────────────────────────


def _where(plan: Plan) -> str:
    settings = plan.settings
    on = f"the cluster at {settings.address}" if settings.address else f"this machine's {plan.device.upper()}"
    ranks = f"{plan.n_ranks} trainer rank{'s' if plan.n_ranks > 1 else ''}"
    engines = f"{plan.n_replicas} engine{'s' if plan.n_replicas > 1 else ''}"
    served = (
        f"veRL's own SGLang ({engines})" if settings.rollout == "stock" else f"{engines} ({plan.config.engine.name})"
    )
    return f"training: veRL {installed('verl')} on {on}, mode {settings.mode}: {ranks}, rollouts by {served}"


def _notes(plan: Plan) -> list[str]:
    notes = []
    if plan.device == "cpu" and plan.settings.address is None:
        low, high = (plan.n_processes * each for each in GIB_PER_PROCESS)
        notes.append(f"veRL starts about {plan.n_processes} processes, {low:.0f} to {high:.0f} GiB beside the model")
    if plan.adapter_rank is not None:
        notes.append(f"an adapter of rank {plan.adapter_rank} is trained; engines get merged weights")
    if plan.is_mixture and plan.config.trainer.replay_experts and plan.settings.strategy == "fsdp2":
        notes.append("experts are not replayed: veRL does so with verl.strategy = megatron alone")
    if plan.settings.strategy == "megatron":
        notes.append("the run ends before its export: Megatron's checkpoints are merged by veRL's verl.model_merger")
    return notes


# ── what a plan is made of ───────────────────────────────────────────────────────────────────────────────────────────


def _n_gpus() -> int:
    import torch

    n: int = torch.cuda.device_count()
    return n


def _device(settings: VerlTable) -> Device:
    if settings.device != "auto":
        return settings.device
    return "cuda" if settings.address is not None or _n_gpus() else "cpu"


def _ranks_per_node(settings: VerlTable, device: Device) -> int:
    if settings.ranks_per_node is not None:
        return settings.ranks_per_node
    if device == "cpu":
        return 1
    if n := _n_gpus():
        return n
    raise ConfigError(
        "verl.ranks_per_node isn't set, and no GPU is seen here to count. Say how many GPUs of each node train: "
        'verl.ranks_per_node = 8; or train on the CPU: verl.device = "cpu".'
    )


def _dtype(settings: VerlTable, device: Device) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _wants_adapter(config: Config, model: Path) -> bool:
    from agenttrain.local.adapter import wants_adapter
    from agenttrain.prepare import n_parameters

    return wants_adapter(config.trainer, n_parameters(model))


def _model_config(model: Path) -> dict[str, Any]:
    """config.json; of a model with several parts, its text's.

    Raises:
        ModelError: there is none that can be read.
    """
    file = model / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}. Give the folder of a model.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no table. Give the folder of a model.")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _max_length(config: Mapping[str, Any], model: Path) -> int:
    for key in LENGTH_KEYS:
        if isinstance(length := config.get(key), int) and length > 0:
            return length
    raise ModelError(
        f"{model / 'config.json'} doesn't say how many positions the model has ({', '.join(LENGTH_KEYS)}). Add "
        "max_position_embeddings."
    )


# ── what can't work ──────────────────────────────────────────────────────────────────────────────────────────────────


def _refuse(plan: Plan) -> None:
    settings, config = plan.settings, plan.config
    if config.run.deterministic:
        raise ConfigError(
            "run.deterministic = true needs batches of fixed width in one process, and veRL has neither. Leave it out "
            "(tokens still follow their seeds), or use --trainer local."
        )
    if settings.rollout == "stock":
        _refuse_stock(plan)
    elif settings.tensor_parallel > 1:
        raise ConfigError(
            f'verl.tensor_parallel is {settings.tensor_parallel}, and verl.rollout "engine" has one engine per rank. '
            'Leave it out, or set verl.rollout = "stock"; SGLang of --engine sglang has sglang.tensor_parallel.'
        )
    if settings.strategy == "megatron":
        _refuse_megatron(plan)
    if settings.correction != "none" and config.trainer.importance_cap is None:
        raise ConfigError(
            f"verl.correction is {settings.correction!r}, and trainer.importance_cap isn't set. Say what the weights "
            "are capped at: trainer.importance_cap = 2.0."
        )
    if config.trainer.minibatches > config.trainer.tasks_per_step * config.trainer.group_size:
        raise ConfigError(
            f"trainer.minibatches is {config.trainer.minibatches}, and a step has "
            f"{config.trainer.tasks_per_step} × {config.trainer.group_size} rollouts. Set it to at most that."
        )


def _refuse_stock(plan: Plan) -> None:
    settings = plan.settings
    if plan.device == "cpu":
        raise ConfigError(
            'verl.rollout is "stock", and veRL\'s own SGLang rollout runs on GPUs alone. Leave verl.rollout out and '
            "use --engine sglang, whose servers run on the CPU too."
        )
    if plan.config.engine.name == "sglang":
        raise ConfigError(
            'verl.rollout is "stock", which is veRL\'s own SGLang, and engine.name is "sglang", which is '
            "agenttrain-sglang's servers. Leave --engine sglang out, or verl.rollout."
        )
    if plan.n_ranks % settings.tensor_parallel and settings.mode != "separate_async":
        raise ConfigError(
            f"verl.tensor_parallel is {settings.tensor_parallel}, and {plan.n_ranks} ranks can't be dealt into groups "
            "of that size. Set it to a divisor of verl.nodes × verl.ranks_per_node."
        )


def _refuse_megatron(plan: Plan) -> None:
    if plan.device == "cpu":
        raise ConfigError(
            'verl.strategy is "megatron", which runs on GPUs alone. Leave it out on the CPU: fsdp2 trains there.'
        )
    if plan.dtype == "float32":
        raise ConfigError(
            'verl.dtype is "float32" and verl.strategy "megatron", which veRL runs in 16 bits alone. Leave verl.dtype '
            "out, or verl.strategy."
        )


def _refuse_batches(plan: Plan) -> None:
    """What veRL asserts of its batches once its processes stand."""
    trainer, settings = plan.config.trainer, plan.settings
    n_rollouts = trainer.tasks_per_step * trainer.group_size
    if plan.n_ranks > n_rollouts:
        raise ConfigError(
            f"{plan.n_ranks} trainer ranks share a step of {n_rollouts} rollouts, so that some would have none. Raise "
            "trainer.tasks_per_step or trainer.group_size, or lower verl.ranks_per_node."
        )
    own = overrides.at(settings.overrides, f"trainer.v1.{settings.mode}.parameter_sync_step")
    if settings.mode == "separate_async" and own not in (None, 1):
        raise ConfigError(
            f"verl.overrides sets trainer.v1.separate_async.parameter_sync_step to {own}, and agenttrain publishes "
            "weights once a step. Leave it out; trainer.minibatches is the number of updates in a step."
        )
