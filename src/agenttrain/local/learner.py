"""Lessons become updates of the policy's weights: forward and backward passes, gradients summed, optimizer steps.

Invariants: before a step's first update the log probabilities recorded in sampling are compared with the trainer's own;
a step that is cut short leaves the weights and the optimizer as they were.

Gradients come from one Python thread per core with one operation thread each, and are summed in the order of the
micro-batches: on a busy machine this is several times faster than the same number of OpenMP threads.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from agenttrain.config import Config
from agenttrain.errors import TrainerError
from agenttrain.local import policy
from agenttrain.local.learnable import Learnable
from agenttrain.local.shared_prefix import logits_after, works
from agenttrain.trainer.batches import Lesson, MicroBatch, micro_batches, minibatches
from agenttrain.trainer.loss import policy_loss

SHORTEST_PREFIX = 16
"""Ids that the rows of a pass must begin with alike for that beginning to be read once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one micro-batch gives."""

    grads: tuple[torch.Tensor, ...]
    """In the order of the parameters; empty when only log probabilities were wanted."""
    loss: float
    n_clipped: int
    gap_sum: float
    """Of |trainer - recorded| log probability over fresh tokens."""
    gap_max: float
    n_fresh: int
    nll_sum: float
    """Of the recorded log probabilities, negated."""
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the updates of one step came to."""

    loss: float
    grad_norm: float
    gap_mean: float
    gap_max: float
    clip_fraction: float
    nll: float
    n_tokens: int


class Learner:
    """Trains one Learnable by the settings of a run."""

    def __init__(self, learnable: Learnable, config: Config) -> None:
        self._learnable = learnable
        self._settings = config.trainer
        self._seed, self._temperature = config.seed, config.sampling.temperature
        model = learnable.model
        self._padding_id = _padding_id(model.config)
        shares = works(
            learnable.logits,
            n_vocabulary=policy.vocabulary_size(model),
            max_length=policy.max_length(model.config),
        )
        self._shortest_prefix = SHORTEST_PREFIX if shares else None
        self.optimizer = torch.optim.AdamW(
            learnable.parameters,
            lr=self._settings.learning_rate,
            betas=(self._settings.beta1, self._settings.beta2),
            weight_decay=self._settings.weight_decay,
        )
        self._n_workers = 1 if learnable.device.type == "cuda" else min(8, len(os.sched_getaffinity(0)))
        self._workers = ThreadPoolExecutor(
            self._n_workers, thread_name_prefix="agenttrain-gradient", initializer=lambda: torch.set_num_threads(1)
        )

    def train(self, kept: Sequence[Lesson], *, step: int, learning_rate: float, weight_version: int) -> Training:
        """The updates of one step.

        Args:
            kept: at least one.
            step: from 1; shuffles the deal into minibatches, together with the seed.
            weight_version: of the weights that the step began with.

        Raises:
            TrainerError: the gradient is not finite; the updates before it in the step stand, see `whole_or_undone`.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [
            micro_batches(
                part,
                mean=self._settings.loss,
                max_tokens=self._settings.micro_batch_tokens,
                n_workers=self._n_workers,
                weight_version=weight_version,
                padding_id=self._padding_id,
                shortest_prefix=self._shortest_prefix,
            )
            for part in minibatches(kept, self._settings.minibatches, seed=f"{self._seed}-{step}")
        ]
        # The first part's own passes see the weights that sampled it; the others' gaps are measured before any update.
        gaps = [p for part in parts[1:] for p in self._workers.map(self._measured, part)]
        losses, norms, passes = [], [], []
        for part in parts:
            done, norm = self._update(part, step)
            losses.append(sum(p.loss for p in done))
            norms.append(norm)
            passes += done
            if part is parts[0]:
                gaps += done
        n_fresh, n_tokens = sum(p.n_fresh for p in gaps), sum(p.n_tokens for p in passes)
        return Training(
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            gap_mean=sum(p.gap_sum for p in gaps) / max(1, n_fresh),
            gap_max=max(p.gap_max for p in gaps),
            clip_fraction=sum(p.n_clipped for p in passes) / n_tokens,
            nll=sum(p.nll_sum for p in passes) / n_tokens,
            n_tokens=n_tokens,
        )

    def _update(self, part: Sequence[MicroBatch], step: int) -> tuple[list[PassResult], float]:
        """One optimizer step over micro-batches; gives their results without gradients, and the gradient's norm."""
        grads: list[torch.Tensor] | None = None
        done: list[PassResult] = []
        for start in range(0, len(part), self._n_workers):
            for result in self._workers.map(self._differentiated, part[start : start + self._n_workers]):
                if grads is None:
                    grads = list(result.grads)
                else:
                    torch._foreach_add_(grads, list(result.grads))
                done.append(_without_grads(result))
        assert grads is not None
        for parameter, grad in zip(self._learnable.parameters, grads, strict=True):
            parameter.grad = grad
        norm = float(torch.nn.utils.clip_grad_norm_(self._learnable.parameters, self._settings.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainerError(
                f"The gradient of step {step} is {norm}, and an update needs a finite one. Lower "
                "trainer.learning_rate, and look at this step's rewards with `agenttrain inspect`."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return done, norm

    def _differentiated(self, batch: MicroBatch) -> PassResult:
        batch = batch.to(self._learnable.device)
        logprobs = self._log_probabilities(batch)
        policy_ = policy_loss(
            logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            weights=batch.weights,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        grads = torch.autograd.grad(policy_.loss, self._learnable.parameters, allow_unused=True, materialize_grads=True)
        return _pass_result(
            batch, logprobs.detach(), grads=grads, loss=float(policy_.loss.detach()), n_clipped=policy_.n_clipped
        )

    def _measured(self, batch: MicroBatch) -> PassResult:
        batch = batch.to(self._learnable.device)
        with torch.no_grad():
            return _pass_result(batch, self._log_probabilities(batch), grads=(), loss=0.0, n_clipped=0)

    def _log_probabilities(self, batch: MicroBatch) -> torch.Tensor:
        """[N] of the trained tokens, at the temperature of sampling.

        Rows are padded on the right and attention is causal, so that no real position sees padding and no mask is
        needed; models with recurrent layers are right for the same reason.
        """
        if len(batch.prefix):
            logits = logits_after(self._learnable.logits, batch.prefix, batch.flat, batch.input_ids)
        else:
            logits = self._learnable.logits.at(batch.flat, batch.input_ids, use_cache=False)
        logits = logits / self._temperature
        return -torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")

    @contextmanager
    def whole_or_undone(self) -> Iterator[None]:
        """Undo a step's updates when anything ends it, Ctrl-C too: what is saved then is the state before the step.

        Holds a copy of the weights and the optimizer's state meanwhile.
        """
        weights = [p.detach().clone() for p in self._learnable.parameters]
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, before in zip(self._learnable.parameters, weights, strict=True):
                    parameter.copy_(before)
                    parameter.grad = None
            self.optimizer.load_state_dict(optimizer)
            raise

    def close(self) -> None:
        """End the workers."""
        self._workers.shutdown(wait=True, cancel_futures=True)


def _padding_id(config: Any) -> int:
    """An id to pad with that is not the model's own padding id: some models warn when they see theirs unmasked."""
    return 1 if config.pad_token_id == 0 else 0


def _pass_result(
    batch: MicroBatch, logprobs: torch.Tensor, *, grads: tuple[torch.Tensor, ...], loss: float, n_clipped: int
) -> PassResult:
    gaps = (logprobs - batch.old_logprobs).abs()[batch.fresh]
    return PassResult(
        grads=grads,
        loss=loss,
        n_clipped=n_clipped,
        gap_sum=float(gaps.sum()),
        gap_max=float(gaps.max()) if gaps.numel() else 0.0,
        n_fresh=gaps.numel(),
        nll_sum=float(-batch.old_logprobs.sum()),
        n_tokens=batch.targets.numel(),
    )


def _without_grads(result: PassResult) -> PassResult:
    return PassResult(
        grads=(),
        loss=result.loss,
        n_clipped=result.n_clipped,
        gap_sum=result.gap_sum,
        gap_max=result.gap_max,
        n_fresh=result.n_fresh,
        nll_sum=result.nll_sum,
        n_tokens=result.n_tokens,
    )
