"""A graph with two trained conversations, a summary and broken lines: which tokens are trained, and by how much."""

from __future__ import annotations

import pytest
from agenttrain.capture.store import StoreView
from agenttrain.records import Rollout
from agenttrain.testing.toy import ToyRun
from second_graph import LARGEST, POLICY, by_hand, copied, from_run, group_of, in_units_of_deviation, teaches

BROKEN = "desk-23"
"""A task of the first step whose siblings 0 and 2 have a broken line."""


@pytest.fixture(scope="module", params=["local", pytest.param("verl", marks=pytest.mark.verl)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """Two steps of each trainer."""
    project = copied(tmp_path_factory.mktemp("second") / "summarizing")
    return project.fit(
        model=str(POLICY), engine={"process": "shared"}, eval={"tasks": 2}, trainer={"name": request.param}
    )


def whole(store: StoreView) -> list[Rollout]:
    """The training rollouts whose graph got to its end."""
    return [r for r in store.rollouts() if r.phase == "train" and r.reward is not None]


def test_a_rollout_has_two_trained_conversations_and_a_frozen_summary_between_them(run: ToyRun) -> None:
    for rollout in whole(run.store):
        *looks, summary, reply = run.store.turns(rollout.id)
        assert {(turn.site.node, turn.role) for turn in looks} == {("look", "trained")}
        assert (summary.site.node, summary.role) == ("summarize", "frozen")
        assert (reply.site.node, reply.role) == ("reply", "trained")
        assert (reply.extends, reply.break_cause) == (None, "other_conversation")
        trained = [path for path in run.store.trajectories(rollout.id) if any(path.response_mask)]
        assert len(trained) == 2


def test_no_token_of_a_summary_is_trained(run: ToyRun) -> None:
    """It stands in trained rows at mask 0, or in a row of its own that isn't trained."""
    n_beside_trained = 0
    for rollout in whole(run.store):
        turns = {turn.id: turn for turn in run.store.turns(rollout.id)}
        for path in run.store.trajectories(rollout.id):
            for span in path.spans:
                mask = path.response_mask[span.start : span.end]
                is_summary = turns[span.turn_id].site.node == "summarize"
                assert set(mask) == {0 if is_summary else 1}
                n_beside_trained += is_summary and any(path.response_mask)
    assert n_beside_trained > 10
    frozen = sum(
        len(turn.response_ids)
        for rollout in run.store.rollouts()
        if rollout.phase == "train"
        for turn in run.store.turns(rollout.id)
        if turn.role == "frozen"
    )
    tokens = run.report["tokens"]
    assert (tokens["frozen"], tokens["drifted"]) == (frozen, 0)
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]


def test_one_group_by_hand_and_from_the_run(run: ToyRun) -> None:
    """Every token of both conversations has its rollout's advantage, which counts once in the group's mean."""
    teaching = [task for task in ("desk-00", "desk-22", "desk-24") if teaches(group_of(run.store, task))]
    assert teaching
    for task in teaching:
        group = group_of(run.store, task)
        expected, trained = by_hand(run.store, group), from_run(run.store, group)
        assert len(group) == 4
        assert {token.conversation for token in trained} == {0, 1}
        for ours, theirs in zip(expected, trained, strict=True):
            assert (ours.rollout_id, ours.conversation, ours.id) == (
                theirs.rollout_id,
                theirs.conversation,
                theirs.id,
            )
            assert theirs.logprob == ours.logprob
            assert theirs.advantage == pytest.approx(ours.advantage, abs=LARGEST)


def test_siblings_with_a_broken_line_are_no_part_of_their_group(run: ToyRun) -> None:
    """Tried three times, without a reward, in no row of any step; their siblings are a group of two."""
    failed = [
        r for r in run.store.rollouts() if (r.phase, r.step, r.task_id) == ("train", 1, BROKEN) and r.reward is None
    ]
    assert sorted((r.sibling, r.attempt) for r in failed) == [(s, a) for s in (0, 2) for a in (0, 1, 2)]
    assert {(r.status, r.cause.partition(" at ")[0]) for r in failed} == {
        ("environment_failure", "ConnectionError: the line to the warehouse is broken")
    }
    assert not any(run.store.trained(r.id) for r in failed)
    assert [r.sibling for r in group_of(run.store, BROKEN)] == [1, 3]


def test_a_group_with_failures_is_its_other_siblings(run: ToyRun) -> None:
    """Their mean and deviation are those of the rollouts that have a reward."""
    broken = [task for task in ("desk-08", "desk-26") if teaches(group_of(run.store, task, step=2))]
    assert broken
    for task in broken:
        group = group_of(run.store, task, step=2)
        assert [rollout.sibling for rollout in group] == [0, 2, 3]
        trained = {token.rollout_id: token.advantage for token in from_run(run.store, group)}
        rewards = [rollout.reward.score for rollout in group if rollout.reward is not None]
        assert list(trained.values()) == pytest.approx(in_units_of_deviation(rewards), abs=LARGEST)
