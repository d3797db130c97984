"""Verifiers and the last state become a Reward with its parts.

A verifier gets its arguments by name and answers with a finite number, or the rollout has no reward: an exception, a
time limit or a wrong result is a RewardError that names the verifier, never a score of 0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.error_place import place_of_error
from agenttrain.errors import PolicyFailure, RewardError, RolloutStop
from agenttrain.records import Credit, Reward, RewardPart, Task, Turn, TurnView
from agenttrain.reward.credit import credit_in, summed
from agenttrain.reward.time_limit import OutOfTime, Raised, in_time
from agenttrain.sandbox_protocol import Sandbox

ARGUMENTS = ("task", "state", "context", "turns", "sandbox", "inputs", "outputs", "reference_outputs", "reference")
"""The names a verifier may ask for; `context` is what the graph had as its runtime context, `turns` a TurnView of each
model call, `sandbox` the rollout's, in which nothing runs any more, and the later ones are LangSmith's, for input, last
state and reference."""
SUCCESS_SUFFIX = ".success"
"""A verifier that decides success itself leaves a second part under its name and this, of weight 0 and score 0 or 1."""

Verifiers = Mapping[str, tuple[Callable[..., Any], float]]
"""Name to (function, weight)."""


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
    """The weighted sum of what the verifiers say, with its parts, and what they say of nodes and turns.

    Args:
        verifiers: at least one, name to (function, weight). A function takes any of `ARGUMENTS` by name, or two
            arguments of any other names, which get (task, state). It may be async.
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
            credited what is no trained turn.
        VerifierPolicyFailure: a verifier raised PolicyFailure; the others were asked all the same.
    """
    if not verifiers:
        raise RewardError(f"Task {task.id!r} can't be scored: there is no verifier. Add verifier=… to @trainable.")
    views_of_turns = tuple(views()) if _ask_for_turns(verifiers) else ()
    values = _values(task, state, context) | {"sandbox": sandbox, "turns": views_of_turns}
    parts: list[RewardPart] = []
    credits: list[Credit | None] = []
    failure: PolicyFailure | None = None
    for name, (verifier, weight) in verifiers.items():
        try:
            answer = _answer(name, verifier, values, timeout_s, loop)
            parts += _parts(name, weight, answer)
            credits.append(credit_in(name, weight, answer, turns))
        except PolicyFailure as raised:
            failure = failure or raised
            parts.append(RewardPart(name=name, score=0.0, weight=weight, comment=f"PolicyFailure: {raised}"))
    reward = with_unfinished(Reward(score=0.0, parts=tuple(parts), credit=summed(credits)), unfinished)
    if failure is not None:
        raise VerifierPolicyFailure(str(failure), reward) from failure
    return reward


def with_unfinished(reward: Reward, unfinished: float) -> Reward:
    """The same parts, with this much added for being cut."""
    total = sum(part.weight * part.score for part in reward.parts)
    return replace(reward, score=total + unfinished, unfinished=unfinished)


def passes(reward: Reward) -> bool:
    """True when every verifier gave full marks; `unfinished` doesn't count.

    A verifier that answered {"success": …} has decided for itself. Of the others the weighted sum of scores, each at
    most 1, must reach the sum of the positive weights; so a single 0/1 verifier passes at 1, and weight 0 only informs.
    Without a decision and without a positive weight nothing passes.
    """
    decided = {part.name.removesuffix(SUCCESS_SUFFIX): part.score for part in reward.parts if _is_decision(part)}
    scored = [part for part in reward.parts if not _is_decision(part) and part.name not in decided]
    full = sum(part.weight for part in scored if part.weight > 0)
    if not decided and full == 0:
        return False
    reached = sum(part.weight * min(part.score, 1.0) for part in scored)
    return all(decided.values()) and reached >= full - 1e-9


def check_verifiers(verifiers: Verifiers) -> None:
    """Refuse, before anything runs, a verifier whose arguments can't be filled.

    Raises:
        RewardError: naming the verifier and the argument.
    """
    for name, (verifier, _) in verifiers.items():
        _bound(name, verifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How one function is called: names passed by position, then names passed by keyword."""

    by_position: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()
    refused: str | None = None
    """Name of an argument that nothing fills. None: callable."""


TASK_AND_STATE = Binding(by_position=("task", "state"))


def binding_of(function: Callable[..., Any]) -> Binding:
    """How a verifier is called, read from its signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return TASK_AND_STATE
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = [p for p in named if p.name in ARGUMENTS]
    unknown = [p for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    if unknown:
        return TASK_AND_STATE if _is_task_and_state(named) else Binding(refused=unknown[0].name)
    if not known and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Binding(by_keyword=ARGUMENTS)
    if not known and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return TASK_AND_STATE
    return Binding(
        by_position=tuple(p.name for p in known if p.kind is p.POSITIONAL_ONLY),
        by_keyword=tuple(p.name for p in known if p.kind is not p.POSITIONAL_ONLY),
    )


def _is_task_and_state(named: list[inspect.Parameter]) -> bool:
    """True when exactly two positional arguments are required and no name of ours stands in another's place."""
    required = [p for p in named if p.default is p.empty]
    if len(required) != 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        return False
    return all(p.name == own or p.name not in ARGUMENTS for p, own in zip(required, ("task", "state"), strict=True))


_cached_binding = functools.lru_cache(maxsize=256)(binding_of)


def _bound(name: str, verifier: Callable[..., Any]) -> Binding:
    """The binding of a verifier, read once.

    Raises:
        RewardError: an argument that nothing fills.
    """
    try:
        binding = _cached_binding(verifier)
    except TypeError:  # an instance that can't be hashed
        binding = binding_of(verifier)
    if binding.refused is not None:
        raise RewardError(
            f"Verifier {name!r} asks for {binding.refused!r}, which nothing fills. A verifier takes any of "
            f"{', '.join(ARGUMENTS)}, or two arguments for (task, state)."
        )
    return binding


def _ask_for_turns(verifiers: Verifiers) -> bool:
    bindings = [_bound(name, verifier) for name, (verifier, _) in verifiers.items()]
    return any("turns" in (*binding.by_position, *binding.by_keyword) for binding in bindings)


def _values(task: Task, state: Any, context: Any) -> dict[str, Any]:
    """What a verifier may ask for, by name."""
    return {
        "task": task,
        "state": state,
        "context": context,
        "inputs": task.input,
        "outputs": state,
        "reference_outputs": task.reference,
        "reference": task.reference,
    }


def _answer(
    name: str,
    verifier: Callable[..., Any],
    values: Mapping[str, Any],
    timeout_s: float | None,
    loop: asyncio.AbstractEventLoop | None,
) -> Any:
    """What a verifier answers in its time; anything but PolicyFailure is attributed to it by name."""
    binding, task = _bound(name, verifier), values["task"]
    args = [values[key] for key in binding.by_position]
    call = functools.partial(verifier, *args, **{key: values[key] for key in binding.by_keyword})
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
        raise RewardError(
            f"Verifier {name!r} raised {type(error).__name__} on task {task.id!r}: {error}{place_of_error(error)}. "
            "Handle it in the verifier; raise PolicyFailure when the policy itself did wrong."
        ) from error


def _parts(name: str, weight: float, result: Any) -> list[RewardPart]:
    """The parts that one verifier's answer gives: its score, and its decision on success if it made one."""
    value, comment, success = _read(result)
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise RewardError(
            f"Verifier {name!r} answered {_short(result)}. Answer with a bool, a finite number, or "
            '{"score": number, "comment": text}; raise an exception when nothing can be said.'
        )
    parts = [RewardPart(name=name, score=number, weight=weight, comment=comment)]
    if success is not None:
        if _number(success) not in (0.0, 1.0):
            raise RewardError(f'Verifier {name!r} answered {_short(result)}. Its "success" must be true or false.')
        parts.append(RewardPart(name=name + SUCCESS_SUFFIX, score=float(bool(success)), weight=0.0))
    return parts


def _read(result: Any) -> tuple[Any, str, Any]:
    """(score, comment, success) of a plain value, a mapping, or an object like LangSmith's EvaluationResult."""
    if isinstance(result, Mapping):
        return result.get("score"), str(result.get("comment") or ""), result.get("success")
    if hasattr(result, "score"):
        return result.score, str(getattr(result, "comment", None) or ""), getattr(result, "success", None)
    return result, "", None


def _number(value: Any) -> float | None:
    """A bool, a real number, or an array's single number as a float; None for anything else."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf


def _is_decision(part: RewardPart) -> bool:
    return part.weight == 0 and part.name.endswith(SUCCESS_SUFFIX)


def _short(result: Any) -> str:
    text = repr(result)
    return text if len(text) <= 200 else f"{text[:200]}…"
