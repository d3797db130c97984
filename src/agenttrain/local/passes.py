"""Micro-batches through a model: log probabilities of the trained tokens, and the hidden states before them.

One Python thread per core with one operation thread each: on a busy machine this is several times faster than the same
number of OpenMP threads. Results come in the order of the micro-batches. Knows neither loss nor optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from agenttrain.config import Config
from agenttrain.local import policy
from agenttrain.local.learnable import Learnable
from agenttrain.local.routing import Replay
from agenttrain.local.shared_prefix import logits_after, works
from agenttrain.trainer.algorithms import chosen
from agenttrain.trainer.batches import Lesson, MicroBatch, micro_batches

SHORTEST_PREFIX = 16
"""Ids that the rows of a pass must begin with alike for that beginning to be read once."""

T = TypeVar("T")


class Passes:
    """How one Learnable reads lessons."""

    def __init__(self, learnable: Learnable, config: Config) -> None:
        self.device = learnable.device
        self._logits = learnable.logits
        self._max_tokens, self._temperature = config.trainer.micro_batch_tokens, config.sampling.temperature
        self._mean, self._constant = chosen(config.trainer).loss, config.limits.tokens
        self._model = model = learnable.model
        self._replays_experts = config.trainer.replay_experts
        self._replay: Replay | None = None
        self._padding_id = _padding_id(model.config)
        shares = works(
            learnable.logits,
            n_vocabulary=policy.vocabulary_size(model),
            max_length=policy.max_length(model.config),
        )
        self.shortest_prefix = SHORTEST_PREFIX if shares else None
        self.n_workers = 1 if learnable.device.type == "cuda" else min(8, len(os.sched_getaffinity(0)))
        self._workers = ThreadPoolExecutor(
            self.n_workers, thread_name_prefix="agenttrain-gradient", initializer=lambda: torch.set_num_threads(1)
        )

    def laid_out(self, part: Sequence[Lesson], *, weight_version: int) -> list[MicroBatch]:
        """The lessons of one update as micro-batches.

        Raises:
            ConfigError: the engine told experts that this model can't be sent through.
        """
        return micro_batches(
            part,
            mean=self._mean,
            max_tokens=self._max_tokens,
            n_workers=self.n_workers,
            weight_version=weight_version,
            padding_id=self._padding_id,
            shortest_prefix=self.shortest_prefix,
            constant=self._constant,
            replays_experts=self._are_replayed(part),
        )

    def _are_replayed(self, part: Sequence[Lesson]) -> bool:
        """Whether lessons hold experts to go through; looks for the model's routers when they first do."""
        if not self._replays_experts:
            return False
        told = [x.routed_experts for lesson in part for x in lesson.samples if x.routed_experts is not None]
        for experts in told:
            self._replay = self._replay or Replay(self._model)
            self._replay.check(experts)
        return bool(told)

    def each(self, function: Callable[[MicroBatch], T], batches: Sequence[MicroBatch]) -> Iterator[T]:
        """function(batch) of each, as many at once as there are workers, in their order."""
        for start in range(0, len(batches), self.n_workers):
            yield from self._workers.map(function, batches[start : start + self.n_workers])

    def log_probabilities(
        self, batch: MicroBatch, logits: policy.Logits | None = None, *, temperature: float | None = None
    ) -> torch.Tensor:
        """[N] of the trained tokens; by the learnable itself, or another model.

        Args:
            temperature: None: that of sampling.

        Another model (a reference) routes by itself: the experts that were told are a choice of this one.

        Rows are padded on the right and attention is causal, so that no real position sees padding and no mask is
        needed; models with recurrent layers are right for the same reason.
        """
        if len(batch.prefix):
            picked = logits_after(logits or self._logits, batch.prefix, batch.flat, batch.input_ids)
        else:
            with self._routed(batch.experts if logits is None else None):
                picked = (logits or self._logits).at(batch.flat, batch.input_ids, use_cache=False)
        scaled = picked / (temperature or self._temperature)
        return -torch.nn.functional.cross_entropy(scaled, batch.targets, reduction="none")

    def _routed(self, experts: torch.Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if self._replay is None else self._replay.of(experts)

    def hidden(self) -> torch.Tensor:
        """[N, H] states of this thread's last pass at the positions that predict the trained tokens."""
        return self._logits.hidden()

    def close(self) -> None:
        """End the workers."""
        self._workers.shutdown(wait=True, cancel_futures=True)


def _padding_id(config: Any) -> int:
    """An id to pad with that is not the model's own padding id: some models warn when they see theirs unmasked."""
    return 1 if config.pad_token_id == 0 else 0
