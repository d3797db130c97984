"""A folder that anybody may have got becomes what its policy answers, by transformers and peft alone.

Nothing of the engine or the trainer is used: the folder is loaded as somebody else would load it, whole prompts go
through it without a cache of ours, and greedy answers come from `model.generate` under the folder's own
generation_config. Held in float32, as the policies of runs are.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agenttrain.errors import ModelError
from agenttrain.local.policy import choose_device, quietly
from agenttrain.protocols import AdapterWeights
from agenttrain.records import Ids

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a model makes of ids that were sampled after a prompt."""

    logprobs: tuple[float, ...]
    """[R] of the ids, at the temperature asked for."""
    likeliest: Ids
    """[R] the id that greedy decoding takes at each place, the ids before it given."""
    behind: tuple[float, ...]
    """[R] by how much the log probability of the id lies below that of the likeliest, at temperature 1."""


class Reloaded:
    """One folder, loaded anew."""

    def __init__(self, folder: Path, *, base: Path | None = None) -> None:
        """Load a model folder, or an adapter's folder beside its base.

        Args:
            base: folder of the model that an adapter stands beside. None: it is no adapter.

        Raises:
            ModelError: it can't be loaded, or holds only some of the model's weights.
        """
        self.model = _whole(folder) if base is None else _adapted(folder, base)
        self.model.to(choose_device()).eval().requires_grad_(False)
        self._keeps = "logits_to_keep" in inspect.signature(_inner(self.model).forward).parameters

    def scored(self, prompt_ids: Ids, response_ids: Ids, *, temperature: float = 1.0) -> Scored:
        """Log probabilities of a response by one pass over prompt and response.

        Args:
            temperature: what the logits are divided by.
        """
        logits = self._logits((*prompt_ids, *response_ids[:-1]), n_last=len(response_ids))
        taken = torch.tensor(response_ids, device=logits.device)[:, None]
        best, likeliest = logits.max(dim=-1)
        return Scored(
            logprobs=tuple((logits / temperature).log_softmax(dim=-1).gather(1, taken)[:, 0].tolist()),
            likeliest=tuple(likeliest.tolist()),
            behind=tuple((best - logits.gather(1, taken)[:, 0]).tolist()),
        )

    def difference(self, prompt_ids: Ids, one: int, other: int) -> float:
        """How far apart two ids are in log probability as the next one, at temperature 1; from 0."""
        logits = self._logits(prompt_ids, n_last=1)[0]
        return abs(float(logits[one] - logits[other]))

    def greedy(self, prompt_ids: Ids, max_tokens: int) -> tuple[Ids, tuple[float, ...]]:
        """What `generate` answers, and the log probabilities of that; the folder's generation_config says when it ends.

        Returns:
            [R] ids, from 1 to max_tokens of them, and [R] log probabilities at temperature 1.
        """
        ids = torch.tensor([prompt_ids], device=self.model.device)
        with quietly(), torch.inference_mode():
            answer = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
            response = answer.sequences[0, len(prompt_ids) :]
            logprobs = torch.cat(answer.logits).float().log_softmax(dim=-1).gather(1, response[:, None])[:, 0]
        return tuple(response.tolist()), tuple(logprobs.tolist())

    def _logits(self, ids: Ids, *, n_last: int) -> torch.Tensor:
        """[n_last, V] float32, of the ids that follow the last n_last."""
        keep = {"logits_to_keep": n_last} if self._keeps else {}
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([ids], device=self.model.device), use_cache=False, **keep).logits
        last: torch.Tensor = logits[0, -n_last:].float()
        return last


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter that stands beside a base, and no model of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_config(folder: Path) -> dict[str, Any]:
    """peft's configuration of an adapter's folder.

    Raises:
        ModelError: it can't be read.
    """
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} can't be read: {error}. Export the run again.") from None
    return config


def adapter_weights(folder: Path) -> AdapterWeights:
    """An adapter's folder, for an engine that samples with adapters."""
    return AdapterWeights(config=adapter_config(folder), tensors=load_file(folder / "adapter_model.safetensors"))


def _whole(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, loading = _loaded(AutoModelForCausalLM, folder)
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} of the model's weights, {missing[0]} among them, and transformers fills "
            "such with random numbers. Export the run again, or copy the folder whole."
        )
    return model


def _adapted(folder: Path, base: Path) -> Any:
    from peft import PeftModel
    from transformers import GenerationConfig

    model = _whole(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of matrices that are elsewhere is told below
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # peft and safetensors raise many classes
        raise ModelError(
            f"peft can't load the adapter {folder} beside {base}: {type(error).__name__}: {error}"
        ) from error
    _refuse_other_layers(adapted, folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))  # not the base's own
    return adapted


def _refuse_other_layers(adapted: Any, folder: Path) -> None:
    """peft (0.21) takes the dense layers of a mixture for its experts, and fills what it lacks with random numbers.

    Raises:
        ModelError: matrices stand elsewhere than in the file.
    """
    placed = {name.replace(".default.", ".") for name, _ in adapted.named_parameters() if ".lora_" in name}
    if other := sorted(placed ^ set(adapter_weights(folder).tensors)):
        raise ModelError(
            f"peft puts the adapter {folder} beside other layers than those that it was trained beside: {other[0]} and "
            f"{len(other) - 1} more. Export the merged form."
        )


def _loaded(auto: Any, folder: Path) -> tuple[Any, Mapping[str, Any]]:
    try:
        with quietly():
            model, loading = auto.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise many classes
        raise ModelError(
            f"transformers can't load {folder} as a causal language model: {type(error).__name__}: {error}"
        ) from error
    return model, loading


def _inner(model: Any) -> Any:
    """The model itself, where peft stands around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
