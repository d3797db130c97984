"""Tiny random models of several architectures, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

N_VOCABULARY, MAX_LENGTH = 61, 256
_SPECIAL = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
_SIZES: dict[str, Any] = {
    "vocab_size": N_VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.4,
    **_SPECIAL,
}


def build(architecture: str) -> Any:
    """A random model; the same each time."""
    torch.manual_seed(7)
    match architecture:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=True))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**_SIZES))
        case "gpt2":
            sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH, "initializer_range": 0.4}
            return GPT2LMHeadModel(GPT2Config(vocab_size=N_VOCABULARY, **sizes, **_SPECIAL))
        case "gemma2":
            return Gemma2ForCausalLM(Gemma2Config(**_SIZES, sliding_window=4096, final_logit_softcapping=3.0))
        case "mistral":
            return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=8))
        case "gemma3":
            kinds = ["sliding_attention", "full_attention"]
            return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=8, layer_types=kinds))
        case "mamba":
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.4}
            return MambaForCausalLM(MambaConfig(vocab_size=N_VOCABULARY, **sizes, **_SPECIAL))
    raise AssertionError(architecture)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny model."""
    folders: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            build(architecture).save_pretrained(folders[architecture])
            (folders[architecture] / "tokenizer.json").write_text('{"a": 1}')
        return folders[architecture]

    return folder


@pytest.fixture(scope="session")
def plain_model() -> Callable[[str], Any]:
    """The same model as transformers runs it."""
    return lambda architecture: build(architecture).eval()
