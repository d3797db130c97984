"""A Plan to veRL's whole configuration: every key that agenttrain decides, then the user's overrides, checked by veRL.

Each section below is one part of veRL's tree as flat dotted keys. veRL's own defaults stand wherever nothing is said.
The result is resolved: no interpolation is left that a worker could read otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.errors import ConfigError
from agenttrain.trainer.algorithms import chosen
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from agenttrain_verl import cpu, overrides
from agenttrain_verl.needs import storage_units

if TYPE_CHECKING:
    from agenttrain_verl.plan import Plan

LOOP = "agenttrain"
"""Name of our agent loop, and of our replica."""
MAILBOX_MODULE = "agenttrain_verl.mailbox"
PROJECT = "agenttrain"
NO_DUAL_CLIP = 1e9
"""veRL clips a negative advantage's ratio a second time, at `clip_ratio_c`; it holds log ratios below 20, whose
exponential is under this (core_algos.py, 0.9.1)."""
MOST_SEEDS = 2**31
SHORT = {"float32": "fp32", "bfloat16": "bf16"}

Keys = dict[str, Any]


def compose(plan: Plan, *, run_dir: Path) -> DictConfig:
    """The configuration that veRL's trainer is made with.

    Args:
        run_dir: folder of the run; veRL writes nothing elsewhere.

    Raises:
        ConfigError: veRL refuses what verl.overrides says, or the whole.
    """
    config = copy.deepcopy(_defaults("ppo_megatron_trainer" if plan.settings.strategy == "megatron" else "ppo_trainer"))
    for part in (_data, _model, _actor, _reference, _rollout, _algorithm, _critic, _trainer, _services):
        for key, value in part(plan, run_dir).items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    _override(config, plan.settings.overrides)
    OmegaConf.resolve(config)
    _validate(config)
    return config


def environment_variables(plan: Plan, *, run_dir: Path) -> dict[str, str]:
    """What must be set, in the driver and in all of veRL's processes, before verl is imported."""
    variables = {
        "VERL_FILE_LOGGER_PATH": str(file_log(run_dir)),
        # PPOTrainerSeparateAsync logs with flush=True, which logging doesn't take: a TypeError where INFO is on
        # (trainer_separate_async.py:181, 0.9.1).
        "VERL_LOGGING_LEVEL": "WARN",
    }
    return variables | (cpu.environment_variables() if plan.device == "cpu" else {})


def file_log(run_dir: Path) -> Path:
    """Where veRL's file logger writes: a new file for each life of a run, since it empties the one it opens."""
    folder = run_dir / "verl"
    n = len(list(folder.glob("metrics*.jsonl")))
    return folder / (f"metrics-{n + 1}.jsonl" if n else "metrics.jsonl")


# ── veRL's tree, part by part ────────────────────────────────────────────────────────────────────────────────────────


def _data(plan: Plan, run_dir: Path) -> Keys:
    """Tasks come from agenttrain, so that there are no files; lengths bound what veRL's own server answers."""
    longest_response = min(plan.config.limits.tokens, plan.max_length - 1)
    return {
        "data.train_files": [],
        "data.val_files": [],
        "data.train_batch_size": plan.config.trainer.tasks_per_step,
        "data.max_prompt_length": plan.max_length - longest_response,
        "data.max_response_length": longest_response,
        "data.dataloader_num_workers": 0,
        "data.seed": _seed(plan),
    }


def _model(plan: Plan, run_dir: Path) -> Keys:
    trainer, model = plan.config.trainer, "actor_rollout_ref.model"
    keys = _of_model(plan, model)
    if plan.adapter_rank is not None:
        keys |= {
            f"{model}.lora_rank": plan.adapter_rank,
            f"{model}.lora_alpha": trainer.lora_alpha,
            f"{model}.target_modules": list(trainer.lora_targets) or "all-linear",
            f"{model}.lora.merge": True,
        }
        if plan.settings.strategy == "megatron":
            keys |= {f"{model}.lora.rank": plan.adapter_rank, f"{model}.lora.alpha": trainer.lora_alpha}
    return keys


def _of_model(plan: Plan, path: str) -> Keys:
    keys: Keys = {
        f"{path}.path": str(plan.model),
        f"{path}.enable_gradient_checkpointing": plan.device == "cuda",
        f"{path}.use_remove_padding": plan.device == "cuda",
    }
    if plan.device == "cpu":
        keys[f"{path}.override_config.attn_implementation"] = "sdpa"
    return keys


def _actor(plan: Plan, run_dir: Path) -> Keys:
    trainer, algorithm, actor = plan.config.trainer, plan.algorithm, "actor_rollout_ref.actor"
    return {
        f"{actor}.strategy": plan.settings.strategy,
        f"{actor}.ppo_mini_batch_size": _mini_batch(plan),
        f"{actor}.ppo_epochs": trainer.epochs,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": _most_tokens(plan),
        f"{actor}.clip_ratio": algorithm.clip_low,
        f"{actor}.clip_ratio_low": algorithm.clip_low,
        f"{actor}.clip_ratio_high": algorithm.clip_high,
        f"{actor}.clip_ratio_c": NO_DUAL_CLIP,
        f"{actor}.policy_loss.loss_mode": algorithm.policy_loss,
        f"{actor}.loss_agg_mode": algorithm.loss_agg_mode,
        f"{actor}.loss_scale_factor": plan.config.limits.tokens if algorithm.is_constant else None,
        f"{actor}.use_kl_loss": trainer.kl_coefficient > 0,
        f"{actor}.kl_loss_coef": trainer.kl_coefficient,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.use_torch_compile": plan.device == "cuda",
        f"{actor}.data_loader_seed": _seed(plan),
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra"],
        **_optimizer(plan, f"{actor}.optim", trainer.learning_rate),
        **_engine(plan, f"{actor}.{_engine_table(plan, 'fsdp_config')}"),
        **({f"{actor}.grad_clip": trainer.max_grad_norm} if plan.settings.strategy == "fsdp2" else {}),
        **(_routing_replay(plan) if plan.settings.strategy == "megatron" else {}),
    }


def _reference(plan: Plan, run_dir: Path) -> Keys:
    return _engine(plan, f"actor_rollout_ref.ref.{_engine_table(plan, 'fsdp_config')}")


def _optimizer(plan: Plan, path: str, peak: float) -> Keys:
    """AdamW with a warm-up and a cosine down to the final share.

    veRL has constant and cosine alone, where the local trainer's decay is linear: after the same warm-up this one is
    above it in the first half of a run and below in the second, and ends at the same rate. Steps count from 1, since
    from 0 the first update would be made at rate 0.
    """
    trainer = plan.config.trainer
    keys: Keys = {
        f"{path}.lr": peak,
        f"{path}.betas": [trainer.beta1, trainer.beta2],
        f"{path}.weight_decay": trainer.weight_decay,
        f"{path}.clip_grad": trainer.max_grad_norm,
        f"{path}.lr_warmup_steps": trainer.warmup_steps,
        f"{path}.total_training_steps": trainer.steps,
    }
    if plan.settings.strategy == "megatron":
        return keys | {
            f"{path}.lr_decay_style": "cosine",
            f"{path}.lr_decay_steps": trainer.steps,
            f"{path}.min_lr": peak * trainer.final_learning_rate,
        }
    return keys | {
        f"{path}.lr_scheduler_type": "cosine",
        f"{path}.min_lr_ratio": trainer.final_learning_rate,
        f"{path}.zero_indexed_step": False,
    }


def _constant_rate(plan: Plan, path: str) -> Keys:
    """One rate for the whole run, as the local trainer's critic has."""
    style = "lr_decay_style" if plan.settings.strategy == "megatron" else "lr_scheduler_type"
    return {f"{path}.{style}": "constant", f"{path}.lr_warmup_steps": 0}


def _engine_table(plan: Plan, of_fsdp: str) -> str:
    return "megatron" if plan.settings.strategy == "megatron" else of_fsdp


def _engine(plan: Plan, path: str) -> Keys:
    if plan.settings.strategy == "megatron":
        return {f"{path}.dtype": plan.dtype, f"{path}.seed": _seed(plan)}
    short = SHORT[plan.dtype]
    return {
        f"{path}.strategy": "fsdp2",
        f"{path}.dtype": plan.dtype,
        f"{path}.model_dtype": "fp32",
        f"{path}.mixed_precision": {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        f"{path}.use_torch_compile": plan.device == "cuda",
        f"{path}.seed": _seed(plan),
    }


def _routing_replay(plan: Plan) -> Keys:
    """R3: the experts that the engine chose, in the trainer's passes too (Megatron alone, 0.9.1)."""
    if not (plan.is_mixture and plan.config.trainer.replay_experts):
        return {}
    return {
        "actor_rollout_ref.actor.megatron.router_replay.mode": "R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    }


def _rollout(plan: Plan, run_dir: Path) -> Keys:
    settings, rollout = plan.settings, "actor_rollout_ref.rollout"
    stock, apart = settings.rollout == "stock", settings.mode == "separate_async"
    keys = {
        f"{rollout}.name": "sglang" if stock else LOOP,
        f"{rollout}.n": plan.config.trainer.group_size,
        f"{rollout}.temperature": plan.config.sampling.temperature,
        f"{rollout}.top_p": 1.0,
        f"{rollout}.top_k": -1,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.dtype": plan.dtype,
        f"{rollout}.seed": _seed(plan),
        f"{rollout}.max_model_len": plan.max_length,
        f"{rollout}.max_num_seqs": plan.config.engine.concurrency,
        f"{rollout}.tensor_model_parallel_size": settings.tensor_parallel,
        f"{rollout}.free_cache_engine": stock,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": _most_tokens(plan),
        f"{rollout}.agent.num_workers": plan.n_rollout_workers or settings.nodes,
        f"{rollout}.agent.default_agent_loop": LOOP,
        "actor_rollout_ref.hybrid_engine": not apart,
    }
    if apart:
        keys |= {
            f"{rollout}.nnodes": 1,
            f"{rollout}.n_gpus_per_node": plan.n_replicas * settings.tensor_parallel,
            f"{rollout}.checkpoint_engine.backend": LOOP if plan.device == "cpu" else "nccl",
            f"{rollout}.checkpoint_engine.custom_backend_module": MAILBOX_MODULE if plan.device == "cpu" else None,
        }
    return keys


def _algorithm(plan: Plan, run_dir: Path) -> Keys:
    trainer, settings, critic = plan.config.trainer, plan.settings, chosen(plan.config.trainer).critic
    keys = {
        "algorithm.adv_estimator": plan.algorithm.adv_estimator,
        "algorithm.norm_adv_by_std_in_grpo": plan.algorithm.norm_by_std,
        "algorithm.use_kl_in_reward": False,
        "algorithm.gamma": critic.discount if critic else 1.0,
        "algorithm.lam": critic.gae_lambda if critic else 1.0,
        "algorithm.rollout_correction.bypass_mode": False,
    }
    if trainer.importance_cap is not None:
        over = "token" if settings.correction == "none" else settings.correction
        keys |= {
            "algorithm.rollout_correction.rollout_is": over,
            "algorithm.rollout_correction.rollout_is_threshold": trainer.importance_cap,
        }
    return keys


def _critic(plan: Plan, run_dir: Path) -> Keys:
    critic, settings = chosen(plan.config.trainer).critic, plan.settings
    if critic is None:
        return {"critic.enable": False, "critic.model.path": str(plan.model)}
    return {
        "critic.enable": True,
        "critic.strategy": settings.strategy,
        "critic.cliprange_value": critic.value_clip,
        "critic.ppo_max_token_len_per_gpu": _most_tokens(plan),
        # What the trainer bounds the critic's passes by, of forward and of backward; in veRL's dataclass, and not in
        # its files (trainer_base.py, _setup, 0.9.1).
        "critic.ppo_infer_max_token_len_per_gpu": _most_tokens(plan),
        "critic.data_loader_seed": _seed(plan),
        "critic.checkpoint.save_contents": ["model", "optimizer", "extra"],
        **_of_model(plan, "critic.model"),
        **_optimizer(plan, "critic.optim", critic.value_learning_rate),
        **_constant_rate(plan, "critic.optim"),
        **_engine(plan, f"critic.{_engine_table(plan, 'fsdp')}"),
        # veRL's actor learns from step `critic_warmup` on, so that one step alone for the critic is a 2.
        "trainer.critic_warmup": critic.critic_warmup_steps + 1 if critic.critic_warmup_steps else 0,
    }


def _trainer(plan: Plan, run_dir: Path) -> Keys:
    settings, trainer = plan.settings, plan.config.trainer
    return {
        "trainer.device": plan.device,
        "trainer.nnodes": settings.nodes,
        "trainer.n_gpus_per_node": plan.ranks_per_node,
        "trainer.total_training_steps": trainer.steps,
        "trainer.total_epochs": trainer.steps,
        "trainer.project_name": PROJECT,
        "trainer.experiment_name": run_dir.name,
        "trainer.logger": list(settings.loggers),
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.use_v1": True,
        **_mode(plan),
    }


def _mode(plan: Plan) -> Keys:
    """How far rollouts may run ahead, in veRL's words; a step's groups are begun and waited for by `controller`."""
    mode, staleness = plan.settings.mode, plan.settings.max_staleness
    keys: Keys = {"trainer.v1.trainer_mode": mode}
    if mode == "sync":
        return keys
    keys |= {
        f"trainer.v1.{mode}.num_warmup_batches": staleness,
        "trainer.v1.sampler.max_off_policy_threshold": staleness + 1,  # veRL counts versions spanned: fresh is 1
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }
    if mode == "separate_async":
        keys["trainer.v1.separate_async.parameter_sync_step"] = 1
    return keys


def _services(plan: Plan, run_dir: Path) -> Keys:
    """Rewards come with the rollouts, so that no reward worker is started."""
    storage = "transfer_queue.backend.SimpleStorage"
    return {
        "reward.num_workers": 0,
        "transfer_queue.enable": True,
        f"{storage}.num_data_storage_units": storage_units(plan),
        f"{storage}.total_storage_size": None,  # a rollout may have any number of rows; each step's are cleared
    }


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _seed(plan: Plan) -> int:
    return plan.config.seed % MOST_SEEDS


def _mini_batch(plan: Plan) -> int:
    """Groups in one update, as veRL is told; `counted` deals the rollouts itself.

    separate_async asserts train_batch_size == parameter_sync_step × this (trainer_separate_async.py, 0.9.1).
    """
    n_tasks = plan.config.trainer.tasks_per_step
    return n_tasks if plan.settings.mode == "separate_async" else -(-n_tasks // plan.config.trainer.minibatches)


def _most_tokens(plan: Plan) -> int:
    """Tokens of one pass; the longest trajectory must fit, else rearrange_micro_batches asserts (0.9.1)."""
    return max(plan.config.trainer.micro_batch_tokens, plan.max_length)


# ── veRL's configuration as an object ────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _defaults(name: str) -> DictConfig:
    GlobalHydra.instance().clear()  # a user's graph may have initialised it; hydra refuses a second time
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return hydra_compose(config_name=name)


def _override(config: DictConfig, table: Mapping[str, Any]) -> None:
    for key, value in overrides.flat(table):
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, AttributeError, TypeError) as error:
            raise ConfigError(
                f"verl.overrides sets {key} to {value!r}, and veRL's configuration can't take it: {error}. Mend it, or "
                "leave it out."
            ) from None


def _validate(config: DictConfig) -> None:
    """Ask veRL itself; what it prints is dropped, for standard output is not veRL's."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with contextlib.redirect_stdout(io.StringIO()), open_dict(config):
        try:
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        except (AssertionError, ValueError, TypeError, OmegaConfBaseException, HydraException) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"veRL refuses its configuration: {said}. Look at verl.overrides first.") from error
