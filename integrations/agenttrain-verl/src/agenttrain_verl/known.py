"""The functions of veRL that agenttrain patches, overrides or mirrors, known by the hash of their text.

Another text is another contract: a run on the CPU refuses it, and a test names it and what of ours to look at.
"""

from __future__ import annotations

import hashlib
import inspect
from importlib import import_module
from typing import Any, NamedTuple


class Known(NamedTuple):
    """What is known of one of veRL's functions or classes."""

    hash: str
    ours: str
    """Modules of agenttrain_verl that stand on it."""


KNOWN: dict[str, Known] = {
    "verl.checkpoint_engine.base.CheckpointEngine": Known("73cb52e9d55ebd33", "mailbox.py"),
    "verl.checkpoint_engine.base.CheckpointEngineManager": Known("40e472c69ba42d78", "mailbox.py"),
    "verl.experimental.agent_loop.agent_loop.AgentLoopBase.__init__": Known("d755aee88d61b525", "agent_loop.py"),
    "verl.experimental.agent_loop.agent_loop.AgentLoopOutput": Known("1e8e6c66ec6df2dd", "emission.py"),
    "verl.plugin.platform.platform_base.PlatformBase": Known("a601d9376999a392", "cpu/platform.py"),
    "verl.trainer.ppo.core_algos.agg_loss": Known("1336d83390e3a99f", "algorithms.py, counted.py"),
    "verl.trainer.ppo.core_algos.compute_grpo_outcome_advantage": Known(
        "2ef74eb0c08982a3", "algorithms.py, counted.py"
    ),
    "verl.trainer.ppo.core_algos.compute_policy_loss_gspo": Known("d5adb22873492e7c", "algorithms.py, counted.py"),
    "verl.trainer.ppo.core_algos.compute_policy_loss_vanilla": Known("bb3b3e15c17bde54", "algorithms.py"),
    "verl.trainer.ppo.utils.need_critic": Known("8ce98f89948e2f16", "compose.py"),
    "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ": Known("a48c475358687a56", "rollout_workers.py"),
    "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ": Known("70ad58a0c8a2d130", "rollout_worker.py, emission.py"),
    "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer": Known("3f19543bcb3a27fd", "controller.py"),
    "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync": Known("2bb6a4d5c3327868", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._add_prompts_to_generate": Known("49c923fd1a9c5eca", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._balance_batch": Known("eaf152f6daf9ac9c", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage": Known(
        "a6d4f49dadeddba4", "counted.py, credit.py"
    ),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics": Known("7f628f0cf9249d66", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob": Known("9b9d6148ad128a41", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_ref_log_prob": Known("eee47bc691a730db", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_values": Known("73b2402116407bf2", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._get_required_batch_multiple": Known("c11aa321bfe4e725", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._init_dataloader": Known("014b436dbe079c73", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint": Known("d0974aa2006c7142", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._reissue_inflight_prompts": Known("529db5a27b2b19f9", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint": Known("7110c6efa85b2264", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup": Known("9775c7c36a849517", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._step_once": Known("d25a3812c294f48b", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor": Known("2619d15f35b9f432", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_critic": Known("8063904dd0bd9ea5", "counted.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit": Known("16b045b1e5e2e3f8", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.prepare_step": Known("f315301e3ff4c6cb", "controller.py"),
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.step": Known("c9e342cf9e583bfd", "controller.py"),
    "verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync": Known("7a801f64e2b4046d", "controller.py"),
    "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync": Known("acf559cd4401449f", "controller.py"),
    "verl.trainer.ppo.v1.utils.compute_advantage_for_multi_trajectories": Known(
        "93a418f9178ebb0f", "counted.py, credit.py"
    ),
    "verl.utils.config.validate_config": Known("d8b52d9f4511fb6d", "compose.py"),
    "verl.utils.distributed.initialize_global_process_group_ray": Known("be1461fddc37cf40", "cpu/patches.py"),
    "verl.utils.model.load_valuehead_model": Known("2ee3a10f1faec308", "cpu/patches.py"),
    "verl.utils.seqlen_balancing.rearrange_micro_batches": Known("fd268b167add6daf", "compose.py, counted.py"),
    "verl.utils.torch_functional.get_cosine_schedule_with_warmup": Known("d3ab587692b51e80", "compose.py"),
    "verl.utils.torch_functional.logprobs_from_logits_v2": Known("4d8e7abba7a4256f", "cpu/patches.py"),
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_fsdp_module": Known(
        "4e22f21917a27f73", "cpu/engines.py"
    ),
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._merged_lora_per_tensor_param": Known(
        "0dc3588761a7f1c6", "cpu/engines.py"
    ),
    "verl.workers.engine_workers.ActorRolloutRefWorker.update_weights": Known(
        "9a1b76ac5c8f21c9", "weight_push.py, mailbox.py"
    ),
    "verl.workers.engine_workers.TrainingWorker.train_mini_batch": Known("4467055ecaae77dc", "counted.py"),
    "verl.workers.rollout.base.BaseRollout": Known("6f58de6815e40be7", "weight_push.py"),
    "verl.workers.rollout.llm_server.FullyAsyncLLMServerClient": Known("ba4cd05e3cb8e1c9", "turn_client.py"),
    "verl.workers.rollout.llm_server.LLMServerClient": Known("226fcfdabc1764dd", "turn_client.py"),
    "verl.workers.rollout.replica.RolloutReplica": Known("0e140ff8c04766bc", "replica.py"),
    "verl.workers.rollout.replica.TokenOutput": Known("86478c660933f6e6", "engine_server.py, turn_client.py"),
    "verl.workers.utils.losses.ppo_loss": Known("c32c613c21c8a9f6", "algorithms.py, counted.py"),
    "verl.workers.utils.losses.value_loss": Known("085ec97f370b5d82", "algorithms.py, counted.py"),
}
"""Dotted name, of veRL 0.9.1."""


def changed(*names: str) -> list[str]:
    """Those of some names whose text is not the known one, or that are gone."""
    return [name for name in names if text_hash(name) != KNOWN[name].hash]


def text_hash(name: str) -> str | None:
    """The hash of a function's or class's text, whatever its indentation and blank lines. None: it isn't there."""
    try:
        source = inspect.getsource(_undecorated(_found(name)))
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _found(name: str) -> Any:
    """The module is the longest beginning of the name that can be imported."""
    module, _, rest = name.rpartition(".")
    path = [rest]
    while True:
        try:
            found: Any = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, rest = module.rpartition(".")
            if not module:
                raise
            path.insert(0, rest)
    for part in path:
        found = getattr(found, part)
    return found


def _undecorated(found: Any) -> Any:
    """The function inside functools.wraps; the class inside one of Ray's actor classes."""
    of_actor = getattr(found, "__ray_metadata__", None)
    return of_actor.modified_class.__ray_actor_class__ if of_actor is not None else inspect.unwrap(found)
