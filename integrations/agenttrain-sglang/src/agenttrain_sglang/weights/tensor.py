"""Weights in the body of a request: the bytes themselves, so it works across hosts and needs no open port.

The body's format is a plain pickle of (name, tensor) pairs in base64: what SGLang's restricted unpickler takes without
shared memory, which a process outside of SGLang's own must not use (it ends the server).

Source: SGLang 0.5.23, srt/utils/common.py (SafeUnpickler), managers/io_struct.py (UpdateWeightsFromTensorReqInput).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable
from typing import Any

from agenttrain_sglang.weights.buckets import Bucket
from agenttrain_sglang.weights.server_http import Http


class TensorTransport:
    """Posts buckets to one server."""

    name = "tensor"
    has_sessions = True
    device = "cpu"

    def __init__(self, http: Http, *, n_ranks: int) -> None:
        """Keep the server.

        Args:
            http: the server; its time limit holds for each bucket.
            n_ranks: the server's, its tensor-parallel size; each gets a copy of its own.
        """
        self.http, self._n_ranks = http, n_ranks

    def prepare(self) -> None:
        """Nothing is needed."""

    def load(self, bucket: Bucket, *, tag: str | None) -> None:
        """Post a bucket; returns when the server has put it into its model.

        Args:
            tag: what the weights are called from now on; with the last bucket only.

        Raises:
            Refused, Gone: the server said no, or nothing.
        """
        body = {
            "serialized_named_tensors": [encoded(bucket.tensors)] * self._n_ranks,
            "flush_cache": tag is not None,
            "weight_version": tag,
        }
        self.http.post("/update_weights_from_tensor", body)

    def drop(self) -> None:
        """Nothing is held."""

    close = drop


def encoded(named: Iterable[tuple[str, Any]] | dict[str, Any]) -> str:
    """Named CPU tensors as SGLang reads them: pairs where it loads weights, a mapping where it loads an adapter."""
    if isinstance(named, dict):
        return _base64({name: alone(tensor) for name, tensor in named.items()})
    return _base64([(name, alone(tensor)) for name, tensor in named])


def _base64(named: object) -> str:
    return base64.b64encode(pickle.dumps(named, protocol=4)).decode()


def alone(tensor: Any) -> Any:
    """The tensor with no storage but its own: pickle takes all of a view's along, safetensors refuses a shared one."""
    return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
