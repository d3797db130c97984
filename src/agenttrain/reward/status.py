"""How a rollout ended becomes its Status, and a Status says what may be done with the rollout.

Exactly one status per ending. How the graph ended decides, not what happened on the way. Where a broken environment and
a wrong policy could both have been the cause, the environment is blamed: it is never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from agenttrain.error_place import place_of_error
from agenttrain.errors import AgenttrainError, PolicyFailure, RolloutStop
from agenttrain.records import RolloutRequest, Status

MAX_RETRIES = 2
"""Further attempts that an environment failure gets."""
WAITS_FOR_HUMAN = "the graph waits for a human, and nothing answers for one"
"""Begins the cause of a rollout that was interrupted."""
MAX_REMAKES = 2
"""How often a rollout that was stopped, or lost an answer, is made again in one life of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRule:
    """What may be done with a rollout of one status."""

    rewarded: bool
    """The verifiers are asked."""
    trained: bool
    """It is trained, and counts in its group's baseline."""
    may_succeed: bool
    """It is a success if it passes."""
    retried: bool
    """It is tried again with another attempt, at most `MAX_RETRIES` times."""
    same_seed: bool
    """It is made again with the same seed, at most `MAX_REMAKES` times, since nothing was wrong with it."""
    unfinished: bool
    """`reward.unfinished` is added."""


_CUT = StatusRule(rewarded=True, trained=True, may_succeed=True, retried=False, same_seed=False, unfinished=True)
_STOPPED = StatusRule(rewarded=False, trained=False, may_succeed=False, retried=False, same_seed=True, unfinished=False)

STATUS_RULES: Mapping[Status, StatusRule] = MappingProxyType(
    {
        "completed": StatusRule(
            rewarded=True, trained=True, may_succeed=True, retried=False, same_seed=False, unfinished=False
        ),
        "truncated": _CUT,
        "budget_exhausted": _CUT,
        "policy_failure": StatusRule(
            rewarded=True, trained=True, may_succeed=False, retried=False, same_seed=False, unfinished=True
        ),
        "environment_failure": StatusRule(
            rewarded=False, trained=False, may_succeed=False, retried=True, same_seed=False, unfinished=False
        ),
        "aborted": _STOPPED,
        "incomplete": _STOPPED,
    }
)
"""The table of what each status means; every status has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known when the run of a graph is over. The defaults are a graph that ended well."""

    error: BaseException | None = None
    """What the graph raised. None: it returned."""
    recursion: bool = False
    """LangGraph's recursion limit ended it."""
    stopped: str | None = None
    """Which budget the recorder found spent, in words. None: none was."""
    last_turn_cut: bool = False
    """The last trained turn was cut at its length, and the graph ended on it."""
    ended_on_unparsable: bool = False
    """The last trained turn held an unparsable call, bad arguments or a made-up tool, and the graph ended on it."""
    lost_calls: int = 0
    """Calls whose answer was lost."""
    stuck: bool = False
    """The graph did not return in time."""
    interrupted: bool = False
    """It waits for a human that nobody stands in for."""
    aborted: bool = False
    """It was stopped from outside."""
    n_trained_turns: int = 0


def status_of(ending: Ending) -> tuple[Status, str]:
    """The status, and its cause in words; the cause is empty when completed."""
    status, cause = _outside(ending) or _environment(ending) or _cut(ending) or _raised(ending) or ("completed", "")
    if ending.lost_calls and may_train(status):
        return "incomplete", f"the answers of {ending.lost_calls} model calls were lost"
    return status, cause


def may_train(status: Status) -> bool:
    """True when the rollout is trained and counts in its group's baseline."""
    return STATUS_RULES[status].trained


def may_succeed(status: Status) -> bool:
    """True when the rollout is a success if it passes."""
    return STATUS_RULES[status].may_succeed


def following(request: RolloutRequest, status: Status) -> RolloutRequest | None:
    """The request that a place gets after one that ended so. None: it stands.

    Example: after an environment failure attempt 1, with another seed; after a lost answer remake 1, with the same.
    """
    rule = STATUS_RULES[status]
    if rule.retried and request.attempt < MAX_RETRIES:
        return replace(request, attempt=request.attempt + 1, remake=0)
    if rule.same_seed and request.remake < MAX_REMAKES:
        return replace(request, remake=request.remake + 1)
    return None


def is_rewarded(status: Status) -> bool:
    """True when the verifiers are asked."""
    return STATUS_RULES[status].rewarded


def is_policy_failure(error: BaseException | None) -> bool:
    """True when PolicyFailure was raised, or stands behind what was raised.

    Errors of ours and RolloutStop are never the policy's, whatever was being handled when they came. Of a group every
    member must be a policy failure.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, PolicyFailure):
            return True
        if isinstance(error, AgenttrainError | RolloutStop):
            return False
        if isinstance(error, BaseExceptionGroup):
            return all(is_policy_failure(member) for member in error.exceptions)
        error = _behind(error)
    return False


def _behind(error: BaseException) -> BaseException | None:
    """The exception that another was raised from, or while handling."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _outside(ending: Ending) -> tuple[Status, str] | None:
    return ("aborted", f"stopped from outside{_after(ending)}") if ending.aborted else None


def _environment(ending: Ending) -> tuple[Status, str] | None:
    """What is no fault of the policy, whatever its last turn was: errors of ours, files, networks and time limits."""
    error = ending.error
    outside = isinstance(error, OSError) and ending.stopped is None and not is_policy_failure(error)
    if outside or isinstance(error, AgenttrainError):
        return "environment_failure", _in_words(ending)
    if ending.stuck:
        why = f": {ending.stopped}" if ending.stopped else ""
        return "environment_failure", f"the graph did not return in time{why}{_after(ending)}"
    return None


def _cut(ending: Ending) -> tuple[Status, str] | None:
    """A rollout that ran out of something, or that a tool called wrong."""
    if ending.stopped is not None:
        return "budget_exhausted", ending.stopped
    if ending.recursion:
        return "budget_exhausted", f"LangGraph's recursion limit was reached{_after(ending)}"
    if is_policy_failure(ending.error):
        return "policy_failure", _in_words(ending)
    if ending.last_turn_cut:
        return "truncated", "the last trained turn was cut at its length"
    return None


def _raised(ending: Ending) -> tuple[Status, str] | None:
    """A graph that ended on what the policy wrote, or on an exception."""
    if ending.ended_on_unparsable:
        return (
            "policy_failure",
            "the graph ended on a tool call that can't be read, that its tool refuses or that names no tool",
        )
    if ending.error is not None:
        return "environment_failure", _in_words(ending)
    if ending.interrupted:
        why = f"{WAITS_FOR_HUMAN}: add on_interrupt= to @trainable"
        return "environment_failure", f"{why}{_after(ending)}"
    return None


def _in_words(ending: Ending) -> str:
    """What was raised; where too, unless it is ours and says so itself."""
    error = ending.error
    place = "" if error is None or isinstance(error, AgenttrainError) else place_of_error(error)
    return f"{type(error).__name__}: {error}{place}{_after(ending)}"


def _after(ending: Ending) -> str:
    return f" (after {ending.n_trained_turns} turn{'' if ending.n_trained_turns == 1 else 's'})"
