"""reward/score.py: verifiers and the last state become a Reward."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import PolicyFailure, RewardError, RolloutStop
from agenttrain.part import Part
from agenttrain.records import Reward, RewardPart, Task
from agenttrain.reward.arguments import binding_of
from agenttrain.reward.layers import passes
from agenttrain.reward.layers import reward_of as added_up
from agenttrain.reward.score import VerifierPolicyFailure, check_verifiers, score

TASK = Task(id="t", input={"q": 1}, reference="gold")
STATE = {"answer": "gold"}


def reward_of(verifier: Any, *, timeout_s: float | None = 5.0, unfinished: float = 0.0) -> Reward:
    return score({"v": Part(verifier)}, task=TASK, state=STATE, timeout_s=timeout_s, unfinished=unfinished)


def test_the_score_is_the_weighted_sum_plus_unfinished() -> None:
    """2 * 0.5 + 0.5 * 1 - 0.25, with the parts as they were given."""
    reward = score(
        {"a": Part(lambda task, state: 0.5, 2.0), "b": Part(lambda task, state: True, 0.5)},
        task=TASK,
        state=STATE,
        timeout_s=5,
        unfinished=-0.25,
    )
    assert reward == Reward(
        score=1.25,
        parts=(RewardPart(name="a", score=0.5, weight=2.0), RewardPart(name="b", score=1.0, weight=0.5)),
        unfinished=-0.25,
    )


def by_own_names(task: Task, state: Any) -> bool:
    return task is TASK and state is STATE


def by_other_names(row: Task, final: Any) -> bool:
    return row is TASK and final is STATE


def by_langsmith_names(inputs: Any, outputs: Any, reference_outputs: Any) -> bool:
    return (inputs, outputs, reference_outputs) == ({"q": 1}, STATE, "gold")


def in_another_order(state: Any, task: Task) -> bool:
    return task is TASK and state is STATE


def by_keyword(*, outputs: Any, reference: Any, **rest: Any) -> bool:
    return outputs is STATE and reference == "gold" and not rest


def all_keywords(**given: Any) -> bool:
    names = ["context", "inputs", "outputs", "reference", "reference_outputs", "sandbox", "state", "task", "turns"]
    return sorted(given) == names


def by_position(*given: Any) -> bool:
    return given == (TASK, STATE)


def position_only(state: Any, task: Task, /) -> bool:
    return task is TASK and state is STATE


def with_default(state: Any, strict: bool = True) -> bool:
    return state is STATE and strict


def without_arguments() -> bool:
    return True


async def asynchronous(state: Any) -> bool:
    await asyncio.sleep(0)
    return state is STATE


class Instance:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, task: Task, state: Any) -> bool:
        return task is TASK and state is STATE


@pytest.mark.parametrize(
    "verifier",
    [
        by_own_names,
        by_other_names,
        by_langsmith_names,
        in_another_order,
        by_keyword,
        all_keywords,
        by_position,
        position_only,
        with_default,
        without_arguments,
        asynchronous,
        Instance(),
        Instance().__call__,
        functools.partial(by_own_names),
    ],
)
def test_arguments_are_filled_by_name(verifier: Any) -> None:
    assert reward_of(verifier).score == 1.0


@pytest.mark.parametrize(
    ("verifier", "argument"),
    [
        (lambda answer: 1, "answer"),
        (lambda state, expected: 1, "expected"),
        (lambda task, state, extra: 1, "extra"),
        (lambda *, a, b: 1, "a"),
    ],
)
def test_an_argument_that_nothing_fills_is_refused_before_anything_runs(verifier: Any, argument: str) -> None:
    with pytest.raises(
        RewardError, match=f"Verifier 'v' asks for '{argument}'.*task, state, context, turns, sandbox, inputs"
    ):
        check_verifiers({"v": Part(verifier)})


def test_a_signature_that_can_not_be_read_gets_task_and_state() -> None:
    assert binding_of(getattr).by_position == ("task", "state")


@pytest.mark.parametrize(
    ("result", "value", "comment"),
    [
        (True, 1.0, ""),
        (0, 0.0, ""),
        (-2.5, -2.5, ""),
        (np.float32(0.5), 0.5, ""),
        (np.bool_(True), 1.0, ""),
        (np.array(0.25), 0.25, ""),
        ({"score": 0.5, "comment": "half"}, 0.5, "half"),
        ({"key": "k", "score": True, "comment": None}, 1.0, ""),
        (SimpleNamespace(key="k", score=0.5, comment="half", value=None), 0.5, "half"),
    ],
)
def test_results_that_are_scores(result: Any, value: float, comment: str) -> None:
    (part,) = reward_of(lambda state: result).parts
    assert (part.score, part.comment) == (value, comment)


@pytest.mark.parametrize(
    "result",
    [
        None,
        float("nan"),
        float("inf"),
        10**400,
        "1",
        {"comment": "x"},
        {"score": None},
        {"score": "1"},
        [1.0],
        1j,
        np.ones(2),
    ],
)
def test_results_that_are_none(result: Any) -> None:
    """Verifier and result are named; it never counts as 0."""
    with pytest.raises(RewardError, match=r"Verifier 'v' answered .*finite number"):
        reward_of(lambda state: result)


def test_a_langsmith_evaluation_result_is_taken() -> None:
    from langsmith.evaluation import EvaluationResult

    assert reward_of(lambda outputs: EvaluationResult(key="k", score=1, comment="ok")).parts == (
        RewardPart(name="v", score=1.0, comment="ok"),
    )


def test_an_exception_is_attributed_to_its_verifier() -> None:
    def verifier(state: Any) -> Any:
        return {}["gone"]

    at = f"test_score.py:{verifier.__code__.co_firstlineno + 1} \\(verifier\\)"
    with pytest.raises(
        RewardError, match=f"Verifier 'v' raised KeyError on task 't': 'gone' at {at}. Handle"
    ) as caught:
        reward_of(verifier)
    assert isinstance(caught.value.__cause__, KeyError)


def test_leaving_the_program_is_an_exception_like_any_other() -> None:
    with pytest.raises(RewardError, match="SystemExit"):
        reward_of(lambda state: sys.exit(1))


def test_the_end_of_a_rollout_passes_through() -> None:
    def stop(state: Any) -> float:
        raise RolloutStop("budget")

    with pytest.raises(RolloutStop):
        reward_of(stop)


def test_a_policy_failure_passes_through_with_the_reward() -> None:
    """Its verifier scores 0, the others are asked all the same; it crosses processes whole."""

    def failed(state: Any) -> float:
        raise PolicyFailure("invented an order")

    with pytest.raises(PolicyFailure, match="invented an order") as caught:
        score({"a": Part(failed), "b": Part(lambda state: 1, 0.5)}, task=TASK, state=STATE, timeout_s=5)
    failure = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(failure, VerifierPolicyFailure)
    assert failure.reward.score == 0.5
    assert [part.score for part in failure.reward.parts] == [0.0, 1.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_verifier_that_hangs_is_left_behind(is_async: bool) -> None:
    """The caller goes on after the limit, while it still hangs, and later calls are not held up."""
    let_go, ended = threading.Event(), []

    def hangs(state: Any) -> None:
        ended.append(let_go.wait(60))

    async def hangs_there(state: Any) -> None:
        await asyncio.to_thread(hangs, state)

    with pytest.raises(RewardError, match=r"Verifier 'v' took more than 0.05 s on task 't'"):
        reward_of(hangs_there if is_async else hangs, timeout_s=0.05)
    assert reward_of(by_own_names).score == 1.0
    assert not ended
    let_go.set()


def test_without_a_verifier_there_is_no_reward() -> None:
    with pytest.raises(RewardError, match="there is no verifier"):
        score({}, task=TASK, state=STATE, timeout_s=1)


def made(*parts: tuple[str, float, float]) -> Reward:
    said = [RewardPart(name=name, score=score, weight=weight) for name, score, weight in parts]
    return added_up(said, {}, credit=None, unfinished=0.0)


@pytest.mark.parametrize(
    ("parts", "passed"),
    [
        ([("a", 1.0, 1.0)], True),
        ([("a", 0.9, 1.0)], False),
        ([("a", 1.0, 1.0), ("b", 0.0, 0.5)], False),
        ([("a", 1.0, 1.0), ("b", 1.0, 0.5)], True),
        ([("a", 2.0, 1.0), ("b", 0.0, 1.0)], False),
        ([("a", 1.0, 1.0), ("info", 0.0, 0.0)], True),
        ([("a", 1.0, 1.0), ("penalty", 0.0, -1.0)], True),
        ([("a", 1.0, 1.0), ("penalty", 1.0, -1.0)], False),
        ([("a", 1.0, 0.0)], False),
        ([], False),
        ([("a", 0.7, 1.0), ("a.success", 1.0, 0.0)], True),
        ([("a", 1.0, 1.0), ("a.success", 0.0, 0.0)], False),
        ([("a", 0.7, 1.0), ("a.success", 1.0, 0.0), ("b", 0.5, 1.0)], False),
    ],
)
def test_success_is_full_marks_or_the_verifiers_own_word(parts: list[Any], passed: bool) -> None:
    assert passes(made(*parts)) is passed


def test_a_verifier_may_decide_success_itself() -> None:
    """Its decision is kept as a part of weight 0, and does not change the score."""
    reward = reward_of(lambda state: {"score": 0.7, "success": True})
    assert reward.score == 0.7
    assert reward.parts[1] == RewardPart(name="v.success", score=1.0, weight=0.0)
    assert passes(reward)
    with pytest.raises(RewardError, match='"success" must be true or false'):
        reward_of(lambda state: {"score": 0.7, "success": "yes"})


def test_unfinished_does_not_make_or_break_success() -> None:
    assert passes(reward_of(lambda state: 1, unfinished=-1.0))
    assert not passes(reward_of(lambda state: 0, unfinished=1.0))


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-2, 2)), min_size=1, max_size=5),
    st.floats(-1, 1),
)
def test_the_score_can_be_added_up_from_the_record(pairs: list[tuple[float, float]], unfinished: float) -> None:
    verifiers = {f"v{i}": Part(lambda state, value=value: value, weight) for i, (value, weight) in enumerate(pairs)}
    reward = score(verifiers, task=TASK, state=STATE, timeout_s=5, unfinished=unfinished)
    total = sum(part.weight * part.score for part in reward.parts) + reward.unfinished
    assert reward.score == pytest.approx(total)
    assert [part.score for part in reward.parts] == [value for value, _ in pairs]


def test_verifiers_that_run_programs_are_asked_a_few_at_once() -> None:
    """As many as there are cores, at least two; the others wait, and not on their own time."""
    places = max(2, len(os.sched_getaffinity(0)))
    all_in, go_on, inside, most = threading.Event(), threading.Event(), [0], [0]
    lock = threading.Lock()

    def judges(task: Task) -> bool:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if inside[0] == places:
                all_in.set()
        go_on.wait(30)
        with lock:
            inside[0] -= 1
        return True

    judges.most_seconds = lambda limits: 1.0  # type: ignore[attr-defined]
    task = Task(id="a", input={})

    def ask() -> None:
        score({"judges": Part(judges)}, task=task, state=None, timeout_s=60)

    threads = [threading.Thread(target=ask) for _ in range(places + 3)]
    for thread in threads:
        thread.start()
    assert all_in.wait(30)
    assert most[0] == places
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert (inside[0], most[0]) == (0, places)


def test_what_a_verifier_of_ours_says_is_told_without_advice_on_it() -> None:
    """Its own error has the next step."""

    def judges(task: Task) -> bool:
        raise RewardError("there are no hidden files in hidden. Name their folder.")

    with pytest.raises(RewardError) as raised:
        score({"judges": Part(judges)}, task=Task(id="a", input={}), state=None, timeout_s=10)
    assert str(raised.value) == (
        "Verifier 'judges' can't score task 'a': there are no hidden files in hidden. Name their folder."
    )
