"""Who teaches, in which update, and how it is laid out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agenttrain.errors import SampleError, TrainerError
from agenttrain.records import Reward, Rollout, RolloutRequest, RolloutResult, RoutedExperts, Sample, Status, Task
from agenttrain.trainer.advantage import group_advantages
from agenttrain.trainer.batches import (
    ALL_EQUAL,
    NOTHING_SAMPLED,
    TOO_FEW,
    Lesson,
    lessons,
    micro_batches,
    minibatches,
)


def sample(
    rollout_id: str = "r", *, prompt: tuple[int, ...] = (1, 2), mask: tuple[int, ...] = (1, 0, 1), version: int = 0
) -> Sample:
    n = len(mask)
    return Sample(
        prompt_ids=prompt,
        response_ids=tuple(range(10, 10 + n)),
        response_mask=mask,
        response_logprobs=tuple(-0.1 * (t + 1) * m for t, m in enumerate(mask)),
        reward_score=0.0,
        num_turns=1,
        metrics={},
        extra_fields={"rollout_id": rollout_id, "min_global_steps": version},
    )


def result(
    task: str,
    sibling: int,
    reward: float | None,
    *,
    samples: tuple[Sample, ...] | None = None,
    status: Status = "completed",
    cause: str = "",
) -> RolloutResult:
    request = RolloutRequest(task=Task(id=task, input={}), phase="train", step=1, sibling=sibling)
    rollout = Rollout(
        id=request.rollout_id,
        task_id=task,
        phase="train",
        step=1,
        sibling=sibling,
        attempt=0,
        status=status,
        cause=cause,
        reward=None if reward is None else Reward(score=reward, parts=()),
    )
    own = (sample(rollout.id),) if samples is None else samples
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=own)


def lesson(name: str, *samples: Sample, advantage: float = 1.0) -> Lesson:
    return Lesson(result=result(name, 0, 1.0, samples=samples), advantage=advantage)


def test_groups_that_teach_are_kept_and_the_others_dropped_with_a_reason() -> None:
    """Tasks: a teaches, b is equal, c has one usable rollout, d lost a rollout to its environment and teaches."""
    results = [
        result("a", 0, 1.0),
        result("a", 1, 0.0),
        result("b", 0, 1.0),
        result("b", 1, 1.0),
        result("c", 0, 1.0),
        result("c", 1, None, samples=(), status="environment_failure", cause="the database is down"),
        result("d", 0, 1.0),
        result("d", 1, None, samples=(), status="aborted"),
        result("d", 2, 0.0),
    ]
    taught = lessons(results, group_advantages)
    assert [(x.rollout_id, x.advantage) for x in taught.kept] == [
        ("train-1-a-0-0", 1.0),
        ("train-1-a-1-0", -1.0),
        ("train-1-d-0-0", 1.0),
        ("train-1-d-2-0", -1.0),
    ]
    assert taught.dropped == {
        "train-1-b-0-0": ALL_EQUAL,
        "train-1-b-1-0": ALL_EQUAL,
        "train-1-c-0-0": TOO_FEW,
        "train-1-c-1-0": "status environment_failure: the database is down",
        "train-1-d-1-0": "status aborted",
    }
    assert (taught.n_groups, taught.n_equal, taught.n_trained) == (4, 1, 2)


def test_a_rollout_of_three_trajectories_counts_once_in_its_group() -> None:
    many = tuple(sample("train-1-a-0-0") for _ in range(3))
    taught = lessons([result("a", 0, 1.0, samples=many), result("a", 1, 0.0), result("a", 2, 0.0)], group_advantages)
    assert [round(x.advantage, 6) for x in taught.kept] == [1.414214, -0.707107, -0.707107]
    assert [len(x.samples) for x in taught.kept] == [3, 1, 1]


def test_a_rollout_without_trained_tokens_is_named() -> None:
    results = [result("a", 0, 1.0), result("a", 1, 0.0), result("a", 2, 0.0, samples=())]
    results.append(result("a", 3, 0.5, samples=(sample(mask=(0, 0)),)))
    taught = lessons(results, group_advantages)
    assert taught.dropped == {"train-1-a-2-0": NOTHING_SAMPLED, "train-1-a-3-0": NOTHING_SAMPLED}


def test_an_estimator_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(TrainerError, match="1 advantages for the 2 rewards of task a"):
        lessons([result("a", 0, 1.0), result("a", 1, 0.0)], lambda _rewards: [0.0])


def test_minibatches_deal_every_rollout_once_and_alike_for_a_seed() -> None:
    kept = [lesson(str(i), sample()) for i in range(7)]
    parts = minibatches(kept, 3, seed="0-1")
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert sorted(x.rollout_id for part in parts for x in part) == [x.rollout_id for x in kept]
    assert minibatches(kept, 3, seed="0-1") == parts
    assert minibatches(kept, 3, seed="0-2") != parts
    assert minibatches(kept[:1], 3, seed="0-1") == [[kept[0]]]


def test_a_micro_batch_points_at_what_predicts_each_trained_token() -> None:
    """Two rows of width 4 (the last id predicts nothing): positions 1 and 3 of the first row, 0 of the second."""
    part = [
        lesson("a", sample("train-1-a-0-0", version=4), advantage=2.0),
        lesson("b", sample("train-1-b-0-0", prompt=(7,), mask=(1,), version=3), advantage=-1.0),
    ]
    (batch,) = micro_batches(part, mean="token-mean", max_tokens=100, n_workers=1, weight_version=4, padding_id=9)
    assert batch.input_ids.tolist() == [[7, 9, 9, 9], [1, 2, 10, 11]]
    assert batch.flat.tolist() == [0, 4 + 1, 4 + 3]
    assert batch.targets.tolist() == [10, 10, 12]
    assert batch.old_logprobs.tolist() == pytest.approx([-0.1, -0.1, -0.3])
    assert batch.advantages.tolist() == [-1.0, 2.0, 2.0]
    assert batch.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert batch.fresh.tolist() == [False, True, True]


def test_a_common_beginning_is_read_once() -> None:
    """Prompts 1 2 3 4 5 and 1 2 3 9: three ids are shared, and positions count from there."""
    part = [
        lesson("a", sample("a", prompt=(1, 2, 3, 4, 5), mask=(1, 0, 1))),
        lesson("b", sample("b", prompt=(1, 2, 3, 9), mask=(1, 1))),
    ]
    (batch,) = micro_batches(
        part, mean="token-mean", max_tokens=100, n_workers=1, weight_version=0, padding_id=0, shortest_prefix=3
    )
    assert batch.prefix.tolist() == [1, 2, 3]
    assert batch.input_ids.tolist() == [[9, 10, 0, 0], [4, 5, 10, 11]]
    assert batch.flat.tolist() == [0, 1, 4 + 1, 4 + 3]
    (whole,) = micro_batches(
        part, mean="token-mean", max_tokens=100, n_workers=1, weight_version=0, padding_id=0, shortest_prefix=4
    )
    assert whole.prefix.tolist() == []
    assert whole.input_ids.tolist() == [[1, 2, 3, 9, 10, 0, 0], [1, 2, 3, 4, 5, 10, 11]]


def test_a_sub_agents_rows_are_read_apart_where_that_reads_less() -> None:
    """Two agents' rows begin with ten ids of theirs and two helpers' with ten others: each beginning is read once."""
    agent, helper = tuple(range(10)), tuple(range(20, 30))
    part = [
        lesson("a", sample("a", prompt=(*agent, 1), mask=(1,) * 4)),
        lesson("b", sample("b", prompt=(*agent, 2), mask=(1,) * 4)),
        lesson("c", sample("c", prompt=(*helper, 1), mask=(1,) * 2)),
        lesson("d", sample("d", prompt=(*helper, 2), mask=(1,) * 2)),
    ]
    given = {"mean": "token-mean", "n_workers": 1, "weight_version": 0, "padding_id": 0, "max_tokens": 1000}
    apart = micro_batches(part, shortest_prefix=10, **given)  # type: ignore[arg-type]
    assert [batch.prefix.tolist() for batch in apart] == [list(helper), list(agent)]
    assert [batch.input_ids.shape for batch in apart] == [(2, 2), (2, 4)]
    assert sum(float(batch.weights.sum()) for batch in apart) == pytest.approx(1.0)
    (together,) = micro_batches(part, shortest_prefix=None, **given)  # type: ignore[arg-type]
    assert together.input_ids.shape == (4, 14)


def test_rows_stay_together_where_reading_them_apart_saves_little() -> None:
    """Two rows that begin otherwise share nothing: one pass of both is as short as two."""
    part = [lesson(name, sample(name, prompt=(n,) * 9, mask=(1,) * 4)) for n, name in enumerate("ab")]
    (batch,) = micro_batches(
        part, mean="token-mean", max_tokens=1000, n_workers=1, weight_version=0, padding_id=0, shortest_prefix=4
    )
    assert (batch.prefix.tolist(), batch.input_ids.shape) == ([], (2, 12))


def test_the_id_that_predicts_the_first_trained_one_is_not_shared() -> None:
    part = [lesson(name, sample(name, prompt=(1, 2, 3), mask=(1,))) for name in "ab"]
    (batch,) = micro_batches(
        part, mean="token-mean", max_tokens=100, n_workers=1, weight_version=0, padding_id=0, shortest_prefix=1
    )
    assert (batch.prefix.tolist(), batch.input_ids.tolist(), batch.flat.tolist()) == ([1, 2], [[3], [3]], [0, 1])


def test_micro_batches_hold_to_the_budget_and_give_every_worker_one() -> None:
    part = [lesson(str(i), sample(mask=(1,) * (3 + i))) for i in range(8)]
    one = {"mean": "token-mean", "weight_version": 0, "padding_id": 0}
    small = micro_batches(part, max_tokens=20, n_workers=1, **one)  # type: ignore[arg-type]
    assert all(batch.input_ids.shape[0] == 1 or batch.input_ids.numel() <= 20 for batch in small)
    assert sum(batch.input_ids.shape[0] for batch in small) == 8
    shared = micro_batches(part, max_tokens=10_000, n_workers=4, **one)  # type: ignore[arg-type]
    assert len(shared) == 4
    assert max(batch.input_ids.numel() for batch in shared) < 2 * min(batch.input_ids.numel() for batch in shared)
    assert sum(float(batch.weights.sum()) for batch in small) == pytest.approx(1.0)


def test_a_trained_id_without_a_prompt_is_refused() -> None:
    with pytest.raises(SampleError, match="very first id"):
        micro_batches(
            [lesson("a", sample(prompt=()))],
            mean="token-mean",
            max_tokens=10,
            n_workers=1,
            weight_version=0,
            padding_id=0,
        )


def test_experts_stand_where_their_ids_stand() -> None:
    """One layer of one expert, numbered by position; a row that lacks them, and padding, route by themselves. Nothing
    is shared: equal beginnings may have been routed differently."""
    told = RoutedExperts(start=0, n_layers=1, n_chosen=1, data=np.arange(8, dtype="<u2").tobytes())
    part = [
        lesson("a", replace(sample("a", prompt=(1, 2, 3, 4, 5, 6), mask=(1, 0, 1)), routed_experts=told)),
        lesson("b", sample("b", prompt=(1, 2, 3, 9), mask=(1, 1))),
    ]
    (batch,) = micro_batches(
        part,
        mean="token-mean",
        max_tokens=100,
        n_workers=1,
        weight_version=0,
        padding_id=0,
        shortest_prefix=3,
        replays_experts=True,
    )
    assert batch.prefix.tolist() == []
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 10, 0, 0, 0], [1, 2, 3, 4, 5, 6, 10, 11]]
    assert batch.experts is not None
    assert batch.experts[..., 0, 0].tolist() == [[-1] * 8, list(range(8))]


def test_experts_are_left_out_where_they_are_not_replayed() -> None:
    told = RoutedExperts(start=0, n_layers=1, n_chosen=1, data=bytes(8))
    part = [lesson(name, replace(sample(name), routed_experts=told)) for name in "ab"]
    one = {"mean": "token-mean", "max_tokens": 100, "n_workers": 1, "weight_version": 0, "padding_id": 0}
    (batch,) = micro_batches(part, **one)  # type: ignore[arg-type]
    assert batch.experts is None
