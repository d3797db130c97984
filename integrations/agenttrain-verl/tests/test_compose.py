"""A plan to veRL's whole configuration, which veRL itself has checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.errors import ConfigError
from omegaconf import OmegaConf

from agenttrain_verl import overrides
from agenttrain_verl.compose import compose, environment_variables, file_log
from agenttrain_verl.plan import Plan

PlanOf = Callable[..., Plan]
RUN = Path("/runs/order-desk-7")
ON_GPUS = {"device": "cuda", "ranks_per_node": 8}


def at(plan: Plan, *keys: str) -> tuple[Any, ...]:
    """Some keys of a plan's configuration."""
    config = compose(plan, run_dir=RUN)
    return tuple(OmegaConf.select(config, key, throw_on_missing=False) for key in keys)


def test_a_step_is_our_tasks_in_our_groups(plan_with: PlanOf) -> None:
    plan = plan_with(trainer={"tasks_per_step": 5, "group_size": 3, "minibatches": 2, "epochs": 4, "steps": 7})
    actor = "actor_rollout_ref.actor"
    keys = (
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        f"{actor}.ppo_mini_batch_size",
        f"{actor}.ppo_epochs",
    )
    assert at(plan, *keys, "trainer.total_training_steps") == (5, 3, 3, 4, 7)


def test_the_run_is_the_experiment_and_nothing_is_done_on_verls_own_account(plan_with: PlanOf) -> None:
    keys = ("experiment_name", "logger", "resume_mode", "val_before_train", "save_freq", "test_freq", "device")
    seen = at(plan_with(), *(f"trainer.{key}" for key in keys))
    assert seen == ("order-desk-7", ["file"], "disable", False, -1, -1, "cpu")
    assert at(plan_with(), "reward.num_workers", "transfer_queue.enable") == (0, True)


@pytest.mark.parametrize(
    ("algorithm", "estimator", "by_std", "mean", "factor", "loss"),
    [
        ("grpo", "grpo", True, "token-mean", None, "vanilla"),
        ("dr_grpo", "grpo", False, "seq-mean-token-sum-norm", 640, "vanilla"),
        ("rloo", "agenttrain", False, "token-mean", None, "vanilla"),
        ("gspo", "grpo", True, "token-sum", None, "gspo"),
    ],
)
def test_each_algorithm(
    plan_with: PlanOf, algorithm: str, estimator: str, by_std: bool, mean: str, factor: int | None, loss: str
) -> None:
    plan = plan_with(trainer={"algorithm": algorithm}, limits={"tokens": 640})
    actor = "actor_rollout_ref.actor"
    keys = (f"{actor}.loss_agg_mode", f"{actor}.loss_scale_factor", f"{actor}.policy_loss.loss_mode")
    assert at(plan, "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", *keys, "critic.enable") == (
        (estimator, by_std, mean, factor, loss, False)
    )


def test_ppo_has_a_critic_on_the_same_model(plan_with: PlanOf, model: Path) -> None:
    plan = plan_with(trainer={"algorithm": "ppo", "discount": 0.9, "gae_lambda": 0.8, "value_clip": 0.3})
    keys = ("enable", "model.path", "cliprange_value", "strategy", "fsdp.mixed_precision.param_dtype")
    assert at(plan, *(f"critic.{key}" for key in keys)) == (True, str(model), 0.3, "fsdp2", "fp32")
    assert at(plan, "algorithm.gamma", "algorithm.lam", "critic.optim.lr") == (0.9, 0.8, 0.01)
    assert at(plan, "critic.optim.lr_scheduler_type", "critic.optim.lr_warmup_steps") == ("constant", 0)


@pytest.mark.parametrize(("steps", "first"), [(0, 0), (2, 3)])
def test_the_actor_waits_for_the_critic(plan_with: PlanOf, steps: int, first: int) -> None:
    """veRL's number is the first step in which the actor learns."""
    plan = plan_with(trainer={"algorithm": "ppo", "critic_warmup_steps": steps})
    assert at(plan, "trainer.critic_warmup") == (first,)


def test_the_learning_rate_step_by_step(plan_with: PlanOf) -> None:
    """veRL's own schedule: as warm as the local trainer's at first, and as low at the end."""
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    trainer = {"steps": 6, "learning_rate": 2.0, "warmup_steps": 2, "final_learning_rate": 0.1}
    optim = compose(plan_with(trainer=trainer), run_dir=RUN).actor_rollout_ref.actor.optim
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    schedule = get_cosine_schedule_with_warmup(
        optimizer,
        optim.lr_warmup_steps,
        optim.total_training_steps,
        min_lr_ratio=optim.min_lr_ratio,
        zero_indexed_step=optim.zero_indexed_step,
    )
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    half = [2.0 * (0.55 + 0.45 * math.cos(math.pi * n / 4)) for n in range(1, 5)]
    assert rates == pytest.approx([1.0, 2.0, *half])
    assert rates[-1] == pytest.approx(0.2)


def test_on_the_cpu_passes_are_padded_in_float32(plan_with: PlanOf) -> None:
    model, fsdp = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
    keys = (f"{model}.override_config.attn_implementation", f"{model}.use_remove_padding")
    assert at(plan_with(), *keys, f"{fsdp}.mixed_precision.param_dtype", f"{fsdp}.use_torch_compile") == (
        ("sdpa", False, "fp32", False)
    )


def test_the_longest_trajectory_fits_into_a_pass(plan_with: PlanOf) -> None:
    plan = plan_with(trainer={"micro_batch_tokens": 1})
    keys = ("actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu")
    assert at(plan, *(f"actor_rollout_ref.{key}" for key in keys)) == (plan.max_length, plan.max_length)


def test_there_is_no_second_clip(plan_with: PlanOf) -> None:
    """veRL holds a log ratio under 20: the bound is never met."""
    bound, low, high = at(plan_with(), *(f"actor_rollout_ref.actor.clip_ratio_{key}" for key in ("c", "low", "high")))
    assert bound > math.exp(20)
    assert (low, high) == (0.2, 0.28)


def test_distance_from_the_base_is_a_term_of_the_loss(plan_with: PlanOf) -> None:
    plan = plan_with(trainer={"kl_coefficient": 0.05})
    keys = ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    assert at(plan, *(f"actor_rollout_ref.actor.{key}" for key in keys)) == (True, 0.05, "low_var_kl")
    assert at(plan, "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype") == ("fp32",)


@pytest.mark.parametrize(("correction", "over"), [("none", "token"), ("token", "token"), ("sequence", "sequence")])
def test_importance_weights(plan_with: PlanOf, correction: str, over: str) -> None:
    plan = plan_with(trainer={"importance_cap": 3.0}, verl={"correction": correction})
    keys = ("rollout_is", "rollout_is_threshold", "bypass_mode")
    assert at(plan, *(f"algorithm.rollout_correction.{key}" for key in keys)) == (over, 3.0, False)


def test_an_adapter_goes_out_merged(plan_with: PlanOf) -> None:
    plan = plan_with(trainer={"adapter": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_targets": ["q_proj"]})
    keys = ("lora_rank", "lora_alpha", "target_modules", "lora.merge")
    assert at(plan, *(f"actor_rollout_ref.model.{key}" for key in keys)) == (4, 8, ["q_proj"], True)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_staleness_is_bounded_and_waited_for(plan_with: PlanOf, mode: str) -> None:
    """veRL counts the versions that a rollout spans, of which a fresh one has 1."""
    plan = plan_with(verl={"mode": mode, "max_staleness": 2})
    keys = ("trainer_mode", f"{mode}.num_warmup_batches", "sampler.max_off_policy_threshold")
    assert at(plan, *(f"trainer.v1.{key}" for key in keys), "trainer.v1.sampler.max_off_policy_strategy") == (
        (mode, 2, 3, "wait")
    )


def test_engines_apart_take_weights_through_the_mailbox(plan_with: PlanOf) -> None:
    plan = plan_with(verl={"mode": "separate_async", "replicas": 3}, trainer={"tasks_per_step": 6})
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.nnodes", f"{rollout}.n_gpus_per_node", f"{rollout}.checkpoint_engine.backend")
    module = f"{rollout}.checkpoint_engine.custom_backend_module"
    assert at(plan, "actor_rollout_ref.hybrid_engine", *keys, module) == (
        (False, 1, 3, "agenttrain", "agenttrain_verl.mailbox")
    )
    assert at(plan, "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size") == (6, 6)


def test_engines_apart_on_gpus_take_weights_by_nccl(plan_with: PlanOf) -> None:
    plan = plan_with(verl=ON_GPUS | {"mode": "separate_async"})
    assert at(plan, "actor_rollout_ref.rollout.checkpoint_engine.backend") == ("nccl",)


def test_verls_own_sglang_on_gpus(plan_with: PlanOf) -> None:
    plan = plan_with(verl=ON_GPUS | {"rollout": "stock", "tensor_parallel": 2})
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.name", f"{rollout}.tensor_model_parallel_size", f"{rollout}.free_cache_engine")
    more = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "trainer.n_gpus_per_node")
    assert at(plan, *keys, *more) == ("sglang", 2, True, "bf16", 8)


def test_megatron_replays_the_engines_experts(plan_with: PlanOf, tmp_path: Path) -> None:
    """Composed and checked by veRL's configuration; Megatron itself isn't needed for that."""
    from agenttrain.testing import tiny_model

    mixture = tiny_model(tmp_path / "mixture", experts=4)
    plan = plan_with(model=mixture, verl=ON_GPUS | {"strategy": "megatron", "rollout": "stock"})
    actor = "actor_rollout_ref.actor"
    keys = (f"{actor}.strategy", f"{actor}.megatron.router_replay.mode", f"{actor}.megatron.dtype")
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert at(plan, *keys, replay) == ("megatron", "R3", "bfloat16", True)
    assert at(plan, f"{actor}.optim.lr_decay_style", f"{actor}.optim.min_lr") == ("cosine", pytest.approx(1e-6))


def test_the_users_word_is_the_last(plan_with: PlanOf) -> None:
    table = {"actor_rollout_ref": {"actor": {"entropy_coeff": 0.01}}, "trainer.balance_batch": False}
    plan = plan_with(verl={"overrides": table})
    assert at(plan, "actor_rollout_ref.actor.entropy_coeff", "trainer.balance_batch") == (0.01, False)


def test_what_verl_refuses_is_told_as_our_error(plan_with: PlanOf) -> None:
    plan = plan_with(verl={"overrides": {"actor_rollout_ref.actor.optim.lr_scheduler_type": "linear"}})
    with pytest.raises(ConfigError, match=r"veRL refuses its configuration.*verl\.overrides"):
        compose(plan, run_dir=RUN)


def test_nothing_is_printed(plan_with: PlanOf, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is not veRL's."""
    compose(plan_with(), run_dir=RUN)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_the_keys_that_are_decided_are_verls(strategy: str) -> None:
    """A table of ours with a key that veRL no longer has would refuse nothing."""
    known = set(overrides._paths(overrides._known(strategy)))
    of_fsdp = {"actor_rollout_ref.actor.optim.min_lr_ratio"}
    assert not set(overrides.OWNED) - known - of_fsdp


def test_each_life_of_a_run_logs_into_a_file_of_its_own(tmp_path: Path, plan_with: PlanOf) -> None:
    """veRL empties the one that it opens."""
    assert file_log(tmp_path) == tmp_path / "verl" / "metrics.jsonl"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "metrics.jsonl").touch()
    variables = environment_variables(plan_with(), run_dir=tmp_path)
    assert variables["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "verl" / "metrics-2.jsonl")
    assert variables["VERL_PLATFORM"] == "cpu"


def test_a_gpu_run_names_no_platform(tmp_path: Path, plan_with: PlanOf) -> None:
    assert "VERL_PLATFORM" not in environment_variables(plan_with(verl=ON_GPUS), run_dir=tmp_path)
