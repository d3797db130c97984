"""local/reloaded.py: what transformers alone makes of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agenttrain.config import TrainerTable
from agenttrain.errors import ModelError
from agenttrain.local.adapter import Adapter
from agenttrain.local.policy import load_model
from agenttrain.local.reloaded import Reloaded
from agenttrain.testing import tiny_model

LORA = TrainerTable(adapter="lora", lora_rank=4)
PROMPT = (1, 67, 281, 300, 201)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("reloaded") / "model")


def test_a_greedy_answer_is_the_likeliest_at_each_place(model: Path) -> None:
    """`generate`, with a cache, and one pass without agree; an answer that is not the likeliest lies behind."""
    loaded = Reloaded(model)
    ids, logprobs = loaded.greedy(PROMPT, 6)
    scored = loaded.scored(PROMPT, ids)
    assert (len(ids), scored.likeliest) == (6, ids)
    assert scored.behind == (0.0,) * 6
    assert logprobs == pytest.approx(scored.logprobs, abs=1e-5)
    other = loaded.scored(PROMPT, (*ids[:2], 5, *ids[3:]))
    assert other.likeliest[:3] == ids[:3]
    assert other.behind[:2] == (0.0, 0.0)
    assert other.behind[2] == pytest.approx(loaded.difference((*PROMPT, *ids[:2]), ids[2], 5), abs=1e-5)
    assert other.behind[2] == pytest.approx(scored.logprobs[2] - other.logprobs[2], abs=1e-5)


def test_log_probabilities_are_at_the_temperature_asked_for(model: Path) -> None:
    logits = load_model(model, device=torch.device("cpu"))(torch.tensor([[*PROMPT, 9]])).logits[0, -2:].double()
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).log_softmax(-1)[[0, 1], [9, 11]].tolist()
        scored = Reloaded(model).scored(PROMPT, (9, 11), temperature=temperature)
        assert scored.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_an_adapter_that_peft_puts_elsewhere_is_refused(tmp_path: Path) -> None:
    """A mixture with a dense layer: by its configuration peft takes that for experts."""
    base = tiny_model(tmp_path / "base", experts=4)
    learned = Adapter(base, load_model(base, device=torch.device("cpu")), settings=LORA, seed=1)
    learned.export(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"beside other layers .* Export the merged form"):
        Reloaded(tmp_path / "policy" / "adapter", base=base)


def test_a_folder_that_is_no_model_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"transformers can't load .* as a causal language model: "):
        Reloaded(tmp_path)
