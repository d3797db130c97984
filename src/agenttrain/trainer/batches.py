"""Results of rollouts to what is handed to the loss: who teaches, in which update, laid out as tensors.

Every rollout is either trained or dropped with a reason. A rollout's trajectories stay in one update and share its
advantage, which is counted once in the group. Knows nothing of models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from agenttrain.errors import SampleError, TrainerError
from agenttrain.records import NOT_ADMITTED, RolloutResult, Sample
from agenttrain.trainer.advantage import all_equal
from agenttrain.trainer.loss import LossMean, token_weights

ALL_EQUAL = "all rewards equal"
TOO_FEW = "fewer than two usable rollouts"
NOTHING_SAMPLED = "no trained tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A rollout that is trained."""

    result: RolloutResult
    advantage: float

    @property
    def rollout_id(self) -> str:
        return self.result.rollout.id

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Those with at least one trained token."""
        return tuple(sample for sample in self.result.samples if any(sample.response_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What one step's rollouts teach."""

    kept: tuple[Lesson, ...]
    """In the order of the requests."""
    dropped: dict[str, str]
    """Rollout id to the reason."""
    n_groups: int
    n_equal: int
    """Groups dropped because all rewards were equal."""
    n_trained: int
    """Groups that teach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass; N trained tokens of B right-padded trajectories."""

    prefix: torch.Tensor
    """[P] ids that every row follows, none of them trained; P is 0 where nothing is shared."""
    input_ids: torch.Tensor
    """[B, T] what comes after the prefix."""
    flat: torch.Tensor
    """[N] row × T + column of the position whose logits predict each trained token."""
    targets: torch.Tensor
    """[N] the sampled ids."""
    old_logprobs: torch.Tensor
    """[N]"""
    advantages: torch.Tensor
    """[N]"""
    weights: torch.Tensor
    """[N]"""
    fresh: torch.Tensor
    """[N] bool: sampled by the weights that this step began with."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


def usable(result: RolloutResult) -> bool:
    """Whether a rollout has a reward and may be trained."""
    return result.rollout.reward is not None and bool(result.samples)


def lessons(results: Sequence[RolloutResult], advantages: Callable[[Sequence[float]], list[float]]) -> Lessons:
    """Group results by task and keep the rollouts that teach.

    Raises:
        TrainerError: the estimator answers with another number of advantages than rewards.
    """
    by_task: dict[str, list[RolloutResult]] = {}
    for result in results:
        by_task.setdefault(result.request.task.id, []).append(result)
    kept: list[Lesson] = []
    dropped: dict[str, str] = {}
    n_equal = n_trained = 0
    for task_id, group in by_task.items():
        dropped.update({r.rollout.id: _why_unusable(r) for r in group if not usable(r)})
        able = [result for result in group if usable(result)]
        rewards = [r.rollout.reward.score for r in able if r.rollout.reward is not None]
        if len(able) < 2:
            dropped.update({r.rollout.id: TOO_FEW for r in able})
        elif all_equal(rewards):
            dropped.update({r.rollout.id: ALL_EQUAL for r in able})
            n_equal += 1
        else:
            scores = advantages(rewards)
            if len(scores) != len(rewards):
                raise TrainerError(
                    f"The advantage estimator gave {len(scores)} advantages for the {len(rewards)} rewards of task "
                    f"{task_id}. It must give one for each."
                )
            if not all(map(math.isfinite, scores)):
                raise TrainerError(f"The advantage estimator gave {scores} for task {task_id}. Each must be finite.")
            both = [Lesson(result=r, advantage=a) for r, a in zip(able, scores, strict=True)]
            dropped.update({lesson.rollout_id: NOTHING_SAMPLED for lesson in both if not lesson.samples})
            kept += [lesson for lesson in both if lesson.samples]
            n_trained += any(lesson.samples for lesson in both)
    return Lessons(kept=tuple(kept), dropped=dropped, n_groups=len(by_task), n_equal=n_equal, n_trained=n_trained)


def _why_unusable(result: RolloutResult) -> str:
    rollout = result.rollout
    if rollout.reward is None:
        return f"status {rollout.status}: {rollout.cause}" if rollout.cause else f"status {rollout.status}"
    return rollout.cause if rollout.cause.startswith(NOT_ADMITTED) else NOTHING_SAMPLED


def minibatches(kept: Sequence[Lesson], n: int, *, seed: str) -> list[list[Lesson]]:
    """Deal rollouts into at most n updates, shuffled by the seed; none is empty."""
    shuffled = list(kept)
    random.Random(seed).shuffle(shuffled)
    return [part for i in range(n) if (part := shuffled[i::n])]


def micro_batches(
    part: Sequence[Lesson],
    *,
    mean: LossMean,
    max_tokens: int,
    n_workers: int,
    weight_version: int,
    padding_id: int,
    shortest_prefix: int | None = None,
) -> list[MicroBatch]:
    """Lay out one update in passes of similar length.

    Args:
        max_tokens: ids in one pass, padding included; a longer trajectory is a pass of its own.
        n_workers: passes that run at once; the number of passes is a multiple of it, where there are enough rows.
        weight_version: of the weights that this step began with.
        shortest_prefix: a common beginning of a pass of at least this many ids is read once. None: never.
    """
    rows = [(sample, lesson) for lesson in part for sample in lesson.samples]
    each = token_weights(
        [sum(sample.response_mask) for sample, _ in rows], [lesson.rollout_id for _, lesson in rows], mean=mean
    )
    weighed = [(sample, lesson.advantage, weight) for (sample, lesson), weight in zip(rows, each, strict=True)]
    weighed.sort(key=lambda item: _n_ids(item[0]))
    lengths = [_n_ids(sample) for sample, *_ in weighed]
    passes = [weighed[start:end] for start, end in _even_cuts(lengths, max_tokens, n_workers)]
    return [
        _micro_batch(
            items,
            n_prefix=_n_shared([sample for sample, *_ in items], shortest_prefix),
            weight_version=weight_version,
            padding_id=padding_id,
        )
        for items in passes
    ]


def _n_shared(samples: Sequence[Sample], shortest: int | None) -> int:
    """Ids that all samples begin with, up to the position that predicts the first trained one."""
    if shortest is None or len(samples) < 2:
        return 0
    n = min(len(sample.prompt_ids) - 1 for sample in samples)
    first = samples[0].prompt_ids
    for sample in samples[1:]:
        while sample.prompt_ids[:n] != first[:n]:
            n = next(i for i in range(n) if sample.prompt_ids[i] != first[i])
    return n if n >= shortest else 0


def _cuts(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Runs of rising lengths whose padded size fits, as few as taking them in turn gives."""
    cuts: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] * (end + 1 - start) > max_tokens:
            cuts.append((start, end))
            start = end
    return cuts


def _even_cuts(lengths: Sequence[int], max_tokens: int, n_workers: int) -> list[tuple[int, int]]:
    """Cuts for a whole number of rounds of all workers, of about one padded size.

    Example: four rows of 10 within 40 for two workers: (0, 2) and (2, 4), not one pass and an idle worker.
    """
    n_rounds = -(-len(_cuts(lengths, max_tokens)) // n_workers)
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(lengths, middle)) <= n_rounds * n_workers:
            high = middle
        else:
            low = middle + 1
    return _cuts(lengths, high)


def _n_ids(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _micro_batch(
    items: Sequence[tuple[Sample, float, float]], *, n_prefix: int, weight_version: int, padding_id: int
) -> MicroBatch:
    width = max(_n_ids(sample) for sample, *_ in items) - 1 - n_prefix
    input_ids: list[list[int]] = []
    flat: list[int] = []
    targets: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    fresh: list[bool] = []
    for row, (sample, advantage, weight) in enumerate(items):
        ids = [*sample.prompt_ids, *sample.response_ids][n_prefix:-1]
        input_ids.append(ids + [padding_id] * (width - len(ids)))
        trained = [t for t, mask in enumerate(sample.response_mask) if mask]
        first = len(sample.prompt_ids) - 1 - n_prefix
        if first + trained[0] < 0:
            raise SampleError(
                f"Rollout {sample.extra_fields.get('rollout_id')} trains its very first id, which nothing predicts. "
                "Give it a prompt of at least one id."
            )
        flat += [row * width + first + t for t in trained]
        targets += [sample.response_ids[t] for t in trained]
        old += [sample.response_logprobs[t] for t in trained]
        advantages += [advantage] * len(trained)
        weights += [weight] * len(trained)
        fresh += [sample.extra_fields.get("min_global_steps", weight_version) == weight_version] * len(trained)
    return MicroBatch(
        prefix=torch.tensor(items[0][0].prompt_ids[:n_prefix], dtype=torch.long),
        input_ids=torch.tensor(input_ids),
        flat=torch.tensor(flat),
        targets=torch.tensor(targets),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
        fresh=torch.tensor(fresh),
    )
