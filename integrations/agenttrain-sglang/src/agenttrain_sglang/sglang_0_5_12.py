"""SGLang 0.5.12, which veRL 0.9.1 needs: what differs from 0.5.23, for whoever talks to it.

Run on the CPU, by hand: a server started by `launch` (torch 2.13, transformers 5.6.0, tokenizers 0.22.2), with log
probabilities within 1e-5 of transformers, seeds, the prefix cache and metrics; weights by group, tensor and file, an
adapter by file and by tensor. Not run on a GPU.

What differs and needs nothing from here: an answer tells the weight version at its end, and no spans of it;
/weight_version and /get_weight_version answer 404, as if they weren't there (/model_info tells it in both versions);
/weights_checker needs CUDA; /v1/loads fails without GPUs; `session_id`, `cache_salt` and `return_sampling_mask` are
unknown to /generate. An update with a cache flush while calls are paused by "retract" ends the server when any are
left: abort them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = "0.5.12"
"""Weights load without /begin_weight_update and /end_weight_update there, which answer 404."""
WITHOUT_GRAPHS = ("--disable-cuda-graph",)
"""0.5.23 has a flag each for prefill and decode."""
PAUSE_MODE = "abort"
"""For an update: calls in flight end with what they have, since "retract" would end the server."""


def adapter_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /load_lora_adapter_from_tensors as 0.5.12 takes it, from that of 0.5.23.

    Args:
        body: with `serialized_named_tensors`, one string for each rank.

    Example: {"lora_name": "a", "serialized_named_tensors": ["x"], "expected_checksums": {…}}
        -> {"lora_name": "a", "serialized_tensors": "x"}
    """
    kept = {name: value for name, value in body.items() if name not in _NEW}
    return kept | {"serialized_tensors": body["serialized_named_tensors"][0]}


_NEW = ("serialized_named_tensors", "expected_checksums")
