"""A model's config.json and the settings of a run to the bytes that the local trainer and its engine will hold.

The model is built on torch's meta device, which gives every shape and takes no memory. Figures are of the fullest
moment of a step and in float32 (4 bytes a number), P numbers of the model, T of them trained:

    weights       4 P in the trainer, 4 P in the engine; and on arrival in the engine 4 bytes for each one published
    gradients     4 T for each worker thread, and 4 T for their sum
    optimizer     8 T, the two moments of AdamW
    undo          12 T, the copy of weights and moments that undoes an interrupted step
    reference     4 P where a distance to it is asked for and all weights are trained (else it is the base itself)
    activations   for each worker 4 x 2.5 numbers per token and output of a linear layer, and 4 x 3.5 numbers per
                  trained token and entry of the vocabulary, for half of the tokens: logits, their softmax, its gradient
    cache         4 bytes for each key and value of each rollout at limits.tokens positions, and half of it again while
                  the buffers grow; at most the engine's budget
    sampling      20 bytes per rollout and entry of the vocabulary, in one step of the engine
    rollouts      ROLLOUT_BYTES for each one under way: its thread, its graph, its messages
    program       what Python, torch and transformers take in each process

Micro-batches are taken to be full, where the rollouts of an update can fill them. Not seen: what the user's own tools
hold, layers that are no linear ones (experts kept as one tensor), and quadratic attention.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agenttrain.config import Config
from agenttrain.errors import ModelError
from agenttrain.local import policy
from agenttrain.local.adapter import adapted_layers, linear_layers, wants_adapter
from agenttrain.local.engine import default_kv_bytes
from agenttrain.memory import available_bytes, resident_bytes
from agenttrain.protocols import Forecast, ForecastContext, MemoryPart
from agenttrain.trainer.algorithms import chosen

FLOAT = 4
ACTIVATIONS = 2.5
"""Numbers kept for the backward pass per token and output of a linear layer; measured 1.6 to 3.2."""
LOGITS = 3.5
SAMPLED = 0.5
"""Share of a trajectory's tokens that are trained."""
SAMPLING_BYTES = 20
TRAINER_BYTES, ENGINE_BYTES = 400 * 2**20, 300 * 2**20
"""Without pages of files, measured with torch 2.13, transformers 5.24 and langgraph 1.2 on the CPU."""
ROLLOUT_BYTES = 2**18
MOST_WORKERS = 8
"""Threads that compute gradients on the CPU, where there are as many cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model's configuration says of its size."""

    n_parameters: int
    n_trained: int
    n_published: int
    """Numbers that go to the engine after each update."""
    n_outputs: int
    """Of all linear layers but the head, together."""
    n_cached: int
    """Numbers kept for one position of one rollout."""
    n_hidden: int
    n_vocabulary: int
    max_length: int
    is_adapter: bool


def forecast(context: ForecastContext) -> Forecast:
    """What a run of the local trainer will need.

    Raises:
        ModelError: the folder's configuration is that of no causal language model.
        ConfigError: trainer.lora_targets names a layer that the model has not.
    """
    shape, config = shape_of(Path(context.model), config=context.config), context.config
    on_gpu = torch.cuda.is_available()
    memory, n_workers = ("gpu", 1) if on_gpu else ("machine", min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    parts = _program(config, n_rollouts=context.n_rollouts)
    parts += _trainer(shape, config, memory, n_workers=n_workers)
    if config.engine.name == "local":
        parts += _engine(shape, config, memory, n_rollouts=context.n_rollouts)
    return Forecast(
        parts=tuple(parts),
        free_bytes=_free(on_gpu),
        disk_bytes=_disk(shape, config),
        remedies=_remedies(shape, config),
        notes=(_note(shape, config),) if shape.is_adapter and config.trainer.adapter == "auto" else (),
    )


def shape_of(folder: Path, *, config: Config) -> Shape:
    """Sizes from config.json alone.

    Raises:
        ModelError: no causal language model can be built from it.
        ConfigError: trainer.lora_targets names a layer that the model has not.
    """
    model = _built(folder)
    layers = {name: model.get_submodule(name).weight for name in linear_layers(model)}
    n_parameters = policy.n_parameters(model)
    n_trained = n_published = n_parameters
    is_adapter = wants_adapter(config.trainer, n_parameters)
    if is_adapter:
        adapted = [layers[name] for name in adapted_layers(model, config.trainer.lora_targets)]
        n_trained = sum(config.trainer.lora_rank * sum(weight.shape) for weight in adapted)
        n_published = sum(weight.numel() for weight in adapted)
    text = model.config.get_text_config()
    n_heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 0
    head_size = getattr(text, "head_dim", None) or (text.hidden_size // n_heads if n_heads else 0)
    return Shape(
        n_parameters=n_parameters,
        n_trained=n_trained,
        n_published=n_published,
        n_outputs=sum(_n_outputs(model.get_submodule(name)) for name in layers),
        n_cached=2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or n_heads) * head_size,
        n_hidden=text.hidden_size,
        n_vocabulary=policy.vocabulary_size(model),
        max_length=policy.max_length(model.config),
        is_adapter=is_adapter,
    )


def _n_outputs(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, torch.nn.Linear) else layer.nf)


def _built(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"), policy.quietly():
            settings = AutoConfig.from_pretrained(folder, local_files_only=True)
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers can't build a causal language model from {folder}: {error}") from error


def _program(config: Config, *, n_rollouts: int) -> list[MemoryPart]:
    parts = [
        _part("trainer", "program", "machine", TRAINER_BYTES),
        _part("trainer", "rollouts", "machine", n_rollouts * ROLLOUT_BYTES),
    ]
    if config.engine.name == "local" and config.engine.process == "own":
        parts.append(_part("engine", "program", "machine", ENGINE_BYTES))
    return parts


def _trainer(shape: Shape, config: Config, memory: str, *, n_workers: int) -> list[MemoryPart]:
    trained = FLOAT * (shape.n_trained + _n_critic(shape, config))
    has_reference = config.trainer.kl_coefficient > 0 and not shape.is_adapter
    base = shape.n_parameters + (shape.n_trained if shape.is_adapter else 0)
    per_token = ACTIVATIONS * shape.n_outputs + LOGITS * SAMPLED * shape.n_vocabulary
    tokens = min(n_workers * config.trainer.micro_batch_tokens, _tokens_of_update(shape, config))
    return [
        _part("trainer", "weights", memory, FLOAT * base),
        _part("trainer", "gradients", memory, trained * (n_workers + 1)),
        _part("trainer", "optimizer", memory, 2 * trained),
        _part("trainer", "undo", memory, 3 * trained),
        _part("trainer", "reference", memory, FLOAT * shape.n_parameters * has_reference),
        _part("trainer", "activations", memory, int(FLOAT * per_token * tokens)),
    ]


def _tokens_of_update(shape: Shape, config: Config) -> int:
    """The most that one update reads."""
    settings = config.trainer
    return -(-settings.tasks_per_step * settings.group_size // settings.minibatches) * shape.max_length


def _engine(shape: Shape, config: Config, memory: str, *, n_rollouts: int) -> list[MemoryPart]:
    positions = n_rollouts * min(shape.max_length, config.limits.tokens)
    cache = min(FLOAT * shape.n_cached * positions, default_kv_bytes(policy.choose_device()))
    return [
        _part("engine", "weights", memory, FLOAT * shape.n_parameters),
        _part("engine", "arriving weights", memory, FLOAT * shape.n_published),
        _part("engine", "cache", memory, cache * 3 // 2),
        _part("engine", "sampling", memory, SAMPLING_BYTES * n_rollouts * shape.n_vocabulary),
    ]


def _part(process: str, name: str, memory: str, n_bytes: int) -> MemoryPart:
    return MemoryPart(process=process, name=name, memory=memory, n_bytes=n_bytes)


def _n_critic(shape: Shape, config: Config) -> int:
    """Numbers of the value head."""
    return shape.n_hidden * (shape.n_hidden + 2) if chosen(config.trainer).critic is not None else 0


def _free(on_gpu: bool) -> dict[str, int]:
    """What may be taken; what this process holds already is part of what it will hold."""
    free: dict[str, int] = {}
    available = available_bytes()
    if available is not None:
        free["machine"] = available + (resident_bytes() or 0)
    if on_gpu:
        free["gpu"] = torch.cuda.mem_get_info()[0]
    return free


def _disk(shape: Shape, config: Config) -> int:
    """The kept checkpoints and one being written, each of weights and two moments; the policy and an older one."""
    checkpoint = 3 * FLOAT * (shape.n_trained + _n_critic(shape, config))
    return checkpoint * (config.checkpoint.keep + 1) + 2 * FLOAT * shape.n_parameters


def _remedies(shape: Shape, config: Config) -> tuple[str, ...]:
    """What to try, the first thing first."""
    fewer = max(256, config.trainer.micro_batch_tokens // 8)
    steps = [
        ('trainer.adapter = "lora"', not shape.is_adapter),
        (f"trainer.micro_batch_tokens = {fewer}", fewer < config.trainer.micro_batch_tokens),
        (f"engine.concurrency = {config.engine.concurrency // 8}", config.engine.concurrency >= 64),
        ("a smaller model", True),
    ]
    return tuple(step for step, helps in steps if helps)


def _note(shape: Shape, config: Config) -> str:
    return (
        f"The model has {shape.n_parameters:,} parameters, more than trainer.adapter_above "
        f"({config.trainer.adapter_above:,}): a LoRA adapter of {shape.n_trained:,} is trained. "
        'trainer.adapter = "none" trains them all.'
    )
