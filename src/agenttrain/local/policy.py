"""A Hugging Face folder to a causal language model in memory, and its logits where they are needed.

Every model is held in float32, so that engine and trainer agree to about 1e-6 on a log probability. Nothing is
downloaded. The output layer runs only at the positions asked for, whatever a model does to its logits afterwards
(soft caps, scales): a hook picks the positions at the output layer's entrance.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agenttrain.errors import ModelError

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
UNLIMITED_LENGTH = 32_768
"""Taken as max_length where a model's configuration states none (recurrent models)."""


def choose_device() -> torch.device:
    """CUDA where torch sees a GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(folder: str | Path, *, device: torch.device, weights_from: Path | None = None) -> Any:
    """The causal language model of a folder, in float32 and evaluation mode.

    Args:
        weights_from: a folder whose *.safetensors replace the model's weights.

    Raises:
        ModelError: no such folder, no causal language model in it, or weights that don't fit.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds no config.json, and the local engine needs a Hugging Face folder (config.json, "
            "*.safetensors, tokenizer files) on this machine. Point --model at one."
        )
    try:
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers can't load {folder} as a causal language model: {error}") from error
    if weights_from is not None:
        load_weights(model, read_weights(Path(weights_from)), where=str(weights_from))
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bar of transformers' own: standard error belongs to the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the *.safetensors files of a folder.

    Raises:
        ModelError: the folder holds none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file. Name the policy folder or a checkpoint of a run.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return weights


def load_weights(model: Any, weights: dict[str, torch.Tensor], *, where: str) -> None:
    """Copy weights into a model, all or none.

    Raises:
        ModelError: a name the model lacks, or a shape that differs.
    """
    state = model.state_dict()
    for name, tensor in weights.items():
        if name not in state:
            raise ModelError(f"Weights from {where} name {name!r}, which {type(model).__name__} has not.")
        if state[name].shape != tensor.shape:
            raise ModelError(
                f"Weights from {where}: {name!r} has shape {list(tensor.shape)}, and the model's has "
                f"{list(state[name].shape)}. Take weights of the same architecture."
            )
    with torch.inference_mode():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def max_length(config: Any) -> int:
    """Positions the model was made for; UNLIMITED_LENGTH where it states none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in LENGTH_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return UNLIMITED_LENGTH


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding: ids from 0 up to it may be fed."""
    return int(model.get_input_embeddings().weight.shape[0])


def n_parameters(model: Any) -> int:
    """Numbers in a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def why_not_plain(config: Any, longest: int) -> str:
    """Why a model's cache is not plain full attention, as far as its configuration tells. Empty: it may be."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "is_encoder_decoder", False):
        return "the model has an encoder"
    layer_types = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False or (isinstance(window, int) and window >= longest):
        window = None
        layer_types.discard("sliding_attention")
    if other := layer_types - {"full_attention"}:
        return f"layers of type {', '.join(sorted(other))}"
    if window is not None and not layer_types:
        return f"attention over a sliding window of {window}"
    if getattr(text, "attention_chunk_size", None) is not None and not layer_types:
        return "chunked attention"
    return ""


class Logits:
    """The logits of one model at chosen positions. Threads may share it; each picks for itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.keeps_hidden = False
        """Whether `hidden` is wanted."""
        self._picked = threading.local()
        self._head = model.get_output_embeddings()
        if self._head is not None:
            self._head.register_forward_pre_hook(self._pick)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        """transformers before 5.2x calls it past_key_values, and warns of it after."""

    def at(self, flat: torch.Tensor, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Float32 logits at flat positions of a batch.

        Args:
            flat: [N] row × T + column.
            input_ids: [B, T]
            inputs: the model's own (attention_mask, position_ids, cache …).

        Returns:
            [N, V]
        """
        if "cache" in inputs:
            inputs[self._cache_name] = inputs.pop("cache")
        with self._picking(flat):
            logits = self.model(input_ids=input_ids, **inputs).logits
        if self._head is None:
            logits = logits.flatten(0, 1)[flat]
        return logits.reshape(-1, logits.shape[-1]).float()

    def hidden(self) -> torch.Tensor:
        """[N, H] what the output layer read in this thread's last call, without gradient; where `keeps_hidden`."""
        states: torch.Tensor = self._picked.hidden
        return states

    @contextmanager
    def _picking(self, flat: torch.Tensor) -> Iterator[None]:
        self._picked.flat = flat
        try:
            yield
        finally:
            self._picked.flat = None

    def _pick(self, _module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        flat = getattr(self._picked, "flat", None)
        if flat is None:
            return None
        hidden, *rest = args
        picked = hidden.flatten(0, -2)[flat]
        if self.keeps_hidden:
            self._picked.hidden = picked.detach()
        return (picked[None], *rest)


def padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of several lengths as one right-padded batch, and its 2-D attention mask: both [B, T]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(width, device=device) < lengths[:, None]).long()
