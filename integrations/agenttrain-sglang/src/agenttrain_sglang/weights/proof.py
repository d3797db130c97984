"""That a server holds the numbers that were sent: checksums of a few tensors, computed on both sides.

On the CPU SGLang hashes a parameter's bytes with SHA-256, which is cheap to repeat here. What it holds in one piece
with others (queries with keys and values, gates with ups, experts) is left out, and so is everything where the two
sides can't be the same: on CUDA the hash is a Triton kernel's, several ranks hold pieces, an unknown dtype is cast on
arrival.

Source: SGLang 0.5.23, srt/utils/weight_checker.py and managers/mm_utils.py (tensor_hash).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from agenttrain_sglang.weights.buckets import MIB, Bucket
from agenttrain_sglang.weights.faults import ServerSpoiled
from agenttrain_sglang.weights.server_http import Http, Refused

ALONE = ("o_proj.weight", "down_proj.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight")
"""Ends of names that a server holds under the same name, alone."""
JOINED = ("qkv_proj", "gate_up_proj", "experts")
"""Parts of names that a server has and files have not, or in other pieces."""
VOCABULARY, ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
LARGEST = 16 * MIB
"""A tensor that is hashed at most, so that a pause stays short."""


class Proof:
    """What a few tensors of one push are to be in the server: the first and the last of each bucket, of those alone."""

    def __init__(self, http: Http, *, can_be_made: bool) -> None:
        """Begin with nothing.

        Args:
            can_be_made: the server is on the CPU, has one rank and said its dtype.
        """
        self._http, self._can_be_made = http, can_be_made
        self._expected: dict[str, str] = {}
        self._others: list[str] = []

    def begin(self) -> None:
        """Forget the push before."""
        self._expected, self._others = {}, []

    def see(self, bucket: Bucket) -> None:
        """Hash what stands for the bucket."""
        if not self._can_be_made:
            return
        names = [name for name, tensor in bucket.tensors if _can_be_compared(name, tensor)]
        chosen = {*names[:1], *names[-1:]}
        self._expected |= {name: _hash(tensor) for name, tensor in bucket.tensors if name in chosen}
        self._others += [name for name, _ in bucket.tensors if _stands_alone(name) and name not in chosen]

    def check(self) -> int:
        """Ask the server for its own.

        Returns:
            Tensors compared; 0 where the server has no such checksums.

        Raises:
            ServerSpoiled: one differs.
            Gone: the server did not answer.
        """
        if not self._expected:
            return 0
        try:
            answer = self._http.post("/weights_checker", {"skip_tensor_list": [*JOINED, *self._others]})
        except Refused:
            return 0
        held: dict[str, str] = answer["ranks"][0]["checksums"] if answer.get("ranks") else {}
        both = sorted(self._expected.keys() & held.keys())
        differ = [name for name in both if held[name] != self._expected[name]]
        if differ:
            raise ServerSpoiled(
                f"The server at {self._http.address} took new weights, and {len(differ)} of {len(both)} tensors "
                f"compared are not what was sent, such as {differ[0]!r}. Push all again, or start it again."
            )
        return len(both)


def _can_be_compared(name: str, tensor: Any) -> bool:
    """A vocabulary is held in more rows than were sent, where its size is no multiple of 64."""
    is_padded = name.endswith(VOCABULARY) and tensor.shape[0] % ROWS != 0
    return _stands_alone(name) and not is_padded and bool(tensor.nbytes <= LARGEST)


def _stands_alone(name: str) -> bool:
    return name.endswith(ALONE) and not any(part in name for part in JOINED)


def _hash(tensor: Any) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()[:16]
