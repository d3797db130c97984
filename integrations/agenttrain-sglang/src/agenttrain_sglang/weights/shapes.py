"""Names and shapes that a model has, from the files it was loaded from, so that what can't fit is never sent.

A server passes over a name it doesn't know without a word, and a wrong shape in a request's body ends it (SGLang
0.5.23, models/*.py load_weights); so both are looked for here, before each bucket travels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from agenttrain_sglang.weights.buckets import Bucket
from agenttrain_sglang.weights.faults import WeightsRefused

PEFT_FRONT = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Shapes:
    """What weights of one model look like."""

    def __init__(self, shape_by_name: Mapping[str, tuple[int, ...]], *, where: str) -> None:
        """Keep them.

        Args:
            where: what they were read from, for messages.
        """
        self._shape_by_name, self._where = dict(shape_by_name), where

    def check(self, bucket: Bucket) -> None:
        """Look at what is about to travel.

        Raises:
            WeightsRefused: a name that the model lacks, or a shape that differs.
        """
        for name, tensor in bucket.tensors:
            shape = self._shape_by_name.get(name)
            if shape is None:
                raise WeightsRefused(
                    f"New weights name {name!r}, which the model in {self._where} has not. Train the model that the "
                    "server was started with."
                )
            if shape != tuple(tensor.shape):
                raise WeightsRefused(
                    f"New weights: {name!r} has shape {list(tensor.shape)}, and in {self._where} it has "
                    f"{list(shape)}. Train the model that the server was started with."
                )

    def check_adapter(self, tensors: Mapping[str, Any], rank: int) -> None:
        """Look at a LoRA adapter in peft's names: A is [rank, in], B is [out, rank] of a weight [out, in].

        Raises:
            WeightsRefused: a layer that the model lacks, or a shape that doesn't fit beside its weight.
        """
        for name, tensor in tensors.items():
            layer, _, rest = name.removeprefix(PEFT_FRONT).partition(".lora_")
            shape = self._shape_by_name.get(f"{layer}.weight", ())
            if len(shape) != 2:
                raise WeightsRefused(
                    f"The adapter names {name!r}, and the model in {self._where} has no such layer. Adapt the model "
                    "that the server was started with."
                )
            fits = (rank, shape[1]) if rest.startswith("A") else (shape[0], rank)
            if fits != tuple(tensor.shape):
                raise WeightsRefused(
                    f"The adapter's {name!r} has shape {list(tensor.shape)}, and {list(fits)} fits beside {layer!r} in "
                    f"{self._where}. Adapt the model that the server was started with."
                )


def shapes_of(folder: str | Path) -> Shapes | None:
    """Read the headers of a model's files. None: there are none that can be read from here."""
    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    shape_by_name: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shape_by_name[name] = tuple(file.get_slice(name).get_shape())
    if not shape_by_name:
        return None
    if EMBEDDING in shape_by_name and _is_tied(Path(folder)):
        shape_by_name.setdefault(HEAD, shape_by_name[EMBEDDING])
    return Shapes(shape_by_name, where=str(folder))


def _is_tied(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False))
    except (OSError, ValueError):
        return False
