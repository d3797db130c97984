"""Lessons become updates of the policy's weights: forward and backward passes, gradients summed, optimizer steps.

Invariants: before a step's first update the log probabilities recorded in sampling are compared with the trainer's own,
and everything that stays fixed through a step (reference, values, corrections for the engine) is measured; a step that
is cut short leaves the weights and the optimizer as they were. Gradients are summed in the order of the micro-batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from agenttrain.config import Config
from agenttrain.errors import TrainerError
from agenttrain.local.critic import ValueHead, hidden_width
from agenttrain.local.learnable import Learnable
from agenttrain.local.passes import Passes
from agenttrain.local.policy import Logits
from agenttrain.trainer.algorithms import chosen
from agenttrain.trainer.batches import Lesson, Measured, MicroBatch, minibatches
from agenttrain.trainer.loss import (
    PolicyLoss,
    clipped_loss,
    importance_weights,
    k3,
    likelihood_loss,
    rollout_ratio,
    token_ratio,
    value_loss,
)

OF_CRITIC = "value_head."
"""Before the names of the critic's weights in a checkpoint."""
OF_SETTINGS = ("lr", "betas", "weight_decay")
"""What of an optimizer's saved state a configuration says, and a resumed run may change."""
Place = tuple[str, int]
"""A rollout, and which of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """|trainer - engine| log probability over fresh tokens of one micro-batch."""

    total: float
    largest: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one micro-batch gives."""

    grads: tuple[torch.Tensor, ...]
    """In the order of the parameters, the critic's last; emptied once they are summed."""
    loss: float
    value_loss: float
    n_clipped: int
    gap: Gap
    nll_sum: float
    """Of the recorded log probabilities, negated."""
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the updates of one step came to."""

    loss: float
    grad_norm: float
    gap_mean: float | None
    """None: the weights that the step began with sampled no token of it."""
    gap_max: float | None
    clip_fraction: float
    nll: float
    n_tokens: int
    """Trained tokens, each counted once however many updates it took part in."""
    n_updates: int
    value_loss: float | None
    """None without a critic."""
    unreplayed: Gap | None = None
    """Where tokens route anew instead, of one micro-batch. None: no experts were replayed."""


class Learner:
    """Trains one Learnable by the settings of a run."""

    def __init__(self, learnable: Learnable, config: Config) -> None:
        """Make ready to train.

        Raises:
            ConfigError: settings that don't go together, or that this model can't be trained by.
        """
        self._learnable, self._settings, self._seed = learnable, config.trainer, config.seed
        self.algorithm = chosen(config.trainer)
        self._passes = Passes(learnable, config)
        self.critic: ValueHead | None = None
        groups = [{"params": learnable.parameters, "lr": self._settings.learning_rate}]
        if self.algorithm.critic is not None:
            width = hidden_width(learnable.model)
            self.critic = ValueHead(width, seed=config.seed, device=learnable.device)
            learnable.logits.keeps_hidden = True
            groups.append({"params": self.critic.parameters, "lr": self.algorithm.critic.value_learning_rate})
        self._parameters = [parameter for group in groups for parameter in group["params"]]  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW(
            groups,
            betas=(self._settings.beta1, self._settings.beta2),
            weight_decay=self._settings.weight_decay,
        )

    @property
    def _is_likelihood(self) -> bool:
        """Log probabilities of the updates are without a temperature then, and are none to hold against sampling."""
        return self.algorithm.ratio == "none"

    # ── before the updates ───────────────────────────────────────────────────────────────────────────────────────

    def measured(self, kept: Sequence[Lesson]) -> tuple[Lesson, ...]:
        """The lessons with what the algorithm fixes at the weights of now; unchanged where it fixes nothing."""
        own_pass = self._settings.importance_cap is not None or self.critic is not None
        if not kept or not (own_pass or self._settings.kl_coefficient):
            return tuple(kept)
        batches = self._passes.laid_out(kept, weight_version=0)
        found: dict[Place, Measured] = {place: Measured() for batch in batches for place in batch.places}
        if own_pass:
            for part in self._passes.each(self._measured_by_itself, batches):
                found |= part
        if self._settings.kl_coefficient:
            with self._learnable.reference() as reference:
                by_reference = partial(self._by_place, logits=reference)
                for rows in self._passes.each(by_reference, batches):
                    found |= {p: replace(found[p], reference_logprobs=row) for p, row in rows.items()}
        return tuple(
            replace(lesson, measured=tuple(found[lesson.rollout_id, n] for n in range(len(lesson.samples))))
            for lesson in kept
        )

    def _measured_by_itself(self, batch: MicroBatch) -> dict[Place, Measured]:
        rows = self._by_place(batch)
        values = importance = None
        if self.critic is not None:
            with torch.no_grad():
                values = batch.by_place(self.critic.values(self._passes.hidden()).cpu())
        if (cap := self._settings.importance_cap) is not None:
            recorded = batch.by_place(batch.recorded_logprobs)
            importance = {place: importance_weights(row, recorded[place], cap) for place, row in rows.items()}
        return {
            place: Measured(
                logprobs=row if importance else None,
                importance=importance[place] if importance else None,
                values=values[place] if values else None,
            )
            for place, row in rows.items()
        }

    def _by_place(self, batch: MicroBatch, logits: Logits | None = None) -> dict[Place, torch.Tensor]:
        """Log probabilities of each row, without gradient."""
        with torch.no_grad():
            return batch.by_place(self._passes.log_probabilities(batch.to(self._passes.device), logits).cpu())

    # ── the updates ──────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, kept: Sequence[Lesson], *, step: int, learning_rate: float, weight_version: int) -> Training:
        """The updates of one step.

        Args:
            kept: at least one; measured where the algorithm wants it.
            step: from 1; shuffles the deal into minibatches, together with the seed.
            weight_version: of the weights that the step began with.

        Raises:
            TrainerError: the gradient is not finite; the updates before it in the step stand, see `whole_or_undone`.
        """
        self.optimizer.param_groups[0]["lr"] = learning_rate
        gaps: list[Gap] = []
        losses: list[float] = []
        norms: list[float] = []
        passes: list[PassResult] = []
        unreplayed: Gap | None = None
        for epoch in range(self._settings.epochs):
            parts = self._parts(kept, step, epoch, weight_version)
            n_told = 0 if self._is_likelihood else 1
            if epoch == 0:  # the first part's own passes see the weights that sampled it; the others are read before
                unread = [batch for part in parts[n_told:] for batch in part if batch.fresh.any()]
                gaps = list(self._passes.each(self._gap, unread))
                unreplayed = self._unreplayed_gap(parts)
            for n, part in enumerate(parts):
                done, norm = self._update(part, step)
                gaps += [each.gap for each in done] if epoch == 0 and n < n_told else []
                losses.append(sum(each.loss for each in done))
                norms.append(norm)
                passes += done
        training = _training(
            passes, gaps, losses, norms, n_epochs=self._settings.epochs, has_critic=self.critic is not None
        )
        return replace(training, unreplayed=unreplayed)

    def _parts(self, kept: Sequence[Lesson], step: int, epoch: int, weight_version: int) -> list[list[MicroBatch]]:
        """The updates of one epoch, each laid out."""
        seed = f"{self._seed}-{step}-{epoch}" if epoch else f"{self._seed}-{step}"
        return [
            self._passes.laid_out(part, weight_version=weight_version)
            for part in minibatches(kept, self._settings.minibatches, seed=seed)
        ]

    def _update(self, part: Sequence[MicroBatch], step: int) -> tuple[list[PassResult], float]:
        """One optimizer step over micro-batches; gives their results without gradients, and the gradient's norm."""
        ratios = self._mean_log_ratios(part) if self.algorithm.ratio == "rollout" else {}
        grads: list[torch.Tensor] | None = None
        done: list[PassResult] = []
        for result in self._passes.each(partial(self._differentiated, mean_log_ratios=ratios), part):
            if grads is None:
                grads = list(result.grads)
            else:
                torch._foreach_add_(grads, list(result.grads))
            done.append(replace(result, grads=()))
        assert grads is not None
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        norm = self._clipped_norm(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return done, norm

    def _clipped_norm(self, step: int) -> float:
        """The norm of the policy's gradient before it is held to the largest allowed; the critic's is held apart."""
        largest = self._settings.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self._learnable.parameters, largest))
        if not math.isfinite(norm):
            raise TrainerError(
                f"The gradient of step {step} is {norm}, and an update needs a finite one. Lower "
                "trainer.learning_rate, and look at this step's rewards with `agenttrain inspect`."
            )
        if self.critic is not None and self.algorithm.critic is not None:
            torch.nn.utils.clip_grad_norm_(self.critic.parameters, largest)
            if step <= self.algorithm.critic.critic_warmup_steps:
                for parameter in self._learnable.parameters:
                    parameter.grad = None
        return norm

    def _mean_log_ratios(self, part: Sequence[MicroBatch]) -> dict[str, float]:
        """Rollout id to the mean log ratio of its tokens now, over all of its rows."""
        ratios: dict[str, list[float]] = {}
        for batch, rows in zip(part, self._passes.each(self._by_place, part), strict=True):
            old = batch.by_place(batch.old_logprobs)
            for (rollout_id, n), row in rows.items():
                ratios.setdefault(rollout_id, []).extend((row - old[rollout_id, n]).tolist())
        return {rollout_id: math.fsum(each) / len(each) for rollout_id, each in ratios.items()}

    def _differentiated(self, batch: MicroBatch, mean_log_ratios: Mapping[str, float]) -> PassResult:
        batch = batch.to(self._passes.device)
        if self._is_likelihood:
            batch = replace(batch, experts=None)  # those of the base, which the weights of now may not choose
        logprobs = self._passes.log_probabilities(batch, temperature=1.0 if self._is_likelihood else None)
        policy = self._policy_loss(batch, logprobs, mean_log_ratios)
        value = self._value_loss(batch)
        grads = torch.autograd.grad(
            policy.loss if value is None else policy.loss + value,
            self._parameters,
            allow_unused=True,
            materialize_grads=True,
        )
        return PassResult(
            grads=grads,
            loss=float(policy.loss.detach()),
            value_loss=0.0 if value is None else float(value.detach()),
            n_clipped=policy.n_clipped,
            gap=_gap(batch, logprobs.detach()),
            nll_sum=float(-batch.recorded_logprobs.sum()),
            n_tokens=batch.targets.numel(),
        )

    def _policy_loss(
        self, batch: MicroBatch, logprobs: torch.Tensor, mean_log_ratios: Mapping[str, float]
    ) -> PolicyLoss:
        if self._is_likelihood:
            return likelihood_loss(logprobs, weights=batch.weights)
        if self.algorithm.ratio == "rollout":
            means = torch.tensor([mean_log_ratios[rollout_id] for rollout_id, _ in batch.places])
            each = means.repeat_interleave(torch.tensor(batch.n_trained)).to(logprobs.device)
            ratio = rollout_ratio(logprobs, each)
        else:
            ratio = token_ratio(logprobs, batch.old_logprobs)
        clipped = clipped_loss(
            ratio,
            advantages=batch.advantages,
            weights=batch.weights * batch.importance,
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
        )
        if self._settings.kl == "k1" or batch.reference_logprobs is None:
            return clipped
        distance = (k3(logprobs, batch.reference_logprobs) * batch.weights).sum()
        return replace(clipped, loss=clipped.loss + self._settings.kl_coefficient * distance)

    def _value_loss(self, batch: MicroBatch) -> torch.Tensor | None:
        if self.critic is None or self.algorithm.critic is None or batch.values is None or batch.returns is None:
            return None
        return value_loss(
            self.critic.values(self._passes.hidden()),
            old_values=batch.values,
            returns=batch.returns,
            weights=batch.weights,
            clip=self.algorithm.critic.value_clip,
        )

    def _gap(self, batch: MicroBatch) -> Gap:
        if self._settings.importance_cap is not None:
            return _gap(batch, batch.old_logprobs)  # the trainer's own, measured already
        batch = batch.to(self._passes.device)
        with torch.no_grad():
            return _gap(batch, self._passes.log_probabilities(batch))

    def _unreplayed_gap(self, parts: Sequence[Sequence[MicroBatch]]) -> Gap | None:
        """What the gap would be if tokens routed anew, by one more pass over the first rows that have experts."""
        batches = (batch for part in parts for batch in part if batch.experts is not None and batch.fresh.any())
        first = next(batches, None)
        if first is None:
            return None
        batch = replace(first, experts=None).to(self._passes.device)
        with torch.no_grad():
            return _gap(batch, self._passes.log_probabilities(batch))

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def saved(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps beside the optimizer's state: what is learned of the policy, and the critic."""
        critic = self.critic.saved() if self.critic is not None else {}
        return {**self._learnable.saved(), **{OF_CRITIC + name: tensor for name, tensor in critic.items()}}

    def restore(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], *, where: str) -> None:
        """Take back what `saved` gave and the optimizer's state; its rates and decay are those of the settings of now.

        Raises:
            ModelError: weights of another architecture.
        """
        critic = {name.removeprefix(OF_CRITIC): w for name, w in weights.items() if name.startswith(OF_CRITIC)}
        policy = {name: w for name, w in weights.items() if not name.startswith(OF_CRITIC)}
        if self.critic is not None:
            self.critic.restore(critic, where=where)
        self._learnable.restore(policy, where=where)
        own = [{key: group[key] for key in OF_SETTINGS} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(dict(optimizer))
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)

    @contextmanager
    def whole_or_undone(self) -> Iterator[None]:
        """Undo a step's updates when anything ends it, Ctrl-C too: what is saved then is the state before the step.

        Holds a copy of the weights (the critic's too) and the optimizer's state meanwhile.
        """
        weights = [p.detach().clone() for p in self._parameters]
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, before in zip(self._parameters, weights, strict=True):
                    parameter.copy_(before)
                    parameter.grad = None
            self.optimizer.load_state_dict(optimizer)
            raise

    def close(self) -> None:
        """End the workers."""
        self._passes.close()


def _training(
    passes: Sequence[PassResult],
    gaps: Sequence[Gap],
    losses: Sequence[float],
    norms: Sequence[float],
    *,
    n_epochs: int,
    has_critic: bool,
) -> Training:
    n_fresh, n_seen = sum(gap.n for gap in gaps), sum(each.n_tokens for each in passes)
    return Training(
        loss=sum(losses) / len(losses),
        grad_norm=sum(norms) / len(norms),
        gap_mean=sum(gap.total for gap in gaps) / n_fresh if n_fresh else None,
        gap_max=float(torch.tensor([gap.largest for gap in gaps], dtype=torch.float64).max()) if n_fresh else None,
        clip_fraction=sum(each.n_clipped for each in passes) / n_seen,
        nll=sum(each.nll_sum for each in passes) / n_seen,
        n_tokens=n_seen // n_epochs,
        n_updates=len(losses),
        value_loss=sum(each.value_loss for each in passes) / len(losses) if has_critic else None,
    )


def _gap(batch: MicroBatch, logprobs: torch.Tensor) -> Gap:
    gaps = (logprobs - batch.recorded_logprobs).abs()[batch.fresh]
    return Gap(total=float(gaps.sum()), largest=float(gaps.max()) if gaps.numel() else 0.0, n=gaps.numel())
