"""veRL without a GPU: the platform, the patches, and a real update by veRL's own training worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.errors import TrainerError

from agenttrain_verl import known
from agenttrain_verl.compose import compose
from agenttrain_verl.cpu import environment_variables, install
from agenttrain_verl.plan import Plan

PlanOf = Callable[..., Plan]
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9]]
RESPONSES = [[10, 11, 12, 13], [14, 15], [16, 17, 18]]
MASKS = [[1, 0, 1, 1], [1, 1], [1, 1, 0]]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone, as veRL's ranks read it from the environment.

    veRL is imported first, as in its own processes: it then loads us, and we replace what its modules take from it.
    """
    import verl

    from agenttrain_verl.in_every_process import took_effect

    assert verl.__version__ == "0.9.1"
    assert took_effect() is None
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def test_the_platform_is_the_one_that_the_environment_names() -> None:
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_device_id, get_device_name

    from agenttrain_verl.cpu.platform import CpuPlatform

    assert environment_variables()["VERL_PLATFORM"] == "cpu"
    assert isinstance(get_platform(), CpuPlatform)
    assert (get_device_name(), get_device_id()) == ("cpu", torch.device("cpu"))


def test_the_platform_is_never_guessed() -> None:
    from agenttrain_verl.cpu.platform import CpuPlatform

    assert not CpuPlatform().is_platform_available(use_smi_check=True)


def test_memory_is_the_machines() -> None:
    from agenttrain_verl.cpu.platform import CpuPlatform

    free, whole = CpuPlatform().device_module.mem_get_info()
    assert 0 < free < whole


def test_patches_are_put_in_once() -> None:
    from verl.utils import distributed

    install()
    patched = distributed.initialize_global_process_group_ray
    install()
    assert distributed.initialize_global_process_group_ray is patched


def test_another_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from agenttrain_verl.cpu import patches

    name = "verl.utils.model.load_valuehead_model"
    monkeypatch.setitem(known.KNOWN, name, known.Known("0", "cpu/patches.py"))
    with pytest.raises(TrainerError, match=rf"has another {name}.*Install verl==0\.9\.1"):
        patches._check()


def test_log_probabilities_at_once_are_verls() -> None:
    from verl.utils.torch_functional import logprobs_from_logits_naive

    from agenttrain_verl.cpu import patches

    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7), torch.randint(0, 7, (5,))
    ours = patches.logprobs_from_logits(logits, labels)
    torch.testing.assert_close(ours, logprobs_from_logits_naive(logits, labels))


def nested(rows: list[list[Any]], dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def batch(**more: torch.Tensor) -> Any:
    """Three rows as veRL's trainer hands them to its worker."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    whole = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    rows = {
        "prompts": nested(PROMPTS),
        "responses": nested(RESPONSES),
        "response_mask": nested(MASKS),
        "loss_mask": nested(MASKS),
        "input_ids": nested(whole),
        "position_ids": nested([list(range(len(row))) for row in whole]),
        **more,
    }
    made = TensorDict(rows, batch_size=len(whole))
    tu.assign_non_tensor(
        made,
        temperature=1.0,
        global_batch_size=len(whole),
        pad_mode=DatasetPadMode.NO_PADDING,
        calculate_entropy=False,
        compute_loss=False,
    )
    return made


def worker(config: Any, kind: str = "language_model") -> Any:
    """veRL's TrainingWorker, made as its ActorRolloutRefWorker makes it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

    part = config.critic if kind == "value_model" else config.actor_rollout_ref.actor
    settings = omega_conf_to_dataclass(part)
    model = settings.model if kind == "value_model" else omega_conf_to_dataclass(config.actor_rollout_ref.model)
    made = TrainingWorkerConfig(
        model_type=kind,
        model_config=model,
        engine_config=settings.engine,
        optimizer_config=settings.optim,
        checkpoint_config=settings.checkpoint,
    )
    engine = made.engine_config
    engine.use_dynamic_bsz = True
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
    started = TrainingWorker(config=made)
    started.reset()
    started.set_loss_fn(partial(value_loss if kind == "value_model" else ppo_loss, config=settings))
    return started


def update(trained: Any, data: Any) -> dict[str, Any]:
    """One optimizer step."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, mini_batch_size=3, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    metrics: dict[str, Any] = tu.get(trained.train_mini_batch(data), "metrics")
    return metrics


def log_probabilities(trained: Any) -> torch.Tensor:
    from verl.workers.utils.padding import response_from_nested

    seen: torch.Tensor = response_from_nested(trained.infer_batch(batch())["log_probs"], nested(MASKS))
    return seen


def by_hand(model: Path) -> list[torch.Tensor]:
    """Log probabilities of the responses, by transformers alone."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            scores = policy(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        rows.append(scores[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0])
    return rows


def test_one_update_of_the_policy(plan_with: PlanOf, model: Path) -> None:
    """By the composed configuration: veRL's passes are the model's own, and what is rewarded becomes likelier."""
    trained = worker(compose(plan_with(trainer={"learning_rate": 1e-2}), run_dir=Path("/runs/one")))
    before = log_probabilities(trained)
    for seen, expected in zip(before.unbind(), by_hand(model), strict=True):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
    advantages = nested([[1.0] * 4, [-1.0] * 2, [0.0] * 3], torch.float32)
    metrics = update(trained, batch(old_log_probs=before, advantages=advantages))
    after = log_probabilities(trained)
    assert metrics["grad_norm"][0] > 0
    assert metrics["loss"][0] == pytest.approx(-(3 - 2) / 7)
    assert float((after[0] - before[0]).sum()) > 0 > float((after[1] - before[1]).sum())


def test_merged_weights_go_out_in_float32(plan_with: PlanOf) -> None:
    """veRL sends them in bfloat16; a rollout's log probabilities would be off by that."""
    plan = plan_with(trainer={"adapter": "lora", "lora_rank": 2})
    weights, adapter = worker(compose(plan, run_dir=Path("/runs/one"))).engine.get_per_tensor_param()
    sent = dict(weights)
    assert adapter is None
    assert {tensor.dtype for tensor in sent.values()} == {torch.float32}
    assert not [name for name in sent if "lora" in name]


def test_one_update_of_a_critic(plan_with: PlanOf) -> None:
    config = compose(plan_with(trainer={"algorithm": "ppo"}), run_dir=Path("/runs/one"))
    zeros = nested([[0.0] * len(row) for row in MASKS], torch.float32)
    ones = nested([[1.0] * len(row) for row in MASKS], torch.float32)
    metrics = update(worker(config, "value_model"), batch(values=zeros, returns=ones))
    assert metrics["grad_norm"][0] > 0


def test_a_reference_that_only_reads(plan_with: PlanOf, model: Path) -> None:
    """Its weights are offloaded, without pinned memory."""
    config = compose(plan_with(trainer={"kl_coefficient": 0.1}), run_dir=Path("/runs/one"))
    config.actor_rollout_ref.actor.fsdp_config.forward_only = True
    reference = worker(config)
    for seen, expected in zip(log_probabilities(reference).unbind(), by_hand(model), strict=True):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
