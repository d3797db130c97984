"""Results of rollouts to what is handed to the loss: who teaches, in which update, laid out as tensors.

Every rollout is either trained or dropped with a reason. A rollout's trajectories stay in one update and share its
advantage, which is counted once in the group; where verifiers credit nodes or turns, each turn has one of its own.
Knows nothing of models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from agenttrain.errors import SampleError, TrainerError
from agenttrain.records import NOT_ADMITTED, Ids, RolloutResult, Sample
from agenttrain.trainer.advantage import all_equal
from agenttrain.trainer.by_turn import compared, credited, has_credit, turns_of_tokens
from agenttrain.trainer.loss import LossMean, token_weights

ALL_EQUAL = "all rewards equal"
TOO_FEW = "fewer than two usable rollouts"
NOTHING_SAMPLED = "no trained tokens"
WORTH_APART = 0.9
"""Rows that begin alike get passes of their own where all passes together then read less than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one sample's n trained tokens before the first update of a step. None: not wanted."""

    logprobs: torch.Tensor | None = None
    """[n] by the trainer, at the weights that the step began with."""
    importance: torch.Tensor | None = None
    """[n] trainer's over engine's probability, capped."""
    reference_logprobs: torch.Tensor | None = None
    """[n] by the policy at the run's start."""
    values: torch.Tensor | None = None
    """[n] what the critic expected from before each token on."""
    advantages: torch.Tensor | None = None
    """[n] of each token, where a critic gives them."""
    returns: torch.Tensor | None = None
    """[n] what the critic is held to."""


NOTHING_MEASURED = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A rollout that is trained."""

    result: RolloutResult
    advantage: float
    """Of the whole rollout."""
    by_token: tuple[tuple[float, ...], ...] = ()
    """[samples][n] each trained token's own. Empty: no turn was credited, and all have that of the rollout."""
    measured: tuple[Measured, ...] = ()
    """One per sample with trained tokens. Empty: nothing was measured."""
    share: float = 1.0
    """How many rollouts it counts as in the loss, above 0."""

    @property
    def rollout_id(self) -> str:
        return self.result.rollout.id

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Those with at least one trained token."""
        return tuple(sample for sample in self.result.samples if any(sample.response_mask))

    @property
    def rows(self) -> tuple[tuple[Sample, Measured], ...]:
        """The samples, each with what was measured of it."""
        measured = self.measured or (NOTHING_MEASURED,) * len(self.samples)
        return tuple(zip(self.samples, measured, strict=True))

    @property
    def token_advantages(self) -> tuple[tuple[float, ...], ...]:
        """[samples][T] of each response id as the loss sees it, 0.0 where the mask is 0."""
        return tuple(
            _spread(sample, self.of_group(place) if measured.advantages is None else measured.advantages.tolist())
            for place, (sample, measured) in enumerate(self.rows)
        )

    def of_group(self, place: int) -> Sequence[float]:
        """[n] what the siblings of the rollout make each trained token of one sample worth."""
        return self.by_token[place] if self.by_token else [self.advantage] * sum(self.samples[place].response_mask)


def _spread(sample: Sample, advantages: Sequence[float]) -> tuple[float, ...]:
    each = iter(advantages)
    return tuple(next(each) if mask else 0.0 for mask in sample.response_mask)


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

    places: tuple[tuple[str, int], ...]
    """[B] the rollout of each row, and which of its samples with trained tokens the row is."""
    n_trained: tuple[int, ...]
    """[B] trained tokens of each row; N is their sum."""
    prefix: torch.Tensor
    """[P] ids that every row follows, none of them trained; P is 0 where nothing is shared."""
    input_ids: torch.Tensor
    """[B, T] what comes after the prefix."""
    flat: torch.Tensor
    """[N] row × T + column of the position whose logits predict each trained token."""
    targets: torch.Tensor
    """[N] the sampled ids."""
    recorded_logprobs: torch.Tensor
    """[N] as the engine told them."""
    old_logprobs: torch.Tensor
    """[N] what ratios are taken against: the trainer's own where they were measured, else the recorded ones."""
    advantages: torch.Tensor
    """[N]"""
    weights: torch.Tensor
    """[N]"""
    importance: torch.Tensor
    """[N] 1 where nothing was measured."""
    fresh: torch.Tensor
    """[N] bool: sampled by the weights that this step began with."""
    reference_logprobs: torch.Tensor | None = None
    """[N]"""
    values: torch.Tensor | None = None
    """[N] the critic's, when the step began."""
    returns: torch.Tensor | None = None
    """[N]"""
    experts: torch.Tensor | None = None
    """[B, T, layers, K] that each id goes through, -1 where it routes by itself. None: all do."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on a device."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return MicroBatch(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in fields.items()})

    def by_place(self, numbers: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        """[N] numbers as those of each row."""
        return dict(zip(self.places, numbers.split(self.n_trained), strict=True))


def old_logprobs(sample: Sample, measured: Measured) -> torch.Tensor:
    """[n] what ratios are taken against: the trainer's own where they were measured, else the recorded ones."""
    if measured.logprobs is not None:
        return measured.logprobs
    return torch.tensor(recorded_logprobs(sample))


def recorded_logprobs(sample: Sample) -> list[float]:
    """[n] of the trained tokens, as the engine told them."""
    return [value for value, mask in zip(sample.response_logprobs, sample.response_mask, strict=True) if mask]


def usable(result: RolloutResult) -> bool:
    """Whether a rollout has a reward and may be trained."""
    return result.rollout.reward is not None and bool(result.samples)


def lessons(
    results: Sequence[RolloutResult],
    advantages: Callable[[Sequence[float]], list[float]],
    *,
    compares: bool = True,
    penalties: Mapping[str, float] | None = None,
) -> Lessons:
    """Group results by task and keep the rollouts that teach.

    Args:
        advantages: the estimator of a group.
        compares: siblings are each other's baseline, so that a group of one, or of equal rewards, teaches nothing.
        penalties: rollout id to what is taken from its reward before the estimator sees it. Which groups teach is
            decided by the rewards themselves.

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
        dropped.update({r.rollout.id: why_unusable(r) for r in group if not usable(r)})
        able = [result for result in group if usable(result)]
        if compares and len(able) < 2:
            dropped.update({r.rollout.id: TOO_FEW for r in able})
        elif compares and _all_alike(able):
            dropped.update({r.rollout.id: ALL_EQUAL for r in able})
            n_equal += 1
        elif able:
            both = _compared(task_id, able, advantages, compares=compares, penalties=penalties or {})
            dropped.update({lesson.rollout_id: NOTHING_SAMPLED for lesson in both if not lesson.samples})
            kept += [lesson for lesson in both if lesson.samples]
            n_trained += any(lesson.samples for lesson in both)
    return Lessons(kept=tuple(kept), dropped=dropped, n_groups=len(by_task), n_equal=n_equal, n_trained=n_trained)


def _rewards(group: Sequence[RolloutResult], penalties: Mapping[str, float]) -> list[float]:
    return [r.rollout.reward.score - penalties.get(r.rollout.id, 0.0) for r in group if r.rollout.reward is not None]


def _all_alike(group: Sequence[RolloutResult]) -> bool:
    """Whether no turn did better than the group's others, so that nothing can be learned."""
    rewards = _rewards(group, {})
    if not any(map(has_credit, group)):
        return all_equal(rewards)
    turns = compared([credited(result, reward) for result, reward in zip(group, rewards, strict=True)])
    return all(all_equal(values) for by_turn in turns for values in by_turn.values() or [rewards])


def _compared(
    task_id: str,
    group: Sequence[RolloutResult],
    advantages: Callable[[Sequence[float]], list[float]],
    *,
    compares: bool,
    penalties: Mapping[str, float],
) -> list[Lesson]:
    """A lesson for each rollout, with its advantage and, where a verifier credited turns, that of each token."""
    rewards = _rewards(group, penalties)
    scores = _scores(task_id, rewards, advantages)
    taught = [Lesson(result=result, advantage=score) for result, score in zip(group, scores, strict=True)]
    if not compares or not any(map(has_credit, group)):
        return taught
    turns = compared([credited(result, reward) for result, reward in zip(group, rewards, strict=True)])
    by_turn = [
        {index: _scores(task_id, values, advantages)[i] for index, values in own.items()} for i, own in enumerate(turns)
    ]
    return [replace(lesson, by_token=_by_token(lesson, own)) for lesson, own in zip(taught, by_turn, strict=True)]


def _by_token(lesson: Lesson, by_turn: Mapping[int, float]) -> tuple[tuple[float, ...], ...]:
    """[samples][n]; a token of which no turn is known has the advantage of its rollout."""
    turns = turns_of_tokens(lesson.result, lesson.samples)
    return tuple(
        tuple(lesson.advantage if turn is None else by_turn[turn.index] for turn in of_sample) for of_sample in turns
    )


def _scores(
    task_id: str, rewards: Sequence[float], advantages: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    scores = advantages(rewards)
    if len(scores) != len(rewards):
        raise TrainerError(
            f"The advantage estimator gave {len(scores)} advantages for the {len(rewards)} rewards of task {task_id}. "
            "It must give one for each."
        )
    if not all(map(math.isfinite, scores)):
        raise TrainerError(f"The advantage estimator gave {scores} for task {task_id}. Each must be finite.")
    return scores


def why_unusable(result: RolloutResult) -> str:
    """Why a rollout can't be trained, in words that many share."""
    rollout = result.rollout
    if rollout.reward is None:
        return f"status {rollout.status}: {rollout.cause}" if rollout.cause else f"status {rollout.status}"
    return rollout.cause if rollout.cause.startswith(NOT_ADMITTED) else NOTHING_SAMPLED


def minibatches(kept: Sequence[Lesson], n: int, *, seed: str) -> list[list[Lesson]]:
    """Deal rollouts into at most n updates, shuffled by the seed; none is empty."""
    shuffled = list(kept)
    random.Random(seed).shuffle(shuffled)
    return [part for i in range(n) if (part := shuffled[i::n])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A trajectory on its way into a micro-batch."""

    lesson: Lesson
    place: int
    sample: Sample
    measured: Measured
    weight: float

    @property
    def n_ids(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)


def micro_batches(
    part: Sequence[Lesson],
    *,
    mean: LossMean,
    max_tokens: int,
    n_workers: int,
    weight_version: int,
    padding_id: int,
    shortest_prefix: int | None = None,
    constant: int = 1,
    replays_experts: bool = False,
) -> list[MicroBatch]:
    """Lay out one update in passes of similar length.

    Args:
        max_tokens: ids in one pass, padding included; a longer trajectory is a pass of its own.
        n_workers: passes that run at once; the number of passes is a multiple of it, where there are enough rows.
        weight_version: of the weights that this step began with.
        shortest_prefix: a common beginning of a pass of at least this many ids is read once. None: never.
        constant: tokens that a rollout may have, for the mean of that name.
        replays_experts: ids go through the experts that their samples hold. Rows that begin alike may have been routed
            differently there, so that nothing is read once for several.
    """
    flat = [(lesson, n, *row) for lesson in part for n, row in enumerate(lesson.rows)]
    weights = token_weights(
        [sum(sample.response_mask) for *_, sample, _ in flat],
        [lesson.rollout_id for lesson, *_ in flat],
        mean=mean,
        constant=constant,
        shares={lesson.rollout_id: lesson.share for lesson in part},
    )
    rows = [
        _Row(lesson=lesson, place=n, sample=sample, measured=measured, weight=weight)
        for (lesson, n, sample, measured), weight in zip(flat, weights, strict=True)
    ]
    rows.sort(key=lambda row: row.n_ids)
    shortest = None if replays_experts else shortest_prefix
    passes = _passes([rows], max_tokens, n_workers)
    apart = _passes(_alike(rows, shortest), max_tokens, n_workers)
    if _n_read(apart, shortest) < WORTH_APART * _n_read(passes, shortest):
        passes = apart
    return [
        _micro_batch(
            items,
            n_prefix=_n_shared([row.sample for row in items], shortest),
            experts=_experts([row.sample for row in items]) if replays_experts else None,
            weight_version=weight_version,
            padding_id=padding_id,
        )
        for items in passes
    ]


def _passes(groups: Sequence[Sequence[_Row]], max_tokens: int, n_workers: int) -> list[Sequence[_Row]]:
    """Each group's rows of rising length, cut into passes."""
    return [
        rows[start:end]
        for rows in groups
        for start, end in _even_cuts([row.n_ids for row in rows], max_tokens, n_workers)
    ]


def _alike(rows: Sequence[_Row], shortest: int | None) -> list[Sequence[_Row]]:
    """Rows that begin alike, such as an agent's apart from its sub-agents'; those that begin like no other together."""
    if shortest is None:
        return [rows]
    groups: dict[Ids, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.sample.prompt_ids[:shortest], []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return [*several, alone] if alone else [*several]


def _n_read(passes: Sequence[Sequence[_Row]], shortest: int | None) -> int:
    """Ids that passes read, padding included."""
    n = 0
    for rows in passes:
        n_prefix = _n_shared([row.sample for row in rows], shortest)
        n += n_prefix + len(rows) * (max(row.n_ids for row in rows) - n_prefix)
    return n


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


def _experts(samples: Sequence[Sample]) -> torch.Tensor | None:
    """[B, T, layers, K] of rows of which some may lack them. None: all lack them."""
    told = [sample.routed_experts for sample in samples]
    known = [experts for experts in told if experts is not None]
    if not known:
        return None
    width = max(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples) - 1
    laid = np.full((len(samples), width, known[0].n_layers, known[0].n_chosen), -1, np.int16)
    for row, experts in zip(laid, told, strict=True):
        if experts is not None:
            row[: experts.end] = np.frombuffer(experts.data, "<u2").reshape(-1, *row.shape[1:])
    return torch.from_numpy(laid)


def _micro_batch(
    rows: Sequence[_Row], *, n_prefix: int, experts: torch.Tensor | None, weight_version: int, padding_id: int
) -> MicroBatch:
    width = max(row.n_ids for row in rows) - 1 - n_prefix
    input_ids: list[list[int]] = []
    flat: list[int] = []
    targets: list[int] = []
    recorded: list[float] = []
    fresh: list[bool] = []
    for n, sample in enumerate(row.sample for row in rows):
        ids = [*sample.prompt_ids, *sample.response_ids][n_prefix:-1]
        input_ids.append(ids + [padding_id] * (width - len(ids)))
        trained = [t for t, mask in enumerate(sample.response_mask) if mask]
        first = len(sample.prompt_ids) - 1 - n_prefix
        if first + trained[0] < 0:
            raise SampleError(
                f"Rollout {sample.extra_fields.get('rollout_id')} trains its very first id, which nothing predicts. "
                "Give it a prompt of at least one id."
            )
        flat += [n * width + first + t for t in trained]
        targets += [sample.response_ids[t] for t in trained]
        recorded += recorded_logprobs(sample)
        fresh += [sample.extra_fields.get("min_global_steps", weight_version) == weight_version] * len(trained)
    n_trained = tuple(sum(row.sample.response_mask) for row in rows)
    told, measured = torch.tensor(recorded), [row.measured for row in rows]
    of_groups = torch.tensor([advantage for row in rows for advantage in row.lesson.of_group(row.place)])
    return MicroBatch(
        places=tuple((row.lesson.rollout_id, row.place) for row in rows),
        n_trained=n_trained,
        prefix=torch.tensor(rows[0].sample.prompt_ids[:n_prefix], dtype=torch.long),
        input_ids=torch.tensor(input_ids),
        flat=torch.tensor(flat),
        targets=torch.tensor(targets),
        recorded_logprobs=told,
        old_logprobs=_measured_or(told, [each.logprobs for each in measured]),
        advantages=_measured_or(of_groups, [each.advantages for each in measured]),
        weights=_repeated([row.weight for row in rows], n_trained),
        importance=_measured_or(torch.ones_like(told), [each.importance for each in measured]),
        fresh=torch.tensor(fresh),
        reference_logprobs=_joined([each.reference_logprobs for each in measured]),
        values=_joined([each.values for each in measured]),
        returns=_joined([each.returns for each in measured]),
        experts=experts,
    )


def _repeated(numbers: Sequence[float], times: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers).repeat_interleave(torch.tensor(times))


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """What was measured of all rows in a line; None where a row lacks it."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _measured_or(otherwise: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    joined = _joined(parts)
    return otherwise if joined is None else joined
