"""The tree places every sampled id once, whatever a graph does: retries, parallel branches, edited history."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agenttrain.errors import CaptureError
from agenttrain.records import (
    CallSite,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RoutedExperts,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from agenttrain.sample.account import drifted, token_account
from agenttrain.sample.build import build_samples
from agenttrain.trajectory.tree import ABORTED, SUPERSEDED, extends_exactly, trajectories

GENES = st.binary(min_size=14, max_size=63)
"""Seven bytes a turn: which earlier turn, how it is followed, ids sampled, ids of context, task, attempt, fate."""
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def turn(id: str, prompt: Sequence[int], response: Sequence[int], **more: Any) -> Turn:
    """A trained turn whose log probabilities tell its ids."""
    return Turn(
        **{
            "id": id,
            "rollout_id": "r",
            "index": 0,
            "role": "trained",
            "role_reason": "the graph's one model",
            "site": CallSite(node="agent"),
            "prompt_ids": tuple(prompt),
            "response_ids": tuple(response),
            "response_logprobs": tuple(-i / 1024 for i in response),
            "weight_versions": tuple(i % 5 for i in response),
        }
        | more
    )


def rollout(genes: bytes) -> list[Turn]:
    """Turns of one rollout; every sampled id occurs once, so that its place can be looked up."""
    turns: list[Turn] = []
    n_ids = 100

    def fresh(n: int) -> tuple[int, ...]:
        nonlocal n_ids
        n_ids += n
        return tuple(range(n_ids - n, n_ids))

    for index, (choice, kind, n_response, n_context, task, attempt, fate) in enumerate(
        zip(*[iter(genes)] * 7, strict=False)
    ):
        before = turns[choice % len(turns)] if turns else None
        prompt, extends = _prompt(before, kind % 6, fresh(n_context % 3 + 1))
        role: Role = {0: "frozen", 1: "auxiliary"}.get(fate % 8, "trained")  # type: ignore[assignment]
        stop: StopReason = "aborted" if fate % 8 == 2 else "stop"
        response = () if role == "auxiliary" else fresh(n_response % 3 + 1)
        task, attempt = task % 4, attempt % 2 + 1
        turns.append(
            turn(
                str(index),
                prompt,
                response,
                index=index,
                role=role,
                site=CallSite(node="agent", task_id=f"t{task}" if task else None, attempt=attempt, step=index // 2),
                stop_reason=stop,
                extends=extends,
                break_cause=None if extends else "first_turn" if index == 0 else "other_conversation",
            )
        )
    return turns


def _prompt(before: Turn | None, kind: int, context: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    if before is None or kind == 0:
        return context, None
    stream = before.prompt_ids + before.response_ids
    if kind == 1:
        return before.prompt_ids, before.extends  # a sibling or a retry on the same prompt
    if kind == 2:
        return (*stream[:-1], 7, *context), before.id  # says that it extends, and does not
    if kind == 3:
        return (8, *stream[1:], *context), before.id  # the same, at its other end
    return stream + context, before.id


def path(trajectory: Trajectory) -> tuple[int, ...]:
    return trajectory.prompt_ids + trajectory.response_ids


@MANY
@given(GENES)
def test_every_sampled_id_has_exactly_one_place(genes: bytes) -> None:
    turns = rollout(genes)
    placed = Counter(
        (span.turn_id, trajectory.response_ids[span.start : span.end])
        for trajectory in trajectories(turns)
        for span in trajectory.spans
    )
    assert placed == Counter((each.id, each.response_ids) for each in turns if each.response_ids)


@MANY
@given(GENES)
def test_an_id_is_trained_once_where_a_trained_call_sampled_it_and_else_never(genes: bytes) -> None:
    turns = rollout(genes)
    built = trajectories(turns)
    why = {span.turn_id: span.reason for trajectory in built for span in trajectory.spans}
    trained = [
        (id, logprob, version)
        for each in built
        for id, mask, logprob, version in zip(
            each.response_ids, each.response_mask, each.response_logprobs, each.weight_versions, strict=True
        )
        if mask
    ]
    expected = [
        (id, -id / 1024, id % 5)
        for each in turns
        if each.role == "trained" and why.get(each.id) == ""
        for id in each.response_ids
    ]
    assert sorted(trained) == sorted(expected)


@MANY
@given(GENES)
def test_each_prompt_and_response_is_a_prefix_of_the_trajectory_that_holds_it(genes: bytes) -> None:
    turns = {each.id: each for each in rollout(genes)}
    for trajectory in trajectories(list(turns.values())):
        for span in trajectory.spans:
            seen = turns[span.turn_id].prompt_ids + turns[span.turn_id].response_ids
            assert path(trajectory)[: len(seen)] == seen
            assert len(trajectory.prompt_ids) + span.end == len(seen)


@MANY
@given(GENES)
def test_mask_log_probabilities_and_versions_are_empty_outside_of_what_is_trained(genes: bytes) -> None:
    for trajectory in trajectories(rollout(genes)):
        trained = {at for span in trajectory.spans if span.trained for at in range(span.start, span.end)}
        assert {at for at, mask in enumerate(trajectory.response_mask) if mask} == trained
        assert all(
            (logprob, version) == (0.0, -1)
            for at, (logprob, version) in enumerate(
                zip(trajectory.response_logprobs, trajectory.weight_versions, strict=True)
            )
            if at not in trained
        )
        assert len(trajectory.response_ids) == trajectory.spans[-1].end


@MANY
@given(GENES, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(genes: bytes, random: Any) -> None:
    turns = rollout(genes)
    shuffled = random.sample(turns, len(turns))
    assert trajectories(shuffled) == trajectories(turns)


@settings(max_examples=300, deadline=None)
@given(GENES)
def test_an_untrained_span_says_why(genes: bytes) -> None:
    turns = {each.id: each for each in rollout(genes)}
    spans = [span for trajectory in trajectories(list(turns.values())) for span in trajectory.spans]
    for span in spans:
        owner = turns[span.turn_id]
        if owner.role == "frozen":
            assert span.reason == "frozen: the graph's one model"
        elif owner.stop_reason == "aborted":
            assert span.reason in (ABORTED, SUPERSEDED)
        else:
            assert span.reason in ("", SUPERSEDED)
        assert span.trained == (span.reason == "")


@settings(max_examples=300, deadline=None)
@given(GENES)
def test_the_account_adds_up_and_nothing_drifts(genes: bytes) -> None:
    turns = tuple(rollout(genes))
    built = trajectories(turns)
    reward = Reward(score=1.0, parts=())
    made = Rollout(id="r", task_id="t", phase="train", step=1, sibling=0, attempt=0, status="completed", reward=reward)
    samples = build_samples(made, built)
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    result = RolloutResult(request=request, rollout=made, turns=turns, trajectories=built, samples=samples)
    account = token_account([result], samples)
    assert account.trained == sum(sum(each.response_mask) for each in built)
    assert account.frozen == sum(len(each.response_ids) for each in turns if each.role == "frozen")
    assert drifted(samples, {each.id: each for each in turns}) == 0


# Written out


def test_a_turn_that_extends_another_goes_on_in_its_trajectory() -> None:
    first = turn("a", [1, 2], [3, 4], break_cause="first_turn")
    second = turn("b", [1, 2, 3, 4, 5], [6], extends="a")
    (only,) = trajectories([first, second])
    assert only.prompt_ids == (1, 2)
    assert only.response_ids == (3, 4, 5, 6)
    assert only.response_mask == (1, 1, 0, 1)
    assert only.response_logprobs == (-3 / 1024, -4 / 1024, 0.0, -6 / 1024)
    assert only.weight_versions == (3, 4, -1, 1)
    assert [(span.turn_id, span.start, span.end) for span in only.spans] == [("a", 0, 2), ("b", 3, 4)]
    assert only.break_cause == "first_turn"


def test_a_shared_turn_is_trained_in_the_first_branch_and_is_the_prompt_of_the_second() -> None:
    """Both branches of a fan-out begin with the same call: its ids count once."""
    root = turn("a", [1], [2], break_cause="first_turn")
    left = turn("b", [1, 2, 3], [4], extends="a", site=CallSite(node="x", step=2, task_id="l", path="0"))
    right = turn("c", [1, 2, 5], [6], extends="a", site=CallSite(node="x", step=2, task_id="r", path="1"))
    one, two = trajectories([root, right, left])
    assert (one.prompt_ids, one.response_ids, one.response_mask) == ((1,), (2, 3, 4), (1, 0, 1))
    assert (two.prompt_ids, two.response_ids, two.response_mask) == ((1, 2, 5), (6,), (1,))
    assert two.break_cause == "parallel_sibling"


def test_a_frozen_turn_stays_in_its_path_at_mask_0() -> None:
    first = turn("a", [1], [2], break_cause="first_turn")
    frozen = turn("b", [1, 2, 3], [4], extends="a", role="frozen", role_reason="node: plan")
    last = turn("c", [1, 2, 3, 4, 5], [6], extends="b")
    (only,) = trajectories([first, frozen, last])
    assert only.response_mask == (1, 0, 0, 0, 1)
    assert only.spans[1].reason == "frozen: node: plan"


def test_what_a_retry_threw_away_is_kept_and_not_trained() -> None:
    """LangGraph's task id and attempt tell a retry from a parallel sibling."""
    first = turn("a", [1], [2], break_cause="first_turn", site=CallSite(node="n", task_id="t"))
    again = turn("b", [1], [3], break_cause="retry", site=CallSite(node="n", task_id="t", attempt=2))
    kept, thrown = trajectories([first, again])
    assert (kept.response_ids, kept.response_mask) == ((3,), (1,))
    assert (thrown.response_ids, thrown.response_mask, thrown.break_cause) == ((2,), (0,), "retry")
    assert thrown.spans[0].reason == "dropped: superseded by a retry"


def test_what_was_said_within_a_node_that_was_retried_is_not_trained() -> None:
    """A sub-agent's own node was tried once each time; the node that called it raised."""
    within = CallSite(node="n", task_id="t", checkpoint_ns="team:a|n:t")
    after = CallSite(node="n", task_id="u", checkpoint_ns="team:a|1|n:u", attempts=(2, 1, 1))
    beside = CallSite(node="n", task_id="v", checkpoint_ns="other:b|n:v")
    kept, other, thrown = trajectories(
        [
            turn("a", [1], [2], break_cause="first_turn", site=within),
            turn("b", [1], [3], break_cause="retry", site=after),
            turn("c", [1], [4], break_cause="parallel_sibling", site=beside),
        ]
    )
    assert sorted([kept.response_ids, other.response_ids]) == [(3,), (4,)]
    assert (kept.response_mask, other.response_mask) == ((1,), (1,))
    assert (thrown.response_ids, thrown.response_mask) == ((2,), (0,))
    assert thrown.spans[0].reason == "dropped: superseded by a retry"


def test_parallel_siblings_with_equal_prompts_are_both_trained() -> None:
    left = turn("a", [1], [2], break_cause="first_turn", site=CallSite(node="n", task_id="l", path="0"))
    right = turn("b", [1], [2], break_cause="parallel_sibling", site=CallSite(node="n", task_id="r", path="1"))
    assert [each.response_mask for each in trajectories([left, right])] == [(1,), (1,)]


def test_which_parallel_first_call_came_in_first_makes_no_difference() -> None:
    """The recorder calls the earlier one first_turn; the path of the graph decides which trajectory is the first."""
    here, there = CallSite(node="n", task_id="l", path="0"), CallSite(node="n", task_id="r", path="1")
    one = [
        turn("a", [1], [2], break_cause="first_turn", site=here),
        turn("b", [1], [3], break_cause="parallel_sibling", site=there),
    ]
    other = [
        turn("a", [1], [2], break_cause="parallel_sibling", site=here),
        turn("b", [1], [3], break_cause="first_turn", site=there),
    ]
    assert trajectories(one) == trajectories(other)


def test_an_attempt_that_a_later_prompt_builds_on_is_trained() -> None:
    """A graph that keeps its messages outside of its state hands the first attempt's answer on."""
    first = turn("a", [1], [2], break_cause="first_turn", site=CallSite(node="n", task_id="t"))
    again = turn("b", [1, 2, 3], [4], extends="a", site=CallSite(node="n", task_id="t", attempt=2))
    (only,) = trajectories([first, again])
    assert only.response_mask == (1, 0, 1)


def test_an_edited_history_begins_a_trajectory_and_trains_nothing_twice() -> None:
    first = turn("a", [1], [2, 3], break_cause="first_turn")
    edited = turn("b", [1, 2, 9, 5], [6], break_cause="history_rewritten")
    one, two = trajectories([first, edited])
    assert (one.response_ids, one.response_mask) == ((2, 3), (1, 1))
    assert (two.prompt_ids, two.response_ids, two.break_cause) == ((1, 2, 9, 5), (6,), "history_rewritten")


def test_a_turn_that_says_it_extends_and_does_not_begins_a_trajectory() -> None:
    first = turn("a", [1], [2, 3], break_cause="first_turn")
    wrong = turn("b", [1, 2, 9, 5], [6], extends="a")
    assert not extends_exactly(wrong, first)
    assert [each.break_cause for each in trajectories([first, wrong])] == ["first_turn", "template"]


def test_an_aborted_call_is_not_trained() -> None:
    (only,) = trajectories([turn("a", [1], [2], break_cause="first_turn", stop_reason="aborted")])
    assert (only.response_mask, only.spans[0].reason) == ((0,), ABORTED)


def test_a_rollout_without_a_policy_call_has_no_trajectory() -> None:
    assert trajectories([turn("a", [], [], role="auxiliary")]) == ()


def test_two_different_turns_with_one_id_are_refused() -> None:
    one = turn("a", [1], [2])
    with pytest.raises(CaptureError, match="Turn a was given twice with different content"):
        trajectories([one, replace(one, response_ids=(3,))])


def test_the_same_turn_given_twice_counts_once() -> None:
    one = turn("a", [1], [2], break_cause="first_turn")
    assert trajectories([one, one]) == trajectories([one])


# Routed experts


def rows_of(ids: Sequence[int], start: int, end: int) -> RoutedExperts:
    """What an engine would tell of ids: each row says all that was read up to its position."""
    sums = [[zlib.crc32(repr(tuple(ids[: at + 1])).encode()) % 65536] * 2 for at in range(start, end)]
    data = b"".join(number.to_bytes(2, "little") for row in sums for number in row)
    return RoutedExperts(start=start, n_layers=1, n_chosen=2, data=data)


def telling(turns: Sequence[Turn], silent: int) -> list[Turn]:
    """The turns as a recorder keeps them where the engine tells experts; those that bits of `silent` name lack them."""
    kept: dict[str, Turn] = {}
    for each in turns:
        parent = kept.get(each.extends or "")
        known = parent.routed_experts if parent is not None and extends_exactly(each, parent) else None
        ids, start = each.prompt_ids + each.response_ids, known.end if known else 0
        if each.response_ids and not silent >> each.index & 1:
            each = replace(each, routed_experts=rows_of(ids, start, len(ids) - 1))
        kept[each.id] = each
    return list(kept.values())


def path_of(trajectory: Trajectory, turns: Sequence[Turn]) -> list[Turn]:
    by_id = {each.id: each for each in turns if each.response_ids}
    found = [by_id[trajectory.spans[-1].turn_id]]
    while (parent := by_id.get(found[-1].extends or "")) is not None and extends_exactly(found[-1], parent):
        found.append(parent)
    return found


@MANY
@given(GENES, st.integers(0, 511) | st.just(0), st.randoms(use_true_random=False))
def test_a_trajectory_has_the_experts_of_every_id_that_was_read(genes: bytes, silent: int, random: Random) -> None:
    """At its own position, whatever turns and trajectories told it and in whatever order they come; or none at all."""
    turns = telling(rollout(genes), silent)
    random.shuffle(turns)
    for trajectory in trajectories(turns):
        whole = path(trajectory)
        told = all(each.routed_experts is not None for each in path_of(trajectory, turns))
        assert trajectory.routed_experts == (rows_of(whole, 0, len(whole) - 1) if told else None)


def test_a_branch_begins_with_the_rows_that_the_other_chain_told() -> None:
    """The last id that the first turn sampled was read by each turn that goes on: its row may differ between them."""
    first = turn("a", (1, 2), (3, 4), routed_experts=numbered(0, 10, 11, 12))
    goes_on = turn("b", (1, 2, 3, 4, 5), (6,), extends="a", routed_experts=numbered(3, 23, 24))
    branch = turn("c", (1, 2, 3, 4, 7), (8,), extends="a", routed_experts=numbered(3, 33, 34))
    made = trajectories([first, goes_on, branch])
    assert [each.routed_experts for each in made] == [
        numbered(0, 10, 11, 12, 23, 24),
        numbered(0, 10, 11, 12, 33, 34),
    ]


def numbered(start: int, *experts: int) -> RoutedExperts:
    return RoutedExperts(start=start, n_layers=1, n_chosen=1, data=b"".join(n.to_bytes(2, "little") for n in experts))
