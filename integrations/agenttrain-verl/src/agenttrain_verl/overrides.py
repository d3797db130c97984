"""[verl.overrides]: which of veRL's keys a user may set, and whether veRL has them.

Keys that agenttrain decides are refused with the key of ours to use instead: set behind its back, they would count
rows as rollouts or move files that `--resume` looks for. Reads veRL's own key list from its files, and imports nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agenttrain.errors import ConfigError

OWNED = {
    "actor_rollout_ref.actor.clip_ratio_high": "trainer.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "trainer.clip_low",
    "actor_rollout_ref.actor.kl_loss_coef": "trainer.kl_coefficient",
    "actor_rollout_ref.actor.loss_agg_mode": "trainer.loss",
    "actor_rollout_ref.actor.loss_scale_factor": "limits.tokens",
    "actor_rollout_ref.actor.optim.lr": "trainer.learning_rate",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "trainer.algorithm",
    "actor_rollout_ref.actor.ppo_epochs": "trainer.epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.minibatches",
    "actor_rollout_ref.actor.strategy": "verl.strategy",
    "actor_rollout_ref.actor.use_kl_loss": "trainer.kl_coefficient",
    "actor_rollout_ref.hybrid_engine": "verl.mode",
    "actor_rollout_ref.model.lora_alpha": "trainer.lora_alpha",
    "actor_rollout_ref.model.lora_rank": "trainer.lora_rank",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "graph.py",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "graph.py",
    "actor_rollout_ref.rollout.agent.num_workers": "verl.rollout_workers",
    "actor_rollout_ref.rollout.calculate_log_probs": None,
    "actor_rollout_ref.rollout.n": "trainer.group_size",
    "actor_rollout_ref.rollout.name": "verl.rollout",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "verl.tensor_parallel",
    "actor_rollout_ref.rollout.top_k": None,
    "actor_rollout_ref.rollout.top_p": None,
    "algorithm.adv_estimator": "trainer.algorithm or trainer.advantage",
    "algorithm.filter_groups.enable": None,
    "algorithm.gamma": "trainer.discount",
    "algorithm.lam": "trainer.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "trainer.advantage",
    "algorithm.rollout_correction.bypass_mode": None,
    "algorithm.rollout_correction.rollout_is": "verl.correction",
    "algorithm.rollout_correction.rollout_is_threshold": "trainer.importance_cap",
    "algorithm.use_kl_in_reward": "trainer.kl_coefficient",
    "critic.enable": "trainer.algorithm",
    "data.gen_batch_size": "trainer.tasks_per_step",
    "data.seed": "seed",
    "data.train_batch_size": "trainer.tasks_per_step",
    "data.train_files": "tasks",
    "data.val_files": "tasks",
    "reward.custom_reward_function.path": "verifier= in graph.py",
    "trainer.default_local_dir": "checkpoint.every",
    "trainer.device": "verl.device",
    "trainer.experiment_name": None,
    "trainer.logger": "verl.loggers",
    "trainer.n_gpus_per_node": "verl.ranks_per_node",
    "trainer.nnodes": "verl.nodes",
    "trainer.resume_mode": "--resume",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.tasks",
    "trainer.total_epochs": "trainer.steps",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.use_v1": None,
    "trainer.v1.colocate_async.num_warmup_batches": "verl.max_staleness",
    "trainer.v1.sampler.custom_sampler.name": None,
    "trainer.v1.sampler.custom_sampler.path": None,
    "trainer.v1.sampler.max_off_policy_strategy": "verl.max_staleness",
    "trainer.v1.sampler.max_off_policy_threshold": "verl.max_staleness",
    "trainer.v1.sampler.sync_refill_failed_groups": None,
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": "verl.mode",
    "trainer.v1.separate_async.num_warmup_batches": "verl.max_staleness",
    "trainer.v1.trainer_mode": "verl.mode",
    "trainer.val_before_train": "eval.tasks",
    "transfer_queue.enable": None,
}
"""veRL's keys that agenttrain decides, to the key of ours that says the same. None: there is none."""
WHY = {
    "actor_rollout_ref.rollout.calculate_log_probs": "every trained token needs its log probability",
    "actor_rollout_ref.rollout.top_k": "log probabilities would not be the policy's",
    "actor_rollout_ref.rollout.top_p": "log probabilities would not be the policy's",
    "algorithm.filter_groups.enable": "groups that teach nothing are left out already, and every one is reported",
    "algorithm.rollout_correction.bypass_mode": "veRL's V1 trainer then drops its own correction (0.9.1)",
    "trainer.experiment_name": "it is the run's id",
    "trainer.v1.sampler.custom_sampler.name": "each step trains the groups of its own tasks",
    "trainer.v1.sampler.custom_sampler.path": "each step trains the groups of its own tasks",
    "trainer.v1.sampler.sync_refill_failed_groups": "each step trains the groups of its own tasks",
    "trainer.use_v1": "only veRL's V1 trainer takes several trajectories of one rollout; main_ppo_v0 and "
    "fully_async_policy don't",
    "transfer_queue.enable": "rollouts reach the trainer through it",
}
OPEN = ("mixed_precision", "override_optimizer_config", "override_transformer_config")
"""Tables that veRL reads whole, though its files don't list their keys."""


def refuse(overrides: Mapping[str, Any], *, strategy: str) -> None:
    """Refuse keys that agenttrain decides.

    Raises:
        ConfigError: one is set.
    """
    for key, _ in flat(overrides):
        if key in OWNED:
            ours = OWNED[key]
            instead = f"Leave it out, and use {ours}." if ours else "Leave it out."
            why = f": {WHY[key]}" if key in WHY else ""
            raise ConfigError(f"verl.overrides sets {key}, which agenttrain decides{why}. {instead}")
        if key.startswith("async_training.") or ".fully_async" in key:
            raise ConfigError(
                f"verl.overrides sets {key}, which is of veRL's fully_async_policy: it takes one trajectory of a "
                'rollout alone. Leave it out, and use verl.mode = "separate_async".'
            )


def refuse_unknown(overrides: Mapping[str, Any], *, strategy: str) -> None:
    """Refuse keys that the installed veRL doesn't have, with the likeliest that was meant.

    Raises:
        ConfigError: one is set.
    """
    known = _known(strategy)
    for key, _ in flat(overrides):
        if _unknown(key, known):
            near = difflib.get_close_matches(key, list(_paths(known)), n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"verl.overrides sets {key}, which veRL doesn't have.{meant} Mend it, or leave it out.")


def flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested tables, whether written as tables or with dots.

    Example: {"a": {"b": 1}, "c.d": 2} -> ("a.b", 1), ("c.d", 2)
    """
    for key, value in table.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def at(overrides: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key. None: it isn't set."""
    return dict(flat(overrides)).get(key)


def _known(strategy: str) -> Mapping[str, Any]:
    """veRL's own flattened configuration, which stands beside its sources (0.9.1)."""
    from omegaconf import OmegaConf

    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    name = "_generated_ppo_megatron_trainer" if strategy == "megatron" else "_generated_ppo_trainer"
    file = Path(spec.submodule_search_locations[0]) / "trainer" / "config" / f"{name}.yaml"
    tables = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(tables, dict)
    return tables


def _unknown(key: str, known: Mapping[str, Any]) -> bool:
    here: Any = known
    for part in key.split("."):
        if part in OPEN or here == {}:
            return False
        if not isinstance(here, Mapping) or part not in here:
            return True
        here = here[part]
    return False


def _paths(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}{key}.")
