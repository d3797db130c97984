"""A whole fit of a model that is large enough for an adapter, by a lowered bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agenttrain import hookimpl
from agenttrain.protocols import AdapterWeights
from agenttrain.testing import tiny_model, toy_project


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 on transformers 5.24
def test_a_model_above_the_bound_is_trained_by_an_adapter(project: Any, command: Any, tmp_path: Path) -> None:
    """Over two million parameters; it is told before, noted in the report, and both exports are there."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path / "model", hidden_size=256, layers=4)
    before = load_file(folder / "model.safetensors")
    settings = ["trainer.adapter_above=1000000", "trainer.learning_rate=1e-2"]
    done = command("fit", "graph.py", "--json", "--model", folder, *(f for s in settings for f in ("--set", s)))
    assert done.code == 0, done.err
    model = done.json["model"]
    assert f"note: The model has {model['parameters']:,} parameters, more than trainer.adapter_above" in done.err
    assert (model["parameters"], model["trained_parameters"]) == (2_444_032, 262_144)
    assert model["adapter"] == {
        "kind": "lora",
        "rank": 16,
        "alpha": 32,
        "targets": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        "layers": 28,
    }
    assert done.json["logprob_gap"]["max"] < 1e-4
    _, checkpoint = project.run.checkpoint_folders()[-1]
    kept = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert kept < 0.15 * 12 * model["parameters"]  # weights and two moments of all would be 12 bytes each

    policy = project.run.policy
    after = load_file(policy / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(policy)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(folder)
        beside = PeftModel.from_pretrained(base, policy / "adapter").eval()(ids).logits
    assert float((plain - beside).abs().max()) < 1e-4


class Adapting:
    """The local engine as one that samples with an adapter beside its base, or says that it can't."""

    def __init__(self, context: Any, takes_adapters: bool) -> None:
        from agenttrain.local.engine import LocalEngine

        self._own, self.takes_adapters = LocalEngine.from_context(context), takes_adapters
        self.adapters: list[tuple[int, AdapterWeights]] = []
        self.pushed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def update_weights(self, weights: Any, version: int) -> None:
        self.pushed.append(version)
        self._own.update_weights(weights, version)

    def update_adapter(self, adapter: AdapterWeights, version: int) -> None:
        self.adapters.append((version, adapter))
        self._own.update_weights((), version)


@pytest.mark.parametrize("takes_adapters", [True, False])
def test_an_adapter_travels_alone_where_the_engine_takes_it(tmp_path: Path, takes_adapters: bool) -> None:
    """As peft names it; an engine that can't as it was started gets the merged weights."""
    made: list[Adapting] = []

    class Plugin:
        @hookimpl
        def agenttrain_register_engines(self, register: Any) -> None:
            register("adapting", self.make)

        def make(self, context: Any) -> Adapting:
            made.append(Adapting(context, takes_adapters))
            return made[-1]

    toy_project(tmp_path).fit(
        plugins={"adapting": Plugin()}, engine={"name": "adapting"}, trainer={"adapter": "lora", "lora_rank": 4}
    )
    (engine,) = made
    assert ([version for version, _ in engine.adapters], engine.pushed) == (([1], []) if takes_adapters else ([], [1]))
    for _, adapter in engine.adapters:
        assert adapter.config["r"] == 4
        assert adapter.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 16)
        assert not [name for name, tensor in adapter.tensors.items() if tensor.requires_grad]
