"""Results and the samples that were trained become the token account: where every sampled token went.

`sampled = trained + frozen + dropped`, always. `drifted` compares what was trained with the stored turns alone: it uses
neither the tree nor the spans that made the samples, so that a fault there shows here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agenttrain.errors import SampleError
from agenttrain.records import RolloutResult, Sample, Trajectory, Turn

REJECTED = "rejected by the trainer"
"""Of tokens in a trained row that the trainer masked out, such as those too far from its own policy."""
TrajectoryKey = tuple[str, int]
"""Rollout id and index of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Where the tokens that the policy sampled went; all counts are of tokens."""

    sampled: int
    trained: int
    frozen: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By cause."""
    masked: int
    """Context ids in the responses of trained rows: nobody sampled them. Outside of the sum."""

    def __post_init__(self) -> None:
        placed = self.trained + self.frozen + sum(self.dropped.values())
        if self.sampled != placed:
            raise SampleError(
                f"The policy sampled {self.sampled} tokens, and {self.trained} trained + {self.frozen} frozen + "
                f"{sum(self.dropped.values())} dropped make {placed}. Give the results of all trained rollouts."
            )


def token_account(
    results: Iterable[RolloutResult], trained_samples: Sequence[Sample], reasons: Mapping[str, str] | None = None
) -> TokenAccount:
    """Account for every token of these rollouts.

    Args:
        results: of all training rollouts, those not trained too.
        trained_samples: exactly the samples that were handed to the loss, over all steps.
        reasons: rollout id to why a trainer left it out (StepResult.dropped), where known.

    Raises:
        SampleError: a trajectory was trained twice, a sample has no result, or the sum does not hold.
    """
    samples = _by_key(trained_samples)
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for result in results:
        counts["sampled"] += sum(len(turn.response_ids) for turn in result.turns)
        for trajectory in result.trajectories:
            sample = samples.pop((trajectory.rollout_id, trajectory.index), None)
            cause = "" if sample else _why_untrained(result, reasons or {})
            _place(trajectory, sample, cause, counts, dropped)
    _refuse_unknown(samples)
    return TokenAccount(
        sampled=counts["sampled"],
        trained=counts["trained"],
        frozen=counts["frozen"],
        dropped={cause: n for cause, n in sorted(dropped.items()) if n},
        masked=counts["masked"],
    )


def drifted(samples: Sequence[Sample], turns_by_id: Mapping[str, Turn]) -> int:
    """Trained tokens whose id, log probability or position differs from the stored Turn; must be 0.

    A trained token is right when a stored trained turn of its rollout has a prompt that stands unchanged at the front
    of the row, and sampled this id with this log probability at this position.
    """
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    for turn in turns_by_id.values():
        if turn.role == "trained":
            turns[turn.rollout_id].append(turn)
    return sum(_n_drifted(sample, turns[sample.extra_fields["rollout_id"]]) for sample in samples)


def _by_key(samples: Sequence[Sample]) -> dict[TrajectoryKey, Sample]:
    by_key: dict[TrajectoryKey, Sample] = {}
    for sample in samples:
        key = (sample.extra_fields["rollout_id"], sample.extra_fields["trajectory"])
        if key in by_key:
            raise SampleError(
                f"Trajectory {key[1]} of rollout {key[0]} was trained twice. Each rollout id is trained once: "
                "count the rollouts of every step in trained_rollout_ids, and resume from the step's checkpoint."
            )
        by_key[key] = sample
    return by_key


def _refuse_unknown(samples: Mapping[TrajectoryKey, Sample]) -> None:
    for rollout_id, index in samples:
        raise SampleError(
            f"A sample of trajectory {index} of rollout {rollout_id} was trained, and no result holds that trajectory. "
            "Give the results of all rollouts that were trained."
        )


def _why_untrained(result: RolloutResult, reasons: Mapping[str, str]) -> str:
    if result.rollout.id in reasons:
        return reasons[result.rollout.id]
    if not result.samples:
        return f"status {result.rollout.status}"
    return "not handed to the loss"


def _place(
    trajectory: Trajectory, sample: Sample | None, cause: str, counts: Counter[str], dropped: Counter[str]
) -> None:
    """Put the sampled tokens of one trajectory into the account."""
    n_sampled = 0
    for span in trajectory.spans:
        n = span.end - span.start
        n_sampled += n
        if span.reason.startswith("frozen"):
            counts["frozen"] += n
        elif not span.trained:
            dropped[span.reason.removeprefix("dropped: ")] += n
        elif sample is None:
            dropped[cause] += n
        else:
            n_kept = sum(sample.response_mask[span.start : span.end])
            counts["trained"] += n_kept
            dropped[REJECTED] += n - n_kept
    if sample is not None:
        counts["masked"] += len(sample.response_ids) - n_sampled


def _n_drifted(sample: Sample, turns: Sequence[Turn]) -> int:
    ids = sample.prompt_ids + sample.response_ids
    n_prompt = len(sample.prompt_ids)
    right = {
        len(turn.prompt_ids) + i
        for turn in turns
        if ids[: len(turn.prompt_ids)] == turn.prompt_ids
        for i in _matching(sample, turn)
    }
    return sum(1 for at, trained in enumerate(sample.response_mask) if trained and n_prompt + at not in right)


def _matching(sample: Sample, turn: Turn) -> Iterable[int]:
    """Offsets into a turn's response where the row holds the same id and log probability."""
    start = len(turn.prompt_ids) - len(sample.prompt_ids)
    for i, (id, logprob) in enumerate(zip(turn.response_ids, turn.response_logprobs, strict=True)):
        at = start + i
        if 0 <= at < len(sample.response_ids):
            same = sample.response_ids[at] == id and sample.response_logprobs[at] == logprob
            if same:
                yield i
