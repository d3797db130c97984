"""A run's configuration to a plan, and everything that is refused before Ray starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agenttrain.errors import ConfigError, ModelError

from agenttrain_verl.plan import Plan, check_plan

PlanOf = Callable[..., Plan]


def test_the_smallest_plan(plan_with: PlanOf) -> None:
    plan = plan_with()
    assert (plan.device, plan.n_ranks, plan.n_replicas, plan.n_rollout_workers) == ("cpu", 1, 1, 1)
    assert (plan.dtype, plan.adapter_rank, plan.n_devices) == ("float32", None, 1)


def test_positions_come_from_the_models_configuration(plan_with: PlanOf, model: Path) -> None:
    stated = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert plan_with().max_length == stated


def test_engines_beside_the_trainer_have_devices_of_their_own(plan_with: PlanOf) -> None:
    plan = plan_with(verl={"mode": "separate_async", "replicas": 2, "ranks_per_node": 2})
    assert (plan.n_ranks, plan.n_replicas, plan.n_devices) == (2, 2, 4)


def test_one_engine_for_each_rank(plan_with: PlanOf) -> None:
    assert plan_with(verl={"nodes": 2, "ranks_per_node": 3}).n_replicas == 6


def test_an_adapter_when_asked_for_or_when_the_model_is_large(plan_with: PlanOf) -> None:
    assert plan_with(trainer={"adapter": "lora", "lora_rank": 4}).adapter_rank == 4
    assert plan_with(trainer={"adapter_above": 10}).adapter_rank == 16
    assert plan_with(trainer={"adapter": "none", "adapter_above": 10}).adapter_rank is None


def test_workers_of_a_cluster_are_one_per_node(plan_with: PlanOf) -> None:
    plan = plan_with(verl={"address": "auto", "device": "cuda", "ranks_per_node": 8, "nodes": 2})
    assert (plan.n_rollout_workers, plan.n_ranks, plan.dtype) == (None, 16, "bfloat16")


def test_notes_say_where_it_runs_and_what_it_needs(plan_with: PlanOf) -> None:
    assert check_plan(plan_with(engine={"name": "sglang"})) == (
        "training: veRL 0.9.1 on this machine's CPU, mode sync: 1 trainer rank, rollouts by 1 engine (sglang)",
        "veRL starts about 8 processes, 5 to 7 GiB beside the model",
    )


def test_notes_of_an_adapter(plan_with: PlanOf) -> None:
    notes = check_plan(plan_with(trainer={"adapter": "lora"}))
    assert "an adapter of rank 16 is trained; engines get merged weights" in notes


def test_planning_imports_neither_verl_nor_ray() -> None:
    """They take seconds, and may be missing."""
    modules = "plan, plugin, settings, algorithms, versions, overrides"
    heavy = "[name for name in ('verl', 'ray', 'torch') if name in sys.modules]"
    code = f"import sys; from agenttrain_verl import {modules}; print({heavy})"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


STOCK = {"rollout": "stock", "device": "cuda", "ranks_per_node": 4}


@pytest.mark.parametrize(
    ("tables", "seen", "instead"),
    [
        ({"run": {"deterministic": True}}, "run.deterministic", "--trainer local"),
        ({"verl": {"rollout": "stock"}}, "runs on GPUs alone", "--engine sglang"),
        ({"verl": STOCK, "engine": {"name": "sglang"}}, 'engine.name is "sglang"', "Leave --engine sglang out"),
        ({"verl": STOCK | {"tensor_parallel": 3}}, "4 ranks can't be dealt", "a divisor"),
        ({"verl": {"tensor_parallel": 2}}, "one engine per rank", "sglang.tensor_parallel"),
        ({"verl": {"strategy": "megatron"}}, "runs on GPUs alone", "fsdp2"),
        (
            {"verl": {"strategy": "megatron", "device": "cuda", "ranks_per_node": 1, "dtype": "float32"}},
            "16 bits alone",
            "Leave verl.dtype",
        ),
        ({"verl": {"correction": "token"}}, "trainer.importance_cap isn't set", "trainer.importance_cap = 2.0"),
        ({"trainer": {"minibatches": 200}}, "16 × 8 rollouts", "at most that"),
        ({"verl": {"ranks_per_node": 8}, "trainer": {"tasks_per_step": 2, "group_size": 2}}, "a step of 4", "lower"),
    ],
)
def test_what_can_not_work(plan_with: PlanOf, tables: dict[str, dict[str, object]], seen: str, instead: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_with(**tables)
    assert seen in str(error.value)
    assert instead in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer": {"use_v1": False}}, "main_ppo_v0 and fully_async_policy don't"),
        ({"actor_rollout_ref.rollout.n": 4}, "Leave it out, and use trainer.group_size"),
        ({"data": {"train_batch_size": 4}}, "Leave it out, and use trainer.tasks_per_step"),
        ({"algorithm": {"adv_estimator": "rloo"}}, "use trainer.algorithm or trainer.advantage"),
        ({"algorithm": {"rollout_correction": {"bypass_mode": True}}}, "drops its own correction"),
        ({"actor_rollout_ref": {"rollout": {"top_p": 0.9}}}, "log probabilities would not be the policy's"),
        ({"async_training": {"staleness_threshold": 1}}, 'verl.mode = "separate_async"'),
    ],
)
def test_keys_that_agenttrain_decides(plan_with: PlanOf, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"verl\.overrides sets") as error:
        plan_with(verl={"overrides": overrides})
    assert message in str(error.value)


def test_weights_are_published_once_a_step(plan_with: PlanOf) -> None:
    overrides = {"trainer": {"v1": {"separate_async": {"parameter_sync_step": 4}}}}
    with pytest.raises(ConfigError, match="agenttrain publishes weights once a step"):
        plan_with(verl={"mode": "separate_async", "overrides": overrides})


def test_a_key_that_verl_does_not_have(plan_with: PlanOf) -> None:
    plan = plan_with(verl={"overrides": {"actor_rollout_ref": {"actor": {"entropy_coef": 0.01}}}})
    with pytest.raises(ConfigError, match=r"Did you mean actor_rollout_ref\.actor\.entropy_coeff\?"):
        check_plan(plan)


def test_keys_of_open_tables_are_taken(plan_with: PlanOf) -> None:
    """veRL lists no keys of what it hands on to others."""
    check_plan(plan_with(verl={"overrides": {"actor_rollout_ref.model.override_config.rope_theta": 1e6}}))


def test_a_folder_without_configuration(plan_with: PlanOf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        plan_with(model=tmp_path)


def test_a_model_of_unknown_length(plan_with: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ModelError, match="Add max_position_embeddings"):
        plan_with(model=tmp_path)
