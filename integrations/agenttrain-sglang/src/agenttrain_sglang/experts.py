"""A server's routed experts to records.RoutedExperts.

Invariant: row i is of position start + i of the token path, and there is a row for every position that was read, cached
ones too, so that the rows of the turns of one trajectory follow each other. Other counts are an EngineError.

A server reports one column for each hidden layer, zeros where the layer is dense; those columns are dropped.

Source: sglang 0.5.23, srt/state_capturer/routed_experts.py and base.py (get_topk: base64 of int32, positions from
routed_experts_start_len to the last but one), srt/models/qwen3_moe.py and deepseek_v2.py (which layers route).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from agenttrain.errors import EngineError
from agenttrain.records import RoutedExperts

EVERY_LAYER = ("qwen2_moe", "qwen3_moe")
"""Model types of which SGLang makes each layer a mixture, whatever config.json says."""
NEVER_TIED = (*EVERY_LAYER, "mixtral", "olmoe")
"""Model types whose output head SGLang never ties to the embeddings; it stays zeros, and every id equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape:
    """What a model's routed experts look like, on the wire and in a record."""

    n_hidden: int
    """Layers that a server reports."""
    layers: tuple[int, ...]
    """Those of them that route, in order."""
    n_chosen: int
    """Experts that each chooses for a position."""
    n_experts: int
    """Experts that each has."""


def routed_shape(folder: Path) -> RoutedShape | None:
    """What the routed experts of a model's folder look like. None: it is no mixture of experts.

    Raises:
        EngineError: SGLang would give experts to layers that the model has none for.
    """
    return shape_of(json.loads((folder / "config.json").read_text()))


def shape_of(config: Mapping[str, Any]) -> RoutedShape | None:
    """The shape by a model's config.json. None: it is no mixture of experts.

    Raises:
        EngineError: SGLang would give experts to layers that the model has none for, or serve it without a head.
    """
    text = config.get("text_config") or config
    n_experts = next(
        (text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0
    )
    n_chosen = text.get("num_experts_per_tok") or 0
    if not n_experts or not n_chosen:
        return None
    n_hidden = text["num_hidden_layers"]
    dense = sorted(_dense_layers(text, n_hidden))
    if dense and text.get("model_type") in EVERY_LAYER:
        raise EngineError(
            f"Layers {dense} of this {text['model_type']} are dense by its config.json (mlp_only_layers, "
            "decoder_sparse_step), and SGLang 0.5.23 gives every layer experts. Roll out with --engine local."
        )
    if text.get("tie_word_embeddings") and text.get("model_type") in NEVER_TIED:
        raise EngineError(
            f"The output head of this {text['model_type']} is its embeddings by its config.json (tie_word_embeddings), "
            "and SGLang 0.5.23 would sample from a head of zeros. Roll out with --engine local, or save the model "
            "untied."
        )
    return RoutedShape(
        n_hidden=n_hidden,
        layers=tuple(i for i in range(n_hidden) if i not in dense),
        n_chosen=n_chosen,
        n_experts=n_experts,
    )


def _dense_layers(text: Mapping[str, Any], n_hidden: int) -> set[int]:
    """Qwen's and DeepSeek's ways to say that a layer has no experts."""
    first, every = text.get("first_k_dense_replace") or 0, text.get("moe_layer_freq") or 1
    step, named = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    frequency = every if isinstance(every, list) else [int(i % every == 0) for i in range(n_hidden)]
    return {i for i in range(n_hidden) if i < first or not frequency[i] or (i + 1) % step or i in named}


def routed_experts_of(encoded: str, *, shape: RoutedShape, start: int, end: int, where: str) -> RoutedExperts:
    """The experts of positions start to end (half open).

    Args:
        encoded: base64 of int32 [end - start, shape.n_hidden, shape.n_chosen].
        where: what an error begins with.

    Raises:
        EngineError: other rows, an expert that the model has not, or a layer that routes nothing.
    """
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"{where}: routed experts are no base64 of int32 ({error}). See the server's log.") from error
    n_expected = (end - start) * shape.n_hidden * shape.n_chosen
    if numbers.size != n_expected:
        raise EngineError(
            f"{where}: {numbers.size} routed experts for positions {start} to {end}, and {shape.n_hidden} layers of "
            f"{shape.n_chosen} experts make {n_expected}. Serve the model's own folder."
        )
    rows = numbers.reshape(end - start, shape.n_hidden, shape.n_chosen)
    if len(shape.layers) < shape.n_hidden:
        rows = rows[:, list(shape.layers)]
    if rows.size and (rows.min() < 0 or rows.max() >= shape.n_experts):
        raise EngineError(
            f"{where}: routed experts from {rows.min()} to {rows.max()}, and a layer of the model has "
            f"{shape.n_experts}. Serve the model's own folder."
        )
    if shape.n_chosen > 1 and (rows[..., 0] == rows[..., 1]).any():
        raise EngineError(
            f"{where}: a position went through one expert twice, as in a layer that routes nothing; config.json says "
            f"that layers {shape.layers} route. Set sglang.routed_experts = false."
        )
    return RoutedExperts(
        start=start, n_layers=len(shape.layers), n_chosen=shape.n_chosen, data=rows.astype("<u2").tobytes()
    )


def joined_experts(first: RoutedExperts | None, second: RoutedExperts | None) -> RoutedExperts | None:
    """The experts of two parts of one answer. None: those of one part are not known.

    Raises:
        EngineError: the second does not begin where the first ends, or is of another model.
    """
    if first is None or second is None:
        return None
    if (first.end, first.n_layers, first.n_chosen) != (second.start, second.n_layers, second.n_chosen):
        raise EngineError(
            f"Routed experts to position {first.end} ({first.n_layers} layers of {first.n_chosen}) are followed by "
            f"those from {second.start} ({second.n_layers} layers of {second.n_chosen}). Ask the second part with "
            "`going_on` from the first."
        )
    return RoutedExperts(
        start=first.start, n_layers=first.n_layers, n_chosen=first.n_chosen, data=first.data + second.data
    )
