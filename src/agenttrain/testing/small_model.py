"""Nothing becomes a Hugging Face folder: random weights, a byte-level tokenizer and a chat template with tools.

It is real in all but its size: transformers loads it, agenttrain's renderer admits it, an engine samples from it. Two
calls with one seed give the same files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 320
"""Ids of the model: 256 bytes, the marks below, a few merges, and some that the tokenizer never makes."""
MAX_LENGTH = 1024
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
WORDS = "system user assistant tool name arguments The answer is item price order"
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n' if message.content or not loop.first -}}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- if tools and loop.first -%}
{%- for tool in tools -%}{{- '\n' + tool.function.name + ': ' + tool.function.description -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""


def tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 16,
    layers: int = 2,
    experts: int | None = None,
    max_length: int = MAX_LENGTH,
) -> Path:
    """Write a model folder that can be sampled, trained and exported; about 10,000 parameters.

    Args:
        folder: made with its parents; what stands there is replaced.
        seed: of the weights.
        hidden_size: a multiple of 4.
        layers: from 1.
        experts: of a mixture, from 2, of which each token takes 2; with several layers the second is a dense one. None:
            all layers are dense.
        max_length: ids of prompt and response together; a byte of text is nearly an id.

    Returns:
        The folder. Its family is "default": the chat template in it.

    Example: tiny_model(tmp_path / "model") takes a second the first time in a process, for the import of transformers.
    """
    import torch

    from agenttrain.local.policy import quietly

    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = _tokenizer()
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _dense(sizes) if experts is None else _mixture(sizes, experts)
    with quietly():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _dense(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def _mixture(sizes: dict[str, Any], n_experts: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **sizes,
        num_experts=n_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=sizes["hidden_size"],
        norm_topk_prob=True,
        mlp_only_layers=[1] if sizes["num_hidden_layers"] > 1 else [],
    )
    return Qwen3MoeForCausalLM(config)


def _tokenizer() -> Any:
    """A byte-level tokenizer with a few merges, so that texts of several lengths share ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_and_merges = Tokenizer(models.BPE())
    bytes_and_merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_and_merges.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 16,
        special_tokens=list(MARKS[:3]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytes_and_merges.train_from_iterator([WORDS], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_and_merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(MARKS[3:]))
    tokenizer.chat_template = TEMPLATE
    return tokenizer
