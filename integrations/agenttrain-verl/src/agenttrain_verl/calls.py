"""Optimizer steps to calls of veRL's update: what each call is told, and what a rollout's advantage is multiplied by.

veRL's `train_mini_batch` goes through mini-batches of one size with one number to divide the loss by. A call here is
several updates where that gives each its own exact loss, and a single one elsewhere. Pure; knows no TransferQueue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agenttrain_verl.algorithms import VerlAlgorithm
from agenttrain_verl.dealing import Deal, Update
from agenttrain_verl.rows import Row, by_rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of veRL's update."""

    updates: tuple[Update, ...]
    """In turn; a rollout is in one of them."""
    epochs: int
    """How often veRL goes through all of them."""
    n_rollouts: int
    """What veRL divides a mini-batch's sum by, where its mean counts rows."""
    factors: Mapping[str, float]
    """Rollout id to what its advantage is multiplied by, since veRL's clipped loss grows with the advantage alone."""

    @property
    def places(self) -> list[int]:
        """Positions as veRL must see them."""
        return Deal(updates=self.updates, n_padding=0).order

    @property
    def n_rows(self) -> int:
        """Of one mini-batch, over all ranks."""
        return self.updates[0].n_rows

    @property
    def n_updates(self) -> int:
        return len(self.updates) * self.epochs


def calls_of(deals: Sequence[Deal], rows: Sequence[Row], algorithm: VerlAlgorithm, *, has_distance: bool) -> list[Call]:
    """The calls that make a step's updates.

    Args:
        deals: one for each epoch.
        has_distance: the loss has a term beside the advantages, which no factor reaches.

    Returns:
        As few as are exact: one, where the rollouts of an update are the same in every epoch or there is one epoch.
    """
    tokens = {rollout_id: sum(row.n_trained for row in own) for rollout_id, own in by_rollout(rows).items()}
    if len(deals[0].updates) == 1 and not algorithm.reanchors:
        return [_call(deals[0].updates, tokens, algorithm, epochs=len(deals))]
    calls = []
    for deal in deals:
        uneven = len({len(update.rollout_ids) for update in deal.updates}) > 1
        apart = algorithm.reanchors or (algorithm.is_constant and has_distance and uneven)
        parts = [(update,) for update in deal.updates] if apart else [deal.updates]
        calls += [_call(part, tokens, algorithm, epochs=1) for part in parts]
    return calls


def n_calls(algorithm: VerlAlgorithm, *, minibatches: int, epochs: int) -> int:
    """Calls of veRL's update in a whole step: how often veRL's schedule of the learning rate goes on in it.

    veRL takes one step of the schedule with the last update of each call (workers/engine_workers.py, train_mini_batch,
    at 0.9.1). A step with fewer rollouts than mini-batches, and one with uneven mini-batches of "dr_grpo" with a
    distance in its loss, takes another number.

    Example: gspo, two mini-batches, two epochs: 4; grpo: 2, and with one mini-batch 1.
    """
    if algorithm.reanchors:
        return minibatches * epochs
    return epochs if minibatches > 1 else 1


def _call(updates: tuple[Update, ...], tokens: Mapping[str, int], algorithm: VerlAlgorithm, *, epochs: int) -> Call:
    n_rollouts = max(len(update.rollout_ids) for update in updates)
    factors: dict[str, float] = {}
    for update in updates:
        n = len(update.rollout_ids)
        if algorithm.scales_by_rollout:
            factors |= {rollout_id: 1.0 / (n * tokens[rollout_id]) for rollout_id in update.rollout_ids}
        else:
            factors |= dict.fromkeys(update.rollout_ids, n_rollouts / n if algorithm.is_constant else 1.0)
    return Call(updates=updates, epochs=epochs, n_rollouts=n_rollouts, factors=factors)


def anchored(
    now: Sequence[torch.Tensor],
    old: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    rollouts: Sequence[str | None],
) -> list[torch.Tensor]:
    """Old log probabilities against which the ratio of each token is that of its whole rollout, at the weights of now.

    Their distance to the log probabilities of now is the rollout's mean log ratio, over all of its rows, so that a clip
    of each token is a clip of the rollout, and each token's own gradient flows.

    Args:
        now: [rows][T] log probabilities at the weights of now.
        old: [rows][T] what ratios are taken against.
        masks: [rows][T]
        rollouts: [rows] whose each is; None: padding.

    Returns:
        [rows][T]

    Source: GSPO, arXiv:2507.18071, equations 7 and 14; `agenttrain.trainer.loss.rollout_ratio`.

    Example: now [-1, -1] and [-2] of one rollout, old [-1.2, -1.1] and [-2]: mean log ratio 0.1, so [-1.1, -1.1] and
    [-2.1].
    """
    ratios: dict[str | None, list[float]] = {}
    for n, o, mask, rollout_id in zip(now, old, masks, rollouts, strict=True):
        ratios.setdefault(rollout_id, []).extend((n - o)[mask.bool()].tolist())
    means = {rollout_id: math.fsum(each) / max(1, len(each)) for rollout_id, each in ratios.items()}
    return [n - means[rollout_id] for n, rollout_id in zip(now, rollouts, strict=True)]


def sequence_weights(
    own: Sequence[torch.Tensor],
    recorded: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    rollouts: Sequence[str | None],
    *,
    cap: float,
) -> list[torch.Tensor]:
    """What corrects for the engine, by whole rollouts: the product of the ratios of all trained tokens, capped.

    veRL's own takes each row for a sequence (rollout_corr_helper.py at 0.9.1). As there, the logarithm is held
    within ±20.

    Args:
        own: [rows][T] the trainer's log probabilities.
        recorded: [rows][T] the engine's.
        masks: [rows][T]
        rollouts: [rows] whose each is; None: padding.
        cap: no weight is more.

    Returns:
        [rows][T] one number for each rollout, 0 where nothing is trained.
    """
    sums: dict[str | None, float] = {}
    for o, r, mask, rollout_id in zip(own, recorded, masks, rollouts, strict=True):
        sums[rollout_id] = sums.get(rollout_id, 0.0) + float(((o - r) * mask).sum())
    weights = {rollout_id: min(math.exp(max(-20.0, min(20.0, each))), cap) for rollout_id, each in sums.items()}
    return [mask.float() * weights[rollout_id] for mask, rollout_id in zip(masks, rollouts, strict=True)]
