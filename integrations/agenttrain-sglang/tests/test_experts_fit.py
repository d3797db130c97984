"""A whole run on a mixture of experts: what the server routed is what the trainer trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from agenttrain.local.policy import load_model
from agenttrain.records import Sample
from agenttrain.testing import tiny_model, toy_project
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.sglang, pytest.mark.long]

N_EXPERTS, N_LAYERS = 8, 3
SETTINGS = """
[sglang]
max_running = 8
cache_tokens = 4096
"""


def sparse_everywhere(folder: Path) -> None:
    """A mixture without dense layers or tied embeddings, which SGLang 0.5.23 does not know in a Qwen mixture."""
    config = AutoConfig.from_pretrained(tiny_model(folder, layers=N_LAYERS, experts=N_EXPERTS))
    config.mlp_only_layers, config.tie_word_embeddings = [], False
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def share_of_own_choice(folder: Path, samples: Sequence[Sample]) -> float:
    """Of (token, layer) pairs, those that went through the experts that the folder's model chooses in transformers."""
    model, n_same, n = load_model(folder, device=torch.device("cpu")), 0, 0
    for sample in samples:
        told = sample.routed_experts
        assert told is not None
        rows = np.frombuffer(told.data, "<u2").reshape(-1, told.n_layers, told.n_chosen)
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids][:-1]])
        with torch.no_grad():
            logits = torch.stack(model(input_ids=ids, output_router_logits=True).router_logits, dim=1)
        own = logits.topk(told.n_chosen, dim=-1).indices.numpy()
        n_same += int((np.sort(rows, axis=-1) == np.sort(own, axis=-1)).all(axis=-1).sum())
        n += rows.shape[0] * rows.shape[1]
    return n_same / n


def test_a_mixture_is_trained_through_the_servers_experts(tmp_path: Path) -> None:
    """Every turn and every sample holds them, at their own positions; nothing drifts, and the gap is rounding."""
    project = toy_project(tmp_path, settings=SETTINGS)
    sparse_everywhere(project.folder / "model")
    run = project.fit(engine={"name": "sglang"}, trainer={"group_size": 4, "steps": 2})
    assert run.report["tokens"]["drifted"] == 0
    assert run.report["tokens"]["trained"] > 0
    assert 0 < run.report["logprob_gap"]["max"] < 1e-3
    assert any("logprob_gap_unreplayed_max" in row for row in run.folder.metrics())
    results = list(run.store.results())
    turns = [turn for result in results for turn in result.turns]
    assert {turn.routed_experts and turn.routed_experts.n_layers for turn in turns} == {N_LAYERS}
    samples = [sample for result in results for sample in result.samples]
    assert all(experts_end(sample) == len(sample.prompt_ids) + len(sample.response_ids) - 1 for sample in samples)
    at_base = [r for r in results if {v for turn in r.turns for v in turn.weight_versions} == {0}]
    assert share_of_own_choice(project.folder / "model", [s for r in at_base for s in r.samples]) > 0.99


def experts_end(sample: Sample) -> int:
    """The position after the last that has experts, from position 0 on."""
    assert sample.routed_experts is not None
    assert sample.routed_experts.start == 0
    return sample.routed_experts.end
