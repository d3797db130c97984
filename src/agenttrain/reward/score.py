"""Verifiers and the last state become a Reward with its parts.

A verifier gets its arguments by name and answers with a finite number, or the rollout has no reward: an exception, a
time limit or a wrong result is a RewardError that names the verifier, never a score of 0. Only where a part is declared
with on_error="leave_out" it alone counts nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from agenttrain.error_place import place_of_error
from agenttrain.errors import PolicyFailure, RewardError, RolloutStop
from agenttrain.part import Part
from agenttrain.records import Credit, Reward, RewardPart, Task, Turn, TurnView
from agenttrain.reward.answer import answer_in
from agenttrain.reward.arguments import OF_RUNS, ask_for, bound, values_of
from agenttrain.reward.credit import credit_in, summed
from agenttrain.reward.langsmith import called, run_and_example
from agenttrain.reward.layers import failed, left_out, parts_of, reward_of, unjudged
from agenttrain.reward.time_limit import OutOfTime, Raised, in_time
from agenttrain.sandbox_protocol import Sandbox
from agenttrain.sandbox_spec import SandboxLimits

Verifiers = Mapping[str, Part]
"""Name to what it is in the reward."""


class VerifierPolicyFailure(PolicyFailure):
    """A verifier raised PolicyFailure: the policy did wrong, and `reward` has that verifier's part at 0."""

    def __init__(self, message: str, reward: Reward) -> None:
        super().__init__(message)
        self.reward = reward

    def __reduce__(self) -> tuple[type[VerifierPolicyFailure], tuple[str, Reward]]:
        return (type(self), (str(self), self.reward))


def score(
    verifiers: Verifiers,
    *,
    task: Task,
    state: Any,
    timeout_s: float | None,
    unfinished: float = 0.0,
    context: Any = None,
    sandbox: Sandbox | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    turns: Sequence[Turn] | None = None,
    views: Callable[[], Sequence[TurnView]] = tuple,
) -> Reward:
    """What the verifiers say, added up by their layers, with its parts, and what they say of nodes and turns.

    Args:
        verifiers: at least one, name to its Part. A function takes any of `arguments.ARGUMENTS` by name, two arguments
            of any other names, which get (task, state), or what a LangSmith evaluator takes. It may be async. All are
            asked, behind a closed gate too.
        task: what was worked on.
        state: the graph's last state.
        timeout_s: seconds each verifier may take. None: no limit.
        unfinished: added where the rollout was cut.
        context: the graph's runtime context. None: it had none.
        sandbox: the rollout's, settled. None: it had none.
        loop: running on another thread; async verifiers run there. None: each on a loop of its own.
        turns: what credit by turn is held against. None: not known, and any index is taken.
        views: gives what a verifier sees of the turns; called where one asks for them.

    Raises:
        RewardError: a verifier raised, ran past its time, answered with something that is no finite number, or
            credited what is no trained turn, and is not left out for it; or every outcome was left out.
        VerifierPolicyFailure: a verifier raised PolicyFailure; the others were asked all the same.
    """
    if not verifiers:
        raise RewardError(f"Task {task.id!r} can't be scored: there is no verifier. Add verifier=… to @trainable.")
    values = values_of(task, state, context) | {"sandbox": sandbox}
    values["turns"] = tuple(views()) if ask_for("turns", verifiers) else ()
    if any(ask_for(name, verifiers) for name in OF_RUNS):
        values |= run_and_example(task, state)
    parts: list[RewardPart] = []
    credits: list[Credit | None] = []
    failure: PolicyFailure | None = None
    for name, part in verifiers.items():
        try:
            with _place(part.function):
                answer = _answer(name, part.function, values, timeout_s, loop)
            said, credit = parts_of(name, part, answer_in(name, answer)), credit_in(name, part.weight, answer, turns)
        except PolicyFailure as raised:
            failure = failure or raised
            said, credit = [failed(name, part, str(raised))], None
        except RewardError as error:
            if part.on_error != "leave_out":
                raise
            said, credit = [left_out(name, part, str(error))], None
        parts += said
        credits.append(credit)
    if why := unjudged(parts, verifiers):
        raise RewardError(f"Nothing says whether task {task.id!r} was solved: every outcome was left out. {why}")
    reward = reward_of(parts, verifiers, credit=summed(credits), unfinished=unfinished)
    if failure is not None:
        raise VerifierPolicyFailure(str(failure), reward) from failure
    return reward


def check_verifiers(verifiers: Verifiers) -> None:
    """Refuse, before anything runs, a verifier whose arguments can't be filled.

    Raises:
        RewardError: naming the verifier and the argument.
    """
    for name, part in verifiers.items():
        bound(name, part.function)


def check_seconds(verifiers: Verifiers, *, timeout_s: float, limits: SandboxLimits) -> None:
    """Refuse, before anything runs, a verifier that may need more time than it has.

    An agent's code that hangs would make its own failure the verifier's, and so the environment's. A verifier tells
    what it needs by a function of the sandbox's limits under `most_seconds`; one that doesn't is not asked.

    Raises:
        RewardError: naming the verifier, and the limit that it needs.
    """
    for name, part in verifiers.items():
        most_seconds = getattr(part.function, "most_seconds", None)
        if most_seconds is not None and (needed := most_seconds(limits)) > timeout_s:
            raise RewardError(
                f"Verifier {name!r} may take {needed:g} s where the agent's code hangs, and limits.verifier_seconds is "
                f"{timeout_s:g}: it would count as the environment's failure. Set limits.verifier_seconds={needed:g}, "
                "or give it less time: seconds=…, or SandboxLimits(seconds=…)."
            )


_PLACES = threading.BoundedSemaphore(max(2, len(os.sched_getaffinity(0))))
"""Of verifiers that run programs, for this process: more at once would wait for the processor on their own time, and
the programs of an agent that is right would be ended by their limit."""


def _place(verifier: Callable[..., Any]) -> AbstractContextManager[Any]:
    """What a verifier has to hold while it is asked; waiting for it is not on its time."""
    return _PLACES if hasattr(verifier, "most_seconds") else nullcontext()


def _answer(
    name: str,
    verifier: Callable[..., Any],
    values: Mapping[str, Any],
    timeout_s: float | None,
    loop: asyncio.AbstractEventLoop | None,
) -> Any:
    """What a verifier answers in its time; anything but PolicyFailure is attributed to it by name."""
    binding, task = bound(name, verifier), values["task"]
    args = [values[key] for key in binding.by_position]
    call = functools.partial(called(verifier), *args, **{key: values[key] for key in binding.by_keyword})
    try:
        return in_time(call, timeout_s, loop=loop)
    except (PolicyFailure, RolloutStop):
        raise
    except OutOfTime:
        raise RewardError(
            f"Verifier {name!r} took more than {timeout_s:g} s on task {task.id!r}. Make it faster, or raise its limit."
        ) from None
    except Raised as raised:
        error = raised.error
        if isinstance(error, RewardError):  # of a verifier that comes with agenttrain: it says what to do
            raise RewardError(f"Verifier {name!r} can't score task {task.id!r}: {error}") from error
        raise RewardError(
            f"Verifier {name!r} raised {type(error).__name__} on task {task.id!r}: {error}{place_of_error(error)}. "
            "Handle it in the verifier; raise PolicyFailure when the policy itself did wrong."
        ) from error
