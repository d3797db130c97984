"""What each token gets where verifiers credit nodes and turns; the numbers are those of docs/credit.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import TrainerError
from agenttrain.records import (
    CallSite,
    Credit,
    Generation,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Sample,
    Task,
    Turn,
)
from agenttrain.sample.build import build_samples
from agenttrain.trainer.advantage import centered_advantages, group_advantages, leave_one_out_advantages, own_rewards
from agenttrain.trainer.algorithms import Critic
from agenttrain.trainer.batches import ALL_EQUAL, Lesson, Lessons, Measured, lessons, micro_batches
from agenttrain.trainer.by_turn import compared, credited, turns_of_tokens
from agenttrain.trainer.credit import credited as walked
from agenttrain.trajectory.tree import trajectories

DOCS = Path(__file__).parents[2] / "docs" / "credit.md"
Estimate = Callable[[Sequence[float]], list[float]]


def call(index: int, where: str, n: int, *, after: Turn | None = None, role: Role = "trained") -> Turn:
    """A turn of n tokens in a node, written with those around it: "team/model"."""
    names = where.split("/")
    prompt = (1, 100 + index) if after is None else (*after.prompt_ids, *after.response_ids, 2)
    said = Generation(
        token_ids=tuple(range(10 * index + 3, 10 * index + 3 + n)),
        logprobs=(-1.0,) * n,
        weight_versions=(0,) * n,
        stop_reason="stop",
    )
    return Turn(
        id=f"t{index}",
        rollout_id="",
        index=index,
        role=role,
        role_reason="",
        site=CallSite(node=names[-1], checkpoint_ns="|".join(f"{name}:{index}" for name in names)),
        prompt_ids=prompt,
        response_ids=said.token_ids,
        response_logprobs=said.logprobs,
        weight_versions=said.weight_versions,
        extends=after.id if after else None,
        break_cause=None if after else "first_turn" if index == 0 else "other_conversation",
    )


def rolled(sibling: int, score: float, turns: Sequence[Turn], credit: Credit | None = None) -> RolloutResult:
    request = RolloutRequest(task=Task(id="a", input={}), phase="train", step=1, sibling=sibling)
    own = tuple(replace(turn, rollout_id=request.rollout_id) for turn in turns)
    rollout = Rollout(
        id=request.rollout_id,
        task_id="a",
        phase="train",
        step=1,
        sibling=sibling,
        attempt=0,
        status="completed",
        reward=Reward(score=score, parts=(), credit=credit),
    )
    paths = trajectories(own)
    samples = build_samples(rollout, paths)
    return RolloutResult(request=request, rollout=rollout, turns=own, trajectories=paths, samples=samples)


def group() -> list[RolloutResult]:
    """Three siblings of one task: A plans and works twice, B plans and works, C only plans."""
    first, second = call(1, "worker", 3), call(2, "worker", 1)
    a = [call(0, "planner", 2), first, replace(second, prompt_ids=(*first.prompt_ids, *first.response_ids, 2))]
    a[2] = replace(a[2], extends="t1", break_cause=None)
    credit = Credit(by_node={"planner": 0.5}, by_turn={2: -1.0})
    return [
        rolled(0, 1.0, a, credit),
        rolled(1, 0.0, [call(0, "planner", 1), call(1, "worker", 2)]),
        rolled(2, 0.5, [call(0, "planner", 1)]),
    ]


def by_turn(taught: Lessons) -> list[dict[int, list[float]]]:
    """[rollouts] index of a turn to the advantages of its tokens, as the loss sees them."""
    found: list[dict[int, list[float]]] = []
    for lesson in taught.kept:
        turns = turns_of_tokens(lesson.result, lesson.samples)
        of_rollout: dict[int, list[float]] = {}
        for sample, owners, row in zip(lesson.samples, turns, lesson.token_advantages, strict=True):
            trained = [a for a, mask in zip(row, sample.response_mask, strict=True) if mask]
            for owner, advantage in zip(owners, trained, strict=True):
                of_rollout.setdefault(owner.index if owner else -1, []).append(advantage)
        found.append(of_rollout)
    return found


HAND: dict[str, tuple[Estimate, list[list[float]]]] = {
    "dr_grpo": (centered_advantages, [[5 / 6, 1 / 2, -1 / 6], [-2 / 3, -1 / 3], [-1 / 6]]),
    "rloo": (leave_one_out_advantages, [[1.25, 0.75, -0.25], [-1.0, -0.5], [-0.25]]),
    "grpo": (group_advantages, [[1.3363062, 1.2247449, -0.7071068], [-1.0690450, -1.4142136], [-0.2672612]]),
}
"""[rollouts][turns]. Planner: rewards 1.5, 0, 0.5. Worker: A's turns 1 and 0, mean 0.5; B's 0; C was not there, 0.5."""


@pytest.mark.parametrize("name", HAND)
def test_each_token_has_the_advantage_of_its_turn(name: str) -> None:
    """Against the siblings at the same node; all tokens of a turn alike, whatever trajectory they stand in."""
    estimate, expected = HAND[name]
    results = group()
    assert [len(result.samples) for result in results] == [2, 2, 1]
    found = by_turn(lessons(results, estimate))
    assert [list(own) for own in found] == [[0, 1, 2], [0, 1], [0]]
    assert [len(own) for own in found[0].values()] == [2, 3, 1]
    for own, turns in zip(found, expected, strict=True):
        for tokens, advantage in zip(own.values(), turns, strict=True):
            assert tokens == pytest.approx([advantage] * len(tokens), abs=1e-7)


def test_the_table_for_users_has_these_numbers() -> None:
    """docs/credit.md, row by row."""
    names = ["A 0 planner", "A 1 worker", "A 2 worker", "B 0 planner", "B 1 worker", "C 0 planner"]
    columns = [[number for turns in HAND[name][1] for number in turns] for name in ("grpo", "dr_grpo", "rloo")]
    text = DOCS.read_text(encoding="utf-8")
    for name, *numbers in zip(names, *columns, strict=True):
        rollout, index, node = name.split()
        row = next(line for line in text.splitlines() if line.startswith(f"| {rollout} | {index} {node} |"))
        assert [float(cell) for cell in row.split("|")[-5:-2]] == pytest.approx(numbers, abs=5e-4), row


def test_micro_batches_lay_out_each_tokens_own() -> None:
    """What the loss is given is what the lesson says."""
    taught = lessons(group(), centered_advantages)
    (batch,) = micro_batches(
        taught.kept, mean="token-mean", max_tokens=1000, n_workers=1, weight_version=0, padding_id=0
    )
    laid = batch.by_place(batch.advantages)
    for lesson in taught.kept:
        for place, (sample, row) in enumerate(zip(lesson.samples, lesson.token_advantages, strict=True)):
            trained = [a for a, mask in zip(row, sample.response_mask, strict=True) if mask]
            assert laid[lesson.rollout_id, place].tolist() == pytest.approx(trained)


def test_without_credit_each_token_has_its_rollouts_advantage() -> None:
    """Bit for bit what a group without credit always had; credit of 0 changes nothing either."""
    scores = [0.1, 0.7, 0.3]
    results = [rolled(i, s, [call(0, "planner", 2), call(1, "worker", 1)]) for i, s in enumerate(scores)]
    plain = lessons(results, group_advantages)
    assert [lesson.by_token for lesson in plain.kept] == [()] * 3
    assert [lesson.advantage for lesson in plain.kept] == group_advantages(scores)
    nothing = Credit(by_node={"planner": 0.0}, by_turn={1: 0.0})
    results[1] = rolled(1, 0.7, [call(0, "planner", 2), call(1, "worker", 1)], nothing)
    zero = lessons(results, group_advantages)
    assert [lesson.token_advantages for lesson in zero.kept] == [lesson.token_advantages for lesson in plain.kept]


def test_frozen_turns_get_nothing_and_count_in_no_mean() -> None:
    """The credited node has a frozen turn: its tokens stay at 0, and the mean of the node is of the trained one."""
    planner = call(0, "planner", 2)
    frozen = call(1, "planner", 2, after=planner, role="frozen")
    last = call(2, "worker", 1, after=frozen)
    credit = Credit(by_node={"planner": 1.0})
    results = [rolled(0, 0.0, [planner, frozen, last], credit), rolled(1, 0.0, [call(0, "planner", 1)])]
    taught = lessons(results, centered_advantages)
    (sample,) = taught.kept[0].samples
    assert sample.response_mask == (1, 1, 0, 0, 0, 0, 1)
    assert taught.kept[0].token_advantages == ((0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0),)
    assert taught.kept[1].token_advantages == ((-0.5,),)


def test_parallel_siblings_are_one_place() -> None:
    """Two workers sent at once, of which turn 2 did better: each against the other rollout's mean of both."""
    turns = [call(0, "planner", 1), call(1, "worker", 1), call(2, "worker", 1)]
    results = [rolled(0, 0.0, turns, Credit(by_turn={2: 1.0})), rolled(1, 0.0, turns, Credit(by_turn={1: 0.5}))]
    assert by_turn(lessons(results, centered_advantages)) == [
        {0: [0.0], 1: [-0.125], 2: [0.375]},
        {0: [0.0], 1: [0.0], 2: [-0.25]},
    ]


def test_nodes_of_one_name_in_two_agents_are_two_places() -> None:
    """A prebuilt agent's node is called model in every agent: what is credited is the agent around it."""
    turns = [call(0, "writer/model", 1), call(1, "critic/model", 1)]
    results = [rolled(0, 0.0, turns, Credit(by_node={"writer": 1.0})), rolled(1, 0.0, turns)]
    assert by_turn(lessons(results, centered_advantages)) == [{0: [0.5], 1: [0.0]}, {0: [-0.5], 1: [0.0]}]


def test_a_group_of_equal_scores_teaches_by_its_credit_alone() -> None:
    turns = [call(0, "planner", 1), call(1, "worker", 1)]
    alike = [rolled(i, 1.0, turns, Credit(by_node={"worker": 0.5})) for i in range(2)]
    assert lessons(alike, group_advantages).dropped == dict.fromkeys([r.rollout.id for r in alike], ALL_EQUAL)
    differ = [alike[0], rolled(1, 1.0, turns)]
    taught = lessons(differ, group_advantages)
    assert by_turn(taught) == [{0: [0.0], 1: [1.0]}, {0: [0.0], 1: [-1.0]}]
    assert (taught.n_equal, taught.n_trained) == (0, 1)


def test_credit_in_one_node_only_moves_that_node() -> None:
    """The other turns' advantages are those of the scores."""
    results = group()
    plain = [replace(r, rollout=replace(r.rollout, reward=Reward(score=r.request.sibling, parts=()))) for r in results]
    credit = Reward(score=0, parts=(), credit=Credit(by_node={"planner": 7.0}))
    one = [replace(plain[0], rollout=replace(plain[0].rollout, reward=credit)), *plain[1:]]
    before, after = (by_turn(lessons(each, centered_advantages)) for each in (plain, one))
    assert before[0][0] != after[0][0]
    assert [{i: a for i, a in own.items() if i} for own in before] == [
        {i: a for i, a in own.items() if i} for own in after
    ]


def test_what_is_taken_from_a_reward_is_taken_from_each_turn() -> None:
    """k1 of 0.25 for A: its turns are worth 1.25, 0.75 and -0.25."""
    results = group()
    penalties = {results[0].rollout.id: 0.25}
    own = [credited(result, r) for result, r in zip(results, (0.75, 0.0, 0.5), strict=True)]
    assert compared(own)[0] == {0: [1.25, 0.0, 0.5], 1: [0.75, 0.0, 0.5], 2: [-0.25, 0.0, 0.5]}
    taught = lessons(results, centered_advantages, penalties=penalties)
    assert by_turn(taught)[0][0] == pytest.approx([1.25 - 1.75 / 3] * 2)


def test_an_estimators_fault_is_told_for_a_turn_too() -> None:
    with pytest.raises(TrainerError, match="Each must be finite"):
        lessons(group(), lambda rewards: [float("nan") if max(rewards) > 1 else 0.0 for _ in rewards])


def lesson_with_values(result: RolloutResult) -> Lesson:
    (lesson,) = lessons([result], own_rewards, compares=False).kept
    zeros = tuple(Measured(values=torch.zeros(sum(sample.response_mask))) for sample in lesson.samples)
    return replace(lesson, measured=zeros)


def test_with_a_critic_credit_comes_with_the_last_token_of_its_turn() -> None:
    """A walks 2 + 3 + 1 tokens: rewards 0.5 after the plan, and -1 after the last work, where the score of 1 comes too.

    With 2 for the worker instead and half of everything lost by each token: rewards [0, 0, 0, 0, 2, 2 + 1].
    """
    a = group()[0]
    (whole,) = walked([lesson_with_values(a)], Critic())
    assert [m.returns.tolist() for m in whole.measured if m.returns is not None] == [[0.5, 0.5], [0.0] * 4]
    worked = rolled(0, 1.0, a.turns, Credit(by_node={"worker": 2.0}))
    (halved,) = walked([lesson_with_values(worked)], Critic(discount=0.5))
    expected = [[0.21875, 0.4375], [0.875, 1.75, 3.5, 3.0]]
    assert [m.returns.tolist() for m in halved.measured if m.returns is not None] == expected


@st.composite
def groups(draw: Any) -> list[RolloutResult]:
    """Two to four siblings of up to four turns in two nodes, with any credit."""
    numbers = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0])
    made = []
    for sibling in range(draw(st.integers(2, 4))):
        places = draw(st.lists(st.sampled_from(["planner", "team/worker"]), min_size=1, max_size=4))
        turns = [call(i, where, 1 + i % 2) for i, where in enumerate(places)]
        by_node = draw(st.dictionaries(st.sampled_from(["planner", "worker", "team", "none"]), numbers))
        by_index = draw(st.dictionaries(st.integers(0, len(turns) - 1), numbers))
        made.append(rolled(sibling, draw(numbers), turns, Credit(by_node=by_node, by_turn=by_index)))
    return made


@given(groups(), st.data())
def test_splitting_a_rollout_into_more_trajectories_changes_nothing(results: list[RolloutResult], data: Any) -> None:
    """The same turns, each extending the one before (one trajectory) or none (one for each turn)."""
    i = data.draw(st.integers(0, len(results) - 1))
    chain: list[Turn] = []
    for turn in results[i].turns:
        before = chain[-1] if chain else None
        chain.append(call(turn.index, "/".join(reversed(turn.site.nodes)), len(turn.response_ids), after=before))
    reward = results[i].rollout.reward
    assert reward is not None
    joined = [*results]
    joined[i] = rolled(i, reward.score, chain, reward.credit)
    assert len(joined[i].samples) == 1
    apart, together = (lessons(each, group_advantages) for each in (results, joined))
    assert apart.dropped == together.dropped
    for one, other in zip(by_turn(apart), by_turn(together), strict=True):
        assert one == other


@given(groups())
def test_every_rollout_counts_once_in_a_baseline(results: list[RolloutResult]) -> None:
    """Each turn is held against one number of each sibling, and against itself in its own rollout's place."""
    rewards = [result.rollout.reward for result in results]
    own = [credited(result, r.score) for result, r in zip(results, rewards, strict=True) if r is not None]
    for i, of_rollout in enumerate(compared(own)):
        for index, values in of_rollout.items():
            assert len(values) == len(results)
            assert values[i] == own[i].score + own[i].part_by_turn[index]


def test_a_sample_of_unknown_turns_has_its_rollouts_advantage() -> None:
    """A trainer's own rows: nothing says whose tokens they are."""
    results = group()
    unknown: tuple[Sample, ...] = tuple(
        replace(sample, extra_fields={**sample.extra_fields, "trajectory": 9}) for sample in results[1].samples
    )
    results[1] = replace(results[1], samples=unknown)
    taught = lessons(results, centered_advantages)
    assert by_turn(taught)[1] == {-1: [-0.5] * 3}
