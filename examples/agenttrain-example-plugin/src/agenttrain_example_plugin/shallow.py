"""An engine that answers with the policy's embedding and output layers, and none of those between.

The next id depends on the last one alone: p(b | a) = softmax(output[b] · embedding[a]). What `agenttrain eval --engine
shallow` reports is the floor under a policy: what it would get if it read nothing. Its log probabilities are true ones
of what it samples, so a trainer can use them; in a fit of the whole policy the alarm `logprob_gap` says that engine and
trainer are not one model, as it would for any engine that is wrong.

One worker thread answers call after call. Between two tokens it looks whether the call's session was released.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from agenttrain.errors import EngineError, ModelError
from agenttrain.records import Generation, Ids, Sampling

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
"""How the two tensors' names end in Hugging Face folders; a tied output has none of its own."""
DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Weights:
    """What one token is sampled from."""

    embedding: np.ndarray
    """[V, H]"""
    output: np.ndarray
    """[V, H]; the embedding itself where the two are tied."""
    version: int


class ShallowEngine:
    """agenttrain.protocols.Engine over one Hugging Face folder."""

    name = "shallow"

    def __init__(self, folder: str | Path) -> None:
        """Read two tensors and the configuration.

        Raises:
            ModelError: the folder holds no embedding that could be read.
        """
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.max_length = int(config.get("max_position_embeddings", DEFAULT_LENGTH))
        self._weights = _with(None, _tensors(folder), version=0)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="shallow-engine")
        self._released: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._n_sampled, self._busy_s = 0, 0.0

    @property
    def weight_version(self) -> int:
        return self._weights.version

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """Sample a response on the worker's thread.

        Raises:
            EngineError: the engine is closed, or the call can't be answered.
        """
        self._check(prompt_ids, sampling, session)
        with self._lock:
            if self._closed:
                raise EngineError("The shallow engine is closed. Open a new one.")
            released = self._released.setdefault(session, threading.Event())
            return self._worker.submit(self._answer, prompt_ids, sampling, released)

    def release(self, session: str) -> None:
        """End the session's calls at their next token."""
        with self._lock:
            released = self._released.pop(session, None)
        if released is not None:
            released.set()

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take embedding and output; what lies between is of no use here.

        Raises:
            EngineError: a shape that differs; nothing is taken then.
        """
        given = {name: np.asarray(tensor.detach().float().cpu()) for name, tensor in weights}
        self._weights = _with(self._weights, given, version=version)

    def stats(self) -> Mapping[str, float]:
        if self._closed:
            raise EngineError("The shallow engine is closed. Open a new one.")
        n = float(self._n_sampled)
        return {
            "sampled_ids": n,
            "prefilled_ids": 0.0,
            "cached_ids": 0.0,
            "decode_steps": n,
            "decode_rows": n,
            "busy_s": self._busy_s,
        }

    def close(self) -> None:
        """End the worker; calls in flight end as aborted."""
        with self._lock:
            self._closed = True
            released, self._released = list(self._released.values()), {}
        for event in released:
            event.set()
        self._worker.shutdown(wait=True)

    def _check(self, prompt_ids: Ids, sampling: Sampling, session: str) -> None:
        n, size = len(prompt_ids), len(self._weights.embedding)
        if n == 0 or sampling.max_tokens < 1:
            raise EngineError(f"Session {session} asks for {sampling.max_tokens} ids after {n}. Ask for 1 after 1.")
        if n + sampling.max_tokens > self.max_length:
            raise EngineError(
                f"Session {session} asks for {n} prompt ids and {sampling.max_tokens} new ones, and there is room for "
                f"{self.max_length}. Lower limits.tokens."
            )
        if not all(0 <= id < size for id in prompt_ids):
            raise EngineError(f"The prompt of session {session} holds ids outside of 0 to {size - 1}.")

    def _answer(self, prompt_ids: Ids, sampling: Sampling, released: threading.Event) -> Generation:
        began, last = time.perf_counter(), prompt_ids[-1]
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        stop_reason = "length"
        while len(ids) < sampling.max_tokens:
            if released.is_set():
                stop_reason = "aborted"
                break
            weights = self._weights
            last, logprob = _draw(weights.output @ weights.embedding[last], sampling, position=len(ids))
            ids.append(last)
            logprobs.append(logprob)
            versions.append(weights.version)
            if last in sampling.stop_ids:
                stop_reason = "stop"
                break
        self._n_sampled += len(ids)
        self._busy_s += time.perf_counter() - began
        return Generation(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            weight_versions=tuple(versions),
            stop_reason=stop_reason,  # type: ignore[arg-type]
        )


def _draw(logits: np.ndarray, sampling: Sampling, *, position: int) -> tuple[int, float]:
    """(id, log probability) by the Gumbel trick, its noise fixed by seed and position; greedy at temperature 0."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    logprobs = scaled - scaled.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    noise = np.random.default_rng((sampling.seed, position)).gumbel(size=len(logits)) if sampling.temperature else 0.0
    id = int(np.argmax(logprobs + noise))
    return id, float(logprobs[id])


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    if not any(name.endswith(EMBEDDING) for name in tensors):
        raise ModelError(
            f"{folder} holds no tensor named …{EMBEDDING}. The shallow engine needs one: take --engine local."
        )
    return tensors


def _with(before: Weights | None, tensors: Mapping[str, np.ndarray], *, version: int) -> Weights:
    """The weights with those of the given tensors that are embedding or output."""
    embedding = _named(tensors, EMBEDDING)
    output = _named(tensors, OUTPUT)
    if before is not None:
        tied = before.output is before.embedding
        embedding = before.embedding if embedding is None else embedding
        output = before.output if output is None and not tied else output
        if embedding.shape != before.embedding.shape or (output is not None and output.shape != before.output.shape):
            raise EngineError(
                f"Weights of version {version} have another shape than {before.embedding.shape}. Take weights of the "
                "same architecture."
            )
    assert embedding is not None
    return Weights(embedding=embedding, output=embedding if output is None else output, version=version)


def _named(tensors: Mapping[str, np.ndarray], ending: str) -> np.ndarray | None:
    return next((tensor.astype(np.float32) for name, tensor in tensors.items() if name.endswith(ending)), None)
