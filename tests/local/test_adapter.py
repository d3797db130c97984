"""A LoRA adapter: it learns, the base stays as it was, and every other program sees plain weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agenttrain.config import Config
from agenttrain.errors import ConfigError, RunError
from agenttrain.local.adapter import Adapter, adapted_layers, open_learnable
from agenttrain.local.engine import LocalEngine
from agenttrain.local.learnable import Learnable, unique_weights
from agenttrain.local.plugin import make_engine
from agenttrain.local.trainer import LocalTrainer
from agenttrain.protocols import EngineContext
from agenttrain.records import Sampling
from agenttrain.testing import OddOnes, tiny_model

pytestmark = pytest.mark.slow

Folder = Callable[[str], Path]
CPU = torch.device("cpu")
LORA: dict[str, Any] = {"adapter": "lora", "lora_rank": 8, "lora_alpha": 32}
GREEDY = Sampling(temperature=0, max_tokens=12, seed=0, stop_ids=())


@contextmanager
def opened(folder: Path, *, deterministic: bool = False, **settings: Any) -> Iterator[LocalTrainer]:
    chosen = {"steps": 8, "tasks_per_step": 4, "group_size": 8, "learning_rate": 5e-2} | LORA | settings
    context = OddOnes(model=folder).context(
        lambda c: LocalEngine(c.model, one_at_a_time=deterministic),
        trainer=chosen,
        run={"deterministic": deterministic},
    )
    trainer = LocalTrainer(context)
    try:
        yield trainer
    finally:
        trainer.close()


def learnable(folder: Path, **settings: Any) -> Learnable:
    config = Config(trainer=LORA | settings)  # type: ignore[arg-type]
    return open_learnable(folder, device=CPU, config=config)


def stirred(folder: Path, **settings: Any) -> Adapter:
    """An adapter that does something."""
    adapter = learnable(folder, **settings)
    assert isinstance(adapter, Adapter)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


def base_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {
        name.replace(".base_layer", ""): tensor.clone()
        for name, tensor in unique_weights(trainer._learnable.model).items()
        if ".lora_" not in name
    }


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[5, 6, 7, 8, 9, 10]])).logits
    return logits


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma3", "mamba"])
def test_learns_with_the_base_frozen_and_agrees_with_the_engine(architecture: str, model_folder: Folder) -> None:
    """The engine has merged weights, the trainer the base and the adapter: one log probability."""
    steps = 8 if architecture == "qwen3" else 2
    before = load_file(model_folder(architecture) / "model.safetensors")
    with opened(model_folder(architecture), steps=steps) as trainer:
        done = list(trainer.steps())
        after = base_of(trainer)
        group = trainer._learner.optimizer.param_groups[0]["params"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert max(step.metrics["logprob_gap_max"] for step in done) < 1e-4
    assert sum(p.numel() for p in group) == trainer.n_trained_parameters < trainer.n_parameters
    if architecture == "qwen3":
        assert done[-1].metrics["reward"] > done[0].metrics["reward"] + 0.2


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "ppo"])
def test_the_distance_to_the_reference_begins_at_nothing(algorithm: str, model_folder: Folder) -> None:
    """And grows as the adapter learns, whatever the algorithm: the base itself is the reference."""
    settings = {"algorithm": algorithm, "kl_coefficient": 0.01, "steps": 3}
    with opened(model_folder("qwen3"), **settings) as trainer:
        distances = [step.metrics["kl_mean"] for step in trainer.steps()]
    assert abs(distances[0]) < 1e-6 < distances[-1]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma3"])
def test_what_is_published_is_the_base_merged_as_peft_merges_it(architecture: str, model_folder: Folder) -> None:
    """Only the adapted layers, by the names of the base; and the model with them answers as the adapter does."""
    adapter = stirred(model_folder(architecture))
    published = dict(adapter.published())
    plain = AutoModelForCausalLM.from_pretrained(model_folder(architecture))
    assert published.keys() == {f"{name}.weight" for name in adapted_layers(plain, [])}
    plain.load_state_dict(published, strict=False)
    assert float((logits_of(plain) - logits_of(adapter.model)).abs().max()) < 2e-5
    for name, weight in published.items():
        layer = adapter.model.get_submodule(name.removesuffix(".weight"))
        layer.merge()
        assert float((layer.base_layer.weight - weight).abs().max()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("process", ["shared", "own"])
def test_an_engine_takes_the_adapted_layers_alone(process: str, model_folder: Folder) -> None:
    """The others stay as they were, in an engine of this process and in one of its own."""
    adapter = stirred(model_folder("qwen3"))
    config = Config(engine={"process": process})  # type: ignore[arg-type]
    engine = make_engine(EngineContext(config=config, model=str(model_folder("qwen3"))))
    try:
        engine.update_weights(adapter.published().items(), 1)
        answer = engine.generate((5, 6, 7), GREEDY, session="x").result()
    finally:
        engine.close()
    ids = torch.tensor([[5, 6, 7, *answer.token_ids]])
    with torch.no_grad():
        logprobs = adapter.model(ids).logits[0, 2:-1].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == list(answer.token_ids)
    expected = logprobs.max(-1).values.tolist()
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 on transformers 5.24
def test_an_export_is_a_plain_folder_with_the_adapter_beside(tmp_path: Path) -> None:
    """transformers alone reads the one, peft on the base the other, and both answer as the engine does."""
    from peft import PeftModel

    base, out = tiny_model(tmp_path / "base"), tmp_path / "policy"
    with opened(base, steps=2) as trainer:
        list(trainer.steps())
        trainer.export(out)
        answer = trainer._engine.generate((5, 6, 7), GREEDY, session="x").result()
        expected = logits_of(trainer._learnable.model)
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert plain.dtype == torch.float32
    assert not any("lora" in name for name in plain.state_dict())
    ids = plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert tuple(ids[0, 3:].tolist()) == answer.token_ids
    assert float((logits_of(plain) - expected).abs().max()) < 2e-5
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter").eval()
    assert float((logits_of(with_adapter) - expected).abs().max()) < 1e-6
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert load_file(out / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


@pytest.mark.slow
def test_resume_goes_on_to_the_last_bit(model_folder: Folder, tmp_path: Path) -> None:
    """And a checkpoint holds the adapter alone."""

    def trained(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in trainer._learnable.saved().items()}

    with opened(model_folder("qwen3"), steps=4, deterministic=True) as whole:
        list(whole.steps())
        expected = trained(whole)
    with opened(model_folder("qwen3"), steps=4, deterministic=True) as first:
        steps = first.steps()
        next(steps), next(steps)
        first.save(tmp_path / "checkpoint")
    with opened(model_folder("qwen3"), steps=4, deterministic=True) as second:
        second.restore(tmp_path / "checkpoint")
        assert [step.step for step in second.steps()] == [3, 4]
        after = trained(second)
    assert expected.keys() == after.keys()
    assert all(torch.equal(expected[name], after[name]) for name in expected)
    kept = load_file(tmp_path / "checkpoint" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in kept.values()) == second.n_trained_parameters


@pytest.mark.parametrize("changed", [{"lora_rank": 4}, {"adapter": "none"}, {"lora_targets": ["q_proj"]}])
def test_a_checkpoint_of_another_adapter_is_refused(
    changed: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    with opened(model_folder("qwen3")) as trainer:
        trainer.save(tmp_path / "checkpoint")
    with opened(model_folder("qwen3"), **changed) as other, pytest.raises(RunError, match="was written with adapter "):
        other.restore(tmp_path / "checkpoint")


def test_the_first_numbers_are_the_seeds(model_folder: Folder) -> None:
    """And the adapter changes nothing until it is trained."""
    first, second = learnable(model_folder("qwen3")), learnable(model_folder("qwen3"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))
    assert torch.equal(logits_of(first.model), logits_of(AutoModelForCausalLM.from_pretrained(first.folder)))


def test_layers_go_by_the_end_of_their_names(model_folder: Folder) -> None:
    adapter = learnable(model_folder("qwen3"), lora_targets=["q_proj", "mlp.down_proj"])
    assert adapter.adapter == {
        "kind": "lora",
        "rank": 8,
        "alpha": 32,
        "targets": ["down_proj", "q_proj"],
        "layers": 4,
    }
    assert len(adapter.published()) == 4


@pytest.mark.parametrize("target", ["query", "lm_head"])
def test_a_layer_that_the_model_has_not_is_refused_with_those_it_has(target: str, model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match=f"names '{target}', .*Its layers: down_proj, gate_proj, k_proj, o_proj, "):
        learnable(model_folder("llama"), lora_targets=["q_proj", target])


def test_the_reference_is_the_base_without_a_second_copy(model_folder: Folder) -> None:
    adapter = stirred(model_folder("qwen3"))
    plain = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    before = logits_of(adapter.model)
    with adapter.reference() as reference:
        assert reference.model is adapter.model
        assert torch.equal(logits_of(reference.model), logits_of(plain))
    assert torch.equal(logits_of(adapter.model), before)
    assert all(parameter.requires_grad for parameter in adapter.parameters)


@pytest.mark.parametrize(
    ("settings", "is_adapter"),
    [
        ({"adapter": "auto"}, False),
        ({"adapter": "auto", "adapter_above": 1000}, True),
        ({"adapter": "none", "adapter_above": 1000}, False),
        ({"adapter": "lora"}, True),
    ],
)
def test_a_large_model_gets_an_adapter(settings: dict[str, Any], is_adapter: bool, model_folder: Folder) -> None:
    chosen = learnable(model_folder("qwen3"), **settings)
    assert isinstance(chosen, Adapter) is is_adapter
    assert (chosen.adapter is not None) is is_adapter
    assert (chosen.n_trained_parameters < chosen.n_parameters) is is_adapter


NO_PEFT = """
import sys
from agenttrain.config import Config
from agenttrain.local.adapter import open_learnable
from agenttrain.local.policy import choose_device
open_learnable(sys.argv[1], device=choose_device(), config=Config()).export(__import__("pathlib").Path(sys.argv[2]))
print([name for name in sys.modules if name.split(".")[0] == "peft"])
"""


@pytest.mark.slow
def test_without_an_adapter_peft_is_not_imported(model_folder: Folder, tmp_path: Path) -> None:
    """It takes seconds."""
    command = [sys.executable, "-c", NO_PEFT, str(model_folder("qwen3")), str(tmp_path / "policy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.slow
def test_threads_share_one_adapter(model_folder: Folder) -> None:
    """Two threads of gradients sum to what one gives."""
    found = []
    for n_workers in (1, 2):
        with opened(model_folder("qwen3"), steps=2, deterministic=True) as trainer:
            trainer._learner._passes.n_workers = n_workers
            done = list(trainer.steps())
            found.append([step.metrics["grad_norm"] for step in done])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_dense_layers_of_a_mixture_are_adapted_and_its_experts_are_not(tmp_path: Path) -> None:
    """What learns is what is published: the linear layers, of the one dense layer too."""
    folder = tiny_model(tmp_path / "mixture", layers=3, experts=4)
    adapter = stirred(folder)
    dense = [f"model.layers.1.mlp.{name}.weight" for name in ("down_proj", "gate_proj", "up_proj")]
    published = adapter.published()
    assert sorted(name for name in published if ".mlp." in name) == dense
    assert len(published) == 3 * 4 + 3
    assert len(adapter.parameters) == 2 * len(published)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.load_state_dict(dict(published), strict=False)
    torch.testing.assert_close(logits_of(plain), logits_of(adapter.model), rtol=1e-4, atol=1e-4)


def test_the_adapters_folder_names_its_base(model_folder: Folder, tmp_path: Path) -> None:
    adapter = stirred(model_folder("qwen3"), lora_targets=["q_proj"])
    adapter.export(tmp_path / "policy")
    settings = json.loads((tmp_path / "policy" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model_folder("qwen3"))
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (8, 32, "LORA")
