"""reward/tampering.py: what rollouts changed of what judges them, and whether that paid."""

from __future__ import annotations

import pytest

from agenttrain.alarms import tampering_alarms
from agenttrain.records import Reward, RewardPart, Rollout, RolloutRequest, RolloutResult, Task
from agenttrain.reward.tampering import tampering_in, tampering_of


def rollout(task: str, sibling: int, score: float | None, *, tampering: tuple[str, ...] = ()) -> Rollout:
    part = RewardPart(name="tests", score=score or 0.0, evidence={"tampering": list(tampering)} if tampering else {})
    return Rollout(
        id=f"train-1-{task}-{sibling}-0",
        task_id=task,
        phase="train",
        step=1,
        sibling=sibling,
        attempt=0,
        status="completed" if score is not None else "environment_failure",
        reward=None if score is None else Reward(score=score, parts=(part,)),
    )


def group(task: str, tampered: list[float], honest: list[float]) -> list[Rollout]:
    scores = [(score, ("changed tests.py",)) for score in tampered] + [(score, ()) for score in honest]
    return [rollout(task, i, score, tampering=what) for i, (score, what) in enumerate(scores)]


def test_what_the_parts_of_one_rollout_tell() -> None:
    """Each text once, in order; nothing without a reward."""
    assert tampering_of(rollout("a", 0, 1.0, tampering=("x", "y", "x"))) == ("x", "y")
    assert tampering_of(rollout("a", 0, None)) == ()
    assert tampering_of(rollout("a", 0, 1.0)) == ()


def test_no_tampering() -> None:
    assert tampering_in(group("a", [], [1.0, 0.0])) is None


def test_the_gain_is_held_against_the_others_of_the_group() -> None:
    """1 against a mean of 0.25, eight times: 0.75 each, with no error at all."""
    rollouts = [each for i in range(8) for each in group(f"t{i}", [1.0], [0.0, 0.5])]
    found = tampering_in(rollouts)
    assert found is not None
    assert (found.n, found.gain, found.error, found.pays) == (8, 0.75, 0.0, True)


def test_too_few_to_say() -> None:
    found = tampering_in([each for i in range(7) for each in group(f"t{i}", [1.0], [0.0])])
    assert found is not None
    assert (found.n, found.gain, found.pays) == (7, None, False)


def test_a_group_in_which_all_tamper_says_nothing_of_the_gain() -> None:
    found = tampering_in([each for i in range(8) for each in group(f"t{i}", [1.0, 1.0], [])])
    assert found is not None
    assert (found.n, found.gain) == (16, None)


@pytest.mark.parametrize(
    ("tampered", "pays"),
    [
        ([0.0] * 8, False),
        ([0.5] * 8, False),
        ([0.0, 1.0] * 4, False),  # gain 0
        ([1.0] * 7 + [0.0], False),  # gain 0.375, error 0.125: not above three of them
        ([1.0] * 15 + [0.0], True),  # gain 0.4375, error 0.0625
    ],
)
def test_what_chance_would_give_is_no_gain(tampered: list[float], pays: bool) -> None:
    """Others get 0.5; only a gain above three standard errors pays."""
    found = tampering_in([each for i, score in enumerate(tampered) for each in group(f"t{i}", [score], [0.5])])
    assert found is not None
    assert found.gain == pytest.approx(sum(tampered) / len(tampered) - 0.5)
    assert found.pays is pays


def result(of: Rollout) -> RolloutResult:
    request = RolloutRequest(task=Task(id=of.task_id, input={}), phase="train", step=1, sibling=of.sibling)
    return RolloutResult(request=request, rollout=of, turns=(), trajectories=(), samples=())


def test_the_alarm_is_a_note_until_it_pays() -> None:
    harmless = [result(each) for i in range(8) for each in group(f"t{i}", [0.0], [0.5])]
    (note,) = tampering_alarms(harmless, 3)
    assert (note.code, note.severity, note.step) == ("tampering", "note", 3)
    assert note.message == (
        "8 of 16 rollouts changed what judges them, for example train-1-t0-0-0: changed tests.py. It changed no score."
    )
    paid = [result(each) for i in range(8) for each in group(f"t{i}", [1.0], [0.5])]
    (loud,) = tampering_alarms(paid, 3)
    assert (loud.code, loud.severity) == ("tampering_pays", "loud")
    assert "It pays (+0.50 against the others of their groups)" in loud.message
    assert tampering_alarms([result(each) for each in group("t", [], [1.0])], 3) == []
