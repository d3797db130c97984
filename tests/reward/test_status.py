"""reward/status.py: how a rollout ended becomes its status, and what that means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import EngineError, PolicyFailure, RewardError, RolloutStop
from agenttrain.records import RolloutRequest, Status, Task
from agenttrain.reward.status import (
    MAX_REMAKES,
    MAX_RETRIES,
    STATUS_RULES,
    Ending,
    following,
    is_policy_failure,
    is_rewarded,
    may_succeed,
    may_train,
    status_of,
)


def raised(error: BaseException, *, cause: BaseException | None = None, context: BaseException | None = None) -> Any:
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    return error


WRONG = PolicyFailure("wrong")


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        (Ending(), "completed", ""),
        (Ending(n_trained_turns=3), "completed", ""),
        (Ending(last_turn_cut=True), "truncated", "cut at its length"),
        (Ending(last_turn_cut=True, ended_on_unparsable=True), "truncated", "cut at its length"),
        (Ending(last_turn_cut=True, error=ValueError("half a JSON")), "truncated", "cut at its length"),
        (Ending(stopped="16 of 16 turns"), "budget_exhausted", "16 of 16 turns"),
        (Ending(stopped="tokens", error=RolloutStop("tokens")), "budget_exhausted", "tokens"),
        (Ending(stopped="tokens", last_turn_cut=True), "budget_exhausted", "tokens"),
        (Ending(stopped="tokens", error=KeyError("messages")), "budget_exhausted", "tokens"),
        (Ending(recursion=True, error=RecursionError()), "budget_exhausted", "recursion limit"),
        (Ending(error=WRONG), "policy_failure", "PolicyFailure: wrong"),
        (Ending(error=raised(RuntimeError("tool"), cause=WRONG)), "policy_failure", "RuntimeError: tool"),
        (Ending(error=raised(RuntimeError("tool"), context=WRONG)), "policy_failure", "RuntimeError: tool"),
        (Ending(ended_on_unparsable=True), "policy_failure", "can't be read"),
        (Ending(ended_on_unparsable=True, error=ValueError("no such tool")), "policy_failure", "can't be read"),
        (Ending(error=RuntimeError("db")), "environment_failure", "RuntimeError: db"),
        (Ending(error=TimeoutError("tool")), "environment_failure", "TimeoutError"),
        (Ending(last_turn_cut=True, error=ConnectionError("db")), "environment_failure", "ConnectionError: db"),
        (Ending(ended_on_unparsable=True, error=EngineError("no answer")), "environment_failure", "no answer"),
        (Ending(error=EngineError("no answer"), lost_calls=1), "environment_failure", "no answer"),
        (Ending(error=RewardError("verifier")), "environment_failure", "verifier"),
        (Ending(stuck=True, stopped="60 s"), "environment_failure", "did not return in time: 60 s"),
        (Ending(interrupted=True), "environment_failure", "waits for a human"),
        (Ending(aborted=True, stopped="aborted: Ctrl-C", error=RolloutStop()), "aborted", "from outside"),
        (Ending(lost_calls=2), "incomplete", "2 model calls"),
        (Ending(lost_calls=1, stopped="turns"), "incomplete", "1 model calls"),
        (Ending(lost_calls=1, error=WRONG), "incomplete", "1 model calls"),
    ],
)
def test_each_ending_has_its_status(ending: Ending, status: Status, words: str) -> None:
    seen, cause = status_of(ending)
    assert seen == status
    assert words in cause
    assert bool(cause) == (status != "completed")


def test_a_policy_failure_that_was_handled_is_not_the_engines_fault() -> None:
    """An error of ours, or the end of a budget, that came while one was handled is what it is."""
    assert not is_policy_failure(raised(EngineError("no answer"), context=WRONG))
    assert not is_policy_failure(raised(RolloutStop(), context=WRONG))
    hidden = raised(RuntimeError("tool"), context=WRONG)
    hidden.__suppress_context__ = True
    assert not is_policy_failure(hidden)


def test_a_group_of_errors_is_the_policys_only_as_a_whole() -> None:
    """Parallel tools: one broken environment among them is enough to blame it."""
    assert is_policy_failure(ExceptionGroup("tools", [WRONG, PolicyFailure("too")]))
    assert not is_policy_failure(ExceptionGroup("tools", [WRONG, RuntimeError("db")]))


def test_a_ring_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_policy_failure(first)


@pytest.mark.parametrize(
    ("status", "rewarded", "trained", "succeeds", "retried", "same_seed", "unfinished"),
    [
        ("completed", True, True, True, False, False, False),
        ("truncated", True, True, True, False, False, True),
        ("budget_exhausted", True, True, True, False, False, True),
        ("policy_failure", True, True, False, False, False, True),
        ("environment_failure", False, False, False, True, False, False),
        ("aborted", False, False, False, False, True, False),
        ("incomplete", False, False, False, False, True, False),
    ],
)
def test_the_table_of_what_each_status_means(
    status: Status, rewarded: bool, trained: bool, succeeds: bool, retried: bool, same_seed: bool, unfinished: bool
) -> None:
    assert is_rewarded(status) is rewarded
    assert may_train(status) is trained
    assert may_succeed(status) is succeeds
    assert STATUS_RULES[status].retried is retried
    assert STATUS_RULES[status].same_seed is same_seed
    assert STATUS_RULES[status].unfinished is unfinished


def test_every_status_has_a_rule() -> None:
    assert set(STATUS_RULES) == set(get_args(Status))


errors = st.sampled_from([None, WRONG, RuntimeError("x"), OSError("x"), EngineError("x"), RolloutStop("x")])
endings = st.builds(
    Ending,
    error=errors,
    recursion=st.booleans(),
    stopped=st.none() | st.just("turns"),
    last_turn_cut=st.booleans(),
    ended_on_unparsable=st.booleans(),
    lost_calls=st.integers(0, 2),
    stuck=st.booleans(),
    interrupted=st.booleans(),
    aborted=st.booleans(),
)


@given(endings)
def test_nothing_incomplete_or_broken_is_ever_trained(ending: Ending) -> None:
    """Lost calls, a stuck graph, an abort and errors of ours keep a rollout out, whatever else is known."""
    status, _ = status_of(ending)
    if ending.lost_calls or ending.stuck or ending.aborted or isinstance(ending.error, EngineError):
        assert not may_train(status)
    if not is_rewarded(status):
        assert not may_train(status)
        assert not may_succeed(status)


def test_what_follows_an_ending() -> None:
    """Another attempt with another seed, a remake with the same one, or nothing; each a bounded number of times."""
    request = RolloutRequest(task=Task(id="t", input={}), phase="train")
    assert following(request, "completed") is None
    failed = following(replace(request, remake=1), "environment_failure")
    assert failed == replace(request, attempt=1)
    assert following(replace(request, attempt=MAX_RETRIES), "environment_failure") is None
    assert following(replace(request, attempt=1), "incomplete") == replace(request, attempt=1, remake=1)
    assert following(replace(request, remake=MAX_REMAKES), "aborted") is None
