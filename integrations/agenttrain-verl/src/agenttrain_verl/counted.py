"""A rollout counts once in veRL's trainer, whatever the number of its rows: in the baseline, and in the loss.

A mixin over veRL's PPOTrainer (the V1 one, at 0.9.1), with the stages that see rows in place of veRL's: rows are dealt
so that a rollout is in one mini-batch; estimators know whose a row is; each update is told the numbers that make its
loss the local trainer's. What is computed is in `dealing`, `credit`, `calls` and `step_figures`; here are the columns
of the TransferQueue that it is computed from, and goes to.

Invariants: one optimizer step for each mini-batch and epoch, whatever the number of rows; after a step the column
"advantages" holds what each token's advantage is, without what a call had multiplied it by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transfer_queue as tq
from agenttrain.errors import TrainerError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.utils.padding import response_from_nested

from agenttrain_verl.calls import Call, anchored, calls_of, sequence_weights
from agenttrain_verl.credit import (
    GroupAdvantages,
    Known,
    credited_parts,
    credited_rows,
    deviation_factors,
    known,
)
from agenttrain_verl.dealing import Deal, deal, in_order, seed_of
from agenttrain_verl.rates import rates
from agenttrain_verl.rows import Row, rows_of, unbound
from agenttrain_verl.step_figures import OWN, gap_figures, measured_figures, merged

if TYPE_CHECKING:
    from agenttrain.trainer.batches import Lesson

    from agenttrain_verl.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How the batch of now is dealt."""

    rows: tuple[Row, ...]
    """Without padding, in the order of the requests."""
    keys: tuple[str, ...]
    """Of the rows, then of padding."""
    deals: tuple[Deal, ...]
    """One for each epoch."""

    def keys_at(self, places: Sequence[int]) -> list[str]:
        return [self.keys[place] for place in places]

    @property
    def row_by_key(self) -> dict[str, Row]:
        return {row.key: row for row in self.rows}


class Counted(PPOTrainer):  # type: ignore[misc, unused-ignore]
    """veRL's trainer in which a rollout counts once."""

    plan: Plan
    group_advantages: GroupAdvantages
    rollout_order: Sequence[str] = ()
    """Ids of a step's rollouts in the order of the requests, set before each: they are dealt in it."""
    lessons: Sequence[Lesson] = ()
    """Of a step's rollouts, set before each: what their turns are worth where verifiers credit nodes or turns."""
    dealt: Dealt
    rate: float
    """The learning rate of the next update."""

    # ── which rows go where ──────────────────────────────────────────────────────────────────────────────────────

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Ranks alone: mini-batches are evened out by the deal."""
        return dp_size

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        rows = in_order(rows_of(batch), self.rollout_order)
        n_ranks = self._n_ranks()
        settings = self.plan.config.trainer
        deals = [
            deal(
                rows,
                n_minibatches=settings.minibatches,
                n_ranks=n_ranks,
                seed=seed_of(self.plan.config.seed, self.global_steps, epoch),
            )
            for epoch in range(settings.epochs)
        ]
        n_whole = len(rows) + max(each.n_padding for each in deals)
        batch = batch.select_keys([row.key for row in rows])
        batch = upsample_batch_to_divisible_size(batch, n_whole, self.tokenizer.eos_token_id)
        self.dealt = Dealt(rows=tuple(rows), keys=tuple(batch.keys), deals=tuple(deals))
        widest = max(deals, key=lambda each: each.n_padding)
        batch.reorder(widest.order)
        lengths = [tag["seq_len"] for tag in batch.tags]
        share = len(lengths) // n_ranks
        partitions = [list(range(rank * share, (rank + 1) * share)) for rank in range(n_ranks)]
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=partitions, prefix=logging_prefix))
        return batch

    def _n_ranks(self) -> int:
        """Data-parallel ranks, as veRL's own `_balance_batch` finds them."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    # ── before the updates ───────────────────────────────────────────────────────────────────────────────────────

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        own, recorded, masks = self._columns(
            [row.key for row in self.dealt.rows], "old_log_probs", "rollout_log_probs", "response_mask"
        )
        metrics.update(
            gap_figures(self.dealt.rows, own=own, recorded=recorded, masks=masks, weight_version=self.global_steps - 1)
        )
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        rows = [self.dealt.row_by_key.get(key) for key in batch.keys]
        values = self._columns(batch.keys, "values")[0] if self.use_critic else None
        padded = None if values is None else torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
        parts = credited_parts(self.lessons)
        with known(Known(rows=rows, estimate=self.group_advantages, values=padded, parts=parts)):
            batch = super()._compute_advantage(batch, metrics)
        if self.plan.algorithm.adv_estimator == "grpo" and self.plan.algorithm.norm_by_std:
            by_group = deviation_factors(self.dealt.rows)
            self._multiply({row.rollout_id: by_group[row.group_id] for row in self.dealt.rows})
        self._put_credited()
        self._correct_by_rollout()
        return batch

    def _put_credited(self) -> None:
        """Each token's own advantage in place of its rollout's, where verifiers credit nodes or turns."""
        by_key = credited_rows(self.dealt.rows, self.lessons)
        if not by_key:
            return
        keys = list(by_key)
        (masks,) = self._columns(keys, "response_mask")
        laid = [torch.zeros(len(mask)) for mask in masks]
        for row, mask, advantages in zip(laid, masks, by_key.values(), strict=True):
            row[mask.bool()] = torch.tensor(advantages)
        self._put(keys, "advantages", laid)

    @property
    def _corrects(self) -> str | None:
        """What veRL takes its importance weights over: "token", "sequence", or None where it takes none."""
        settings = self.config.algorithm.get("rollout_correction", None)
        found = settings.get("rollout_is", None) if settings else None
        return None if found is None else str(found)

    def _correct_by_rollout(self) -> None:
        """Weights of whole rollouts in place of veRL's, which are those of rows."""
        if self._corrects != "sequence":
            return
        keys = [row.key for row in self.dealt.rows]
        own, recorded, masks = self._columns(keys, "old_log_probs", "rollout_log_probs", "response_mask")
        ids = [row.rollout_id for row in self.dealt.rows]
        cap = float(self.config.algorithm.rollout_correction.rollout_is_threshold)
        self._put(keys, "rollout_is_weights", sequence_weights(own, recorded, masks, ids, cap=cap))

    # ── the updates ──────────────────────────────────────────────────────────────────────────────────────────────

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        calls = calls_of(
            self.dealt.deals,
            self.dealt.rows,
            self.plan.algorithm,
            has_distance=bool(self.config.actor_rollout_ref.actor.use_kl_loss),
        )
        keys = [row.key for row in self.dealt.rows]
        (advantages,) = self._columns(keys, "advantages")
        (recorded,) = self._columns(keys, "old_log_probs" if self._corrects else "rollout_log_probs")
        (own,) = self._columns(keys, "old_log_probs")
        self._put(keys, "old_log_probs", recorded)
        metrics.update(self._measured_figures(keys))
        outputs = []
        for n, call in enumerate(calls):
            if self.plan.algorithm.reanchors:
                self._anchor(call, batch, dict(zip(keys, recorded, strict=True)), own if n == 0 else None)
            if any(factor != 1.0 for factor in call.factors.values()):
                self._put(keys, "advantages", advantages)
                self._multiply(call.factors)
            outputs.append(self._one_call(call, batch))
        self._put(keys, "advantages", advantages)
        metrics.update(_reduced(outputs, "actor"))
        metrics[f"{OWN}learning_rate"], self.rate = rates(outputs, first=self.rate)
        metrics[f"{OWN}updates"] = sum(call.n_updates for call in calls)
        return batch

    def _measured_figures(self, keys: Sequence[str]) -> dict[str, float]:
        wanted = {"old": "old_log_probs"}
        wanted |= {"reference": "ref_log_prob"} if self.use_reference_policy else {}
        wanted |= {"importance": "rollout_is_weights"} if self._corrects else {}
        wanted |= {"values": "values", "returns": "returns"} if self.use_critic else {}
        masks, *columns = self._columns(keys, "response_mask", *wanted.values())
        cap = self.plan.config.trainer.importance_cap
        return measured_figures(masks, cap=cap or math.inf, **dict(zip(wanted, columns, strict=True)))

    def _one_call(self, call: Call, batch: KVBatchMeta) -> Mapping[str, Any]:
        actor = self.config.actor_rollout_ref.actor
        part = self._part(call, batch)
        part.extra_info.update(
            calculate_entropy=bool(actor.calculate_entropy or actor.entropy_coeff != 0.0),
            distillation_use_topk=False,
            distillation_only=False,
            seed=actor.data_loader_seed,
        )
        found: Mapping[str, Any] = self.actor_rollout_wg.update_actor(part)["metrics"]
        norms = found["grad_norm"] if isinstance(found["grad_norm"], list) else [found["grad_norm"]]
        if not all(map(math.isfinite, norms)):
            raise TrainerError(
                f"The gradient of step {self.global_steps} is {norms}, and an update needs a finite one. Lower "
                "trainer.learning_rate, and look at this step's rewards with `agenttrain inspect`."
            )
        return found

    def _part(self, call: Call, batch: KVBatchMeta) -> KVBatchMeta:
        """What a call of an update is given."""
        part = batch.select_keys(self.dealt.keys_at(call.places))
        part.extra_info.update(
            mini_batch_size=call.n_rows,
            global_batch_size=call.n_rollouts,
            epochs=call.epochs,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        return part

    def _anchor(
        self, call: Call, batch: KVBatchMeta, recorded: Mapping[str, torch.Tensor], own: Sequence[torch.Tensor] | None
    ) -> None:
        """Shift a call's old log probabilities so that the ratio of each token is its rollout's, at the weights of now.

        Args:
            recorded: by key, what ratios are taken against.
            own: of all rows, where the weights are those that it was measured at.
        """
        row_by_key = self.dealt.row_by_key
        keys = [key for key in self.dealt.keys_at(call.places) if key in row_by_key]
        if own is None:
            now = self._logprobs_now(self._part(call, batch), keys)
        else:
            own_by_key = dict(zip((row.key for row in self.dealt.rows), own, strict=True))
            now = [own_by_key[key] for key in keys]
        (masks,) = self._columns(keys, "response_mask")
        ids = [row_by_key[key].rollout_id for key in keys]
        self._put(keys, "old_log_probs", anchored(now, [recorded[key] for key in keys], masks, ids))

    def _logprobs_now(self, part: KVBatchMeta, keys: Sequence[str]) -> Sequence[torch.Tensor]:
        """Log probabilities of the responses at the weights of now."""
        part.extra_info.update(calculate_entropy=False, compute_loss=False)
        self.actor_rollout_wg.compute_log_prob(part)
        data = tq.kv_batch_get(
            keys=list(keys), partition_id=part.partition_id, select_fields=["log_probs", "response_mask"]
        )
        return unbound(response_from_nested(data["log_probs"], data["response_mask"]))

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        calls = calls_of(self.dealt.deals, self.dealt.rows, self.plan.algorithm, has_distance=False)
        outputs = []
        for call in calls:
            part = self._part(call, batch)
            part.extra_info["seed"] = self.config.critic.data_loader_seed
            outputs.append(self.critic_wg.train_mini_batch(part).get()["metrics"])
        metrics.update(_reduced(outputs, "critic"))
        return batch

    # ── columns of the TransferQueue ─────────────────────────────────────────────────────────────────────────────

    def _columns(self, keys: Sequence[str], *names: str) -> list[Sequence[torch.Tensor]]:
        """[names][rows][T]"""
        data = tq.kv_batch_get(keys=list(keys), partition_id="train", select_fields=list(names))
        return [unbound(data[name]) for name in names]

    def _put(self, keys: Sequence[str], name: str, rows: Sequence[torch.Tensor]) -> None:
        column = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        tq.kv_batch_put(keys=list(keys), partition_id="train", fields=TensorDict({name: column}, batch_size=len(keys)))

    def _multiply(self, factors: Mapping[str, float]) -> None:
        """Advantages of the rollouts that are named, by their factors."""
        own = [row for row in self.dealt.rows if row.rollout_id in factors]
        keys = [row.key for row in own]
        (advantages,) = self._columns(keys, "advantages")
        self._put(
            keys, "advantages", [each * factors[row.rollout_id] for row, each in zip(own, advantages, strict=True)]
        )


def _reduced(outputs: Sequence[Mapping[str, Any]], role: str) -> dict[str, Any]:
    """veRL's names and means of what its calls gave, as its own trainer makes them of one call."""
    found = rename_dict(merged(outputs), f"{role}/")
    found[f"perf/mfu/{role}"] = found.pop(f"{role}/mfu")
    reduced: dict[str, Any] = reduce_metrics(found)
    return reduced
