"""reward/layers.py: gates, outcomes and terms become a Reward."""

from __future__ import annotations

from typing import Any

import pytest

from agenttrain.errors import PolicyFailure, RewardError
from agenttrain.part import Part
from agenttrain.records import Reward, RewardPart, Task
from agenttrain.reward.layers import passes
from agenttrain.reward.score import VerifierPolicyFailure, score

TASK = Task(id="t", input={})


def gives(answer: Any) -> Any:
    """A verifier that answers this, or raises it."""

    def verifier(state: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return verifier


def reward_of(unfinished: float = 0.0, **parts: Part) -> Reward:
    return score(parts, task=TASK, state={}, timeout_s=5.0, unfinished=unfinished)


def test_every_layer_has_its_place_in_the_score() -> None:
    """1 × 1 + 0.5 × 0.5 - 0.1 × 1 (1.5 is above its bound) - 0.25: open gates add nothing."""
    reward = reward_of(
        unfinished=-0.25,
        no_secret=Part(gives(True), kind="safety", closed=-1.0),
        form=Part(gives(1), kind="format"),
        tests=Part(gives({"score": 1.0, "comment": "4 of 4"})),
        style=Part(gives(0.5), 0.5, kind="process"),
        turns=Part(gives({"score": 1.5, "comment": "12 of 8"}), -0.1, kind="cost", low=0.0, high=1.0),
    )
    assert reward == Reward(
        score=pytest.approx(0.9),
        unfinished=-0.25,
        parts=(
            RewardPart(name="no_secret", score=1.0, weight=0.0, kind="safety"),
            RewardPart(name="form", score=1.0, weight=0.0, kind="format"),
            RewardPart(name="tests", score=1.0, weight=1.0, comment="4 of 4"),
            RewardPart(name="style", score=0.5, weight=0.5, kind="process"),
            RewardPart(
                name="turns",
                score=1.0,
                weight=-0.1,
                kind="cost",
                comment="12 of 8 (1.5 is out of bounds and counts as 1)",
            ),
        ),
    )
    assert passes(reward)


def test_a_closed_gate_decides_whatever_the_others_say() -> None:
    """The score is what it says, and what being cut adds; no success, no credit; every part was asked all the same."""
    reward = reward_of(
        unfinished=-0.25,
        no_secret=Part(gives({"score": 0, "comment": "prints the key"}), kind="safety", closed=-1.0),
        tests=Part(gives({"score": 1, "success": True, "turns": {0: 1.0}}), 2.0),
    )
    assert (reward.score, reward.closed, reward.credit) == (-1.25, "no_secret", None)
    assert [(part.name, part.score, part.is_closed) for part in reward.parts] == [
        ("no_secret", 0.0, True),
        ("tests", 1.0, False),
        ("tests.success", 1.0, False),
    ]
    assert not passes(reward)


@pytest.mark.parametrize(
    ("answer", "closed"),
    [
        (True, ""),
        (1.0, ""),
        (2, ""),
        (0.999, "gate"),
        (0, "gate"),
        (-1, "gate"),
        ({"score": 1, "success": True}, ""),
        ({"score": 1, "success": False}, "gate"),
        ({"score": 0.5, "success": True}, "gate"),
    ],
)
def test_a_gate_is_open_at_1_and_where_it_does_not_say_otherwise(answer: Any, closed: str) -> None:
    reward = reward_of(gate=Part(gives(answer), kind="format"), tests=Part(gives(1)))
    assert (reward.closed, reward.score, passes(reward)) == (closed, 0.0 if closed else 1.0, not closed)


@pytest.mark.parametrize(
    ("first", "second", "deciding", "value"),
    [(-1.0, -2.0, "b", -2.0), (-2.0, -1.0, "a", -2.0), (-1.0, -1.0, "a", -1.0)],
)
def test_of_closed_gates_the_one_that_gives_least_decides(
    first: float, second: float, deciding: str, value: float
) -> None:
    reward = reward_of(
        a=Part(gives(0), kind="format", closed=first),
        b=Part(gives(0), kind="safety", closed=second),
        tests=Part(gives(1)),
    )
    assert (reward.closed, reward.score) == (deciding, value)


def test_terms_never_decide_success() -> None:
    """Neither full marks, nor none, nor what they say of it."""
    poor = reward_of(tests=Part(gives(1)), turns=Part(gives({"score": 0, "success": False}), -0.5, kind="cost"))
    assert (poor.score, passes(poor)) == (1.0, True)
    assert [part.name for part in poor.parts] == ["tests", "turns"]
    rich = reward_of(tests=Part(gives(0)), style=Part(gives({"score": 1, "success": True}), 5.0, kind="process"))
    assert (rich.score, passes(rich)) == (5.0, False)
    assert not passes(reward_of(style=Part(gives(1), kind="process")))


@pytest.mark.parametrize(
    ("low", "high", "answer", "kept"),
    [
        (None, None, -7.0, -7.0),
        (0.0, None, -7.0, 0.0),
        (0.0, 1.0, 7.0, 1.0),
        (0.0, 1.0, 0.25, 0.25),
        (1, 1, 0.25, 1.0),
    ],
)
def test_a_score_lies_within_its_bounds(low: Any, high: Any, answer: float, kept: float) -> None:
    (part,) = reward_of(v=Part(gives(answer), low=low, high=high)).parts
    said = "" if kept == answer else f"{answer:g} is out of bounds and counts as {kept:g}"
    assert (part.score, part.comment) == (kept, said)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (KeyError("gone"), "Verifier 'style' raised KeyError on task 't': 'gone'"),
        ("nice", "Verifier 'style' answered 'nice'. Answer with a bool"),
        (float("nan"), "Verifier 'style' answered nan."),
        ({"score": 1, "evidence": {"a": {1}}}, "Verifier 'style' answered with evidence['a'] {1}, which JSON"),
        ({"score": 1, "turns": {"x": 1}}, "Verifier 'style' credits the turn 'x'."),
    ],
)
def test_a_part_that_fails_may_be_left_out(answer: Any, said: str) -> None:
    """It alone counts nothing; the same failure of a part that isn't to be left out gives no reward."""
    reward = reward_of(tests=Part(gives(1)), style=Part(gives(answer), 0.5, kind="process", on_error="leave_out"))
    assert (reward.score, passes(reward)) == (1.0, True)
    left = reward.parts[1]
    assert (left.name, left.kind, left.score, left.weight, left.evidence) == ("style", "process", 0.0, 0.5, {})
    assert left.error.startswith(said)
    with pytest.raises(RewardError, match="Verifier 'style'"):
        reward_of(tests=Part(gives(1)), style=Part(gives(answer), 0.5, kind="process"))


def test_where_every_outcome_is_left_out_there_is_no_reward() -> None:
    """It would else be 0. An outcome that only informs says nothing of what a rollout is worth."""
    broken = Part(gives(KeyError("gone")), on_error="leave_out")
    for others in ({}, {"turns": Part(gives(1), -0.1, kind="cost")}, {"info": Part(gives(1), 0.0)}):
        with pytest.raises(RewardError, match=r"Nothing says whether task 't' was solved.*Verifier 'tests' raised"):
            reward_of(tests=broken, **others)


def test_an_outcome_that_is_left_out_is_no_success() -> None:
    """Else an agent that crashes the stricter of two would succeed by the other."""
    broken = Part(gives(KeyError("gone")), on_error="leave_out")
    reward = reward_of(tests=broken, more=Part(gives(1), 0.5))
    assert (reward.score, passes(reward)) == (0.5, False)
    informs = Part(gives(KeyError("gone")), 0.0, on_error="leave_out")
    assert passes(reward_of(info=informs, tests=Part(gives(1))))


def test_a_closed_gate_is_no_way_out_of_what_the_others_take() -> None:
    """A failure in the right form would be worth -0.5, and one in none must not be worth more."""
    turns = Part(gives(1), -0.5, kind="cost")
    assert reward_of(form=Part(gives(1), kind="format"), tests=Part(gives(0)), turns=turns).score == -0.5
    closed = reward_of(form=Part(gives(0), kind="format"), tests=Part(gives(0)), turns=turns)
    assert (closed.score, closed.closed) == (-0.5, "form")


def test_behind_a_closed_gate_an_outcome_need_not_answer() -> None:
    """What the rollout is worth is known."""
    broken = Part(gives(KeyError("gone")), on_error="leave_out")
    assert reward_of(gate=Part(gives(0), kind="safety", closed=-1.0), tests=broken).score == -1.0


def test_a_policy_failure_closes_the_gate_that_raises_it() -> None:
    """And is 0, or as near as its bounds let it be, for any other part; on_error says nothing of it."""
    with pytest.raises(VerifierPolicyFailure) as caught:
        reward_of(gate=Part(gives(PolicyFailure("rm -rf")), kind="safety", closed=-1.0), tests=Part(gives(1)))
    reward = caught.value.reward
    assert (reward.score, reward.closed, reward.parts[0].comment) == (-1.0, "gate", "PolicyFailure: rm -rf")
    with pytest.raises(VerifierPolicyFailure) as caught:
        reward_of(tests=Part(gives(PolicyFailure("no")), low=-1.0, high=-0.5, on_error="leave_out"))
    assert caught.value.reward.parts == (RewardPart(name="tests", score=-0.5, comment="PolicyFailure: no"),)


def test_a_gates_credit_counts_once_and_not_behind_a_closed_one() -> None:
    """An open gate may say of a turn that it came near."""
    near = gives({"score": 1, "turns": {2: -0.5}})
    open_one = reward_of(gate=Part(near, kind="safety"), tests=Part(gives(1)))
    assert open_one.credit is not None
    assert dict(open_one.credit.by_turn) == {2: -0.5}
    assert reward_of(gate=Part(near, kind="safety"), form=Part(gives(0), kind="format")).credit is None
