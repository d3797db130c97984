"""Credit along a rollout: in the order of sampling, whatever trajectories its tokens stand in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.records import (
    CallSite,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sample,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
)
from agenttrain.trainer.algorithms import Critic
from agenttrain.trainer.batches import Lesson, Measured
from agenttrain.trainer.credit import Place, credited, gae, kl_penalty, sampling_order, whitened

numbers = st.floats(-2, 2)


def trajectory(index: int, mask: tuple[int, ...], spans: tuple[TurnSpan, ...]) -> Trajectory:
    n = len(mask)
    return Trajectory(
        rollout_id="r",
        index=index,
        prompt_ids=(1, 2),
        response_ids=tuple(range(10, 10 + n)),
        response_mask=mask,
        response_logprobs=tuple(-1.0 * m for m in mask),
        weight_versions=tuple(m - 1 for m in mask),
        spans=spans,
        break_cause="first_turn",
    )


def span(turn: str, start: int, end: int, *, trained: bool = True) -> TurnSpan:
    return TurnSpan(turn_id=turn, start=start, end=end, trained=trained, reason="" if trained else "frozen: summary")


def result(trajectories: tuple[Trajectory, ...], turns: int, reward: float = 1.0) -> RolloutResult:
    request = RolloutRequest(task=Task(id="a", input={}), phase="train", step=1)
    rollout = Rollout(
        id=request.rollout_id,
        task_id="a",
        phase="train",
        step=1,
        sibling=0,
        attempt=0,
        status="completed",
        reward=Reward(score=reward, parts=()),
    )
    samples = tuple(
        Sample(
            prompt_ids=t.prompt_ids,
            response_ids=t.response_ids,
            response_mask=t.response_mask,
            response_logprobs=t.response_logprobs,
            reward_score=reward,
            num_turns=1,
            metrics={},
            extra_fields={"rollout_id": rollout.id, "trajectory": t.index},
        )
        for t in trajectories
        if any(t.response_mask)
    )
    each = tuple(
        Turn(id=f"t{i}", rollout_id=rollout.id, index=i, role="trained", role_reason="", site=CallSite())
        for i in range(turns)
    )
    return RolloutResult(request=request, rollout=rollout, turns=each, trajectories=trajectories, samples=samples)


def test_turns_are_walked_in_the_order_they_began() -> None:
    """Turn 0 and 2 stand in the second trajectory, turn 1 in the first; a frozen turn and the context are passed."""
    first = trajectory(0, (1, 1), (span("t1", 0, 2),))
    second = trajectory(1, (1, 0, 0, 1, 1), (span("t0", 0, 1), span("t3", 1, 2, trained=False), span("t2", 3, 5)))
    own = result((first, second), turns=4)
    assert sampling_order(own, own.samples) == [
        Place(sample=1, token=0),
        Place(sample=0, token=0),
        Place(sample=0, token=1),
        Place(sample=1, token=1),
        Place(sample=1, token=2),
    ]


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.floats(0.1, 1), st.floats(0, 1))
def test_gae_is_the_papers_sum(walk: list[tuple[float, float]], discount: float, gae_lambda: float) -> None:
    """A_t = sum over k of (discount × lambda)^k × error of t + k."""
    rewards, values = [r for r, _ in walk], [v for _, v in walk]
    n, after = len(walk), [*values[1:], 0.0]
    errors = [rewards[t] + discount * after[t] - values[t] for t in range(n)]
    expected = [sum((discount * gae_lambda) ** k * errors[t + k] for k in range(n - t)) for t in range(n)]
    advantages, returns = gae(rewards, values, discount=discount, gae_lambda=gae_lambda)
    assert advantages == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-9)


def test_lambda_1_without_discount_is_reward_minus_value() -> None:
    advantages, returns = gae([0.0, 0.0, 1.0], [0.2, 0.5, 0.9], discount=1.0, gae_lambda=1.0)
    assert advantages == pytest.approx([0.8, 0.5, 0.1])
    assert returns == pytest.approx([1.0, 1.0, 1.0])


def test_whitening_counts_every_token_once() -> None:
    assert [x for row in whitened([[1, 3], [5]]) for x in row] == pytest.approx([-1.2247449, 0, 1.2247449])
    assert whitened([[2.0], [2.0, 2.0]]) == [[0.0], [0.0, 0.0]]
    rows = np.random.default_rng(0).normal(3, 2, 12).tolist()
    flat = [x for row in whitened([rows[:5], rows[5:]]) for x in row]
    assert (np.mean(flat), np.std(flat)) == (pytest.approx(0), pytest.approx(1))


def lesson_of(own: RolloutResult, values: list[list[float]], reference: list[list[float]] | None = None) -> Lesson:
    measured = tuple(
        Measured(
            values=torch.tensor(row),
            reference_logprobs=None if reference is None else torch.tensor(reference[i]),
        )
        for i, row in enumerate(values)
    )
    return Lesson(result=own, advantage=1.0, measured=measured)


def test_the_reward_comes_once_with_the_last_token_that_was_sampled() -> None:
    """Two trajectories, the second one sampled first: its return holds what the first one's tokens were worth."""
    first, second = trajectory(0, (1, 1), (span("t1", 0, 2),)), trajectory(1, (1,), (span("t0", 0, 1),))
    own = result((first, second), turns=2)
    (lesson,) = credited([lesson_of(own, [[0.0, 0.0], [0.0]])], Critic(discount=0.5))
    assert [row.returns.tolist() for row in lesson.measured if row.returns is not None] == [[0.5, 1.0], [0.25]]


def test_k1_is_paid_by_each_token_and_summed_over_a_rollout() -> None:
    """Recorded log probability -1 against -1.5 and -0.5: k1 is 0.5 and -0.5; with 0.1 a unit the returns are 1 ± …"""
    own = result((trajectory(0, (1, 0, 1), (span("t0", 0, 1), span("t1", 2, 3))),), turns=2)
    lesson = lesson_of(own, [[0.0, 0.0]], [[-1.5, -0.5]])
    assert kl_penalty(lesson) == pytest.approx(0.0)
    (paid,) = credited([lesson], Critic(), kl_coefficient=0.1)
    assert paid.measured[0].returns is not None
    assert paid.measured[0].returns.tolist() == pytest.approx([-0.05 + 0.05 + 1.0, 0.05 + 1.0])
