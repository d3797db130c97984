"""The last state and the task's reference become 1 or 0: the same text, the same number, the JSON that was asked for.

Strict: what can't be read is wrong, and the comment says what was read. A wrong reference or setting is an error, since
it says nothing of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenttrain.errors import ConfigError
from agenttrain.records import Task
from agenttrain.verifiers.equality import same, shown
from agenttrain.verifiers.final_state import Reference, Where, answer_in, check_where, of_task
from agenttrain.verifiers.json_text import json_in
from agenttrain.verifiers.numbers import NumberForm, number_of_reference

Verdict = dict[str, Any]
MOST_ERRORS = 20
"""Of a schema, that are told."""


def exact_answer(
    *, where: Where = None, normalise: Callable[[str], str] = str.strip, reference: Reference = of_task
) -> Callable[[Task, Any], Verdict]:
    """A verifier: 1 where the answer is the reference.

    A text is compared after `normalise`, which both go through; other values by JSON's types (true is not 1). Where the
    reference is a list and the answer a text, any text of the list will do.

    Args:
        where: the answer stands in the state. None: the last message, where it is the assistant's.
        normalise: what does not matter in a text, such as `str.casefold`.
        reference: gives what is expected of a task. Default: its reference.

    Raises:
        ConfigError: `where` names no place.

    Example: reference "Paris", normalise=lambda text: text.strip().casefold(): "paris " -> 1, "Paris, France" -> 0
    """
    check_where(where, "exact_answer")

    def exact_answer(task: Task, state: Any) -> Verdict:
        expected, answer = reference(task), answer_in(state, where)
        if isinstance(answer, str) and isinstance(expected, list | tuple):
            right = normalise(answer) in [normalise(each) for each in expected if isinstance(each, str)]
        elif isinstance(answer, str) and isinstance(expected, str):
            right = normalise(answer) == normalise(expected)
        else:
            right = answer is not None and same(answer, expected)
        return _verdict(right, f"answered {shown(answer)}, expected {shown(expected)}")

    return exact_answer


def numeric_answer(
    *,
    tolerance: float = 0.0,
    relative: float = 0.0,
    where: Where = None,
    pattern: str | None = None,
    units: Sequence[str] = (),
    thousands: str | None = None,
    reference: Reference = of_task,
) -> Callable[[Task, Any], Verdict]:
    """A verifier: 1 where the number that the answer states is the reference, within the tolerance.

    Of a text the last number counts, whole: "17" is not 7, and a last number that can't be read ("3/4", "12:30", "2nd",
    "50%" without that unit, "1,234" without `thousands`) is a wrong answer, not the number before it. A number in the
    state itself is taken as it is.

    Args:
        tolerance: largest distance from the reference, in its units.
        relative: the same as a share of the reference; the larger of the two holds.
        where: the answer stands in the state. None: the last message, where it is the assistant's.
        pattern: a regular expression with one group, which holds the number: its last match counts instead. No match is
            a wrong answer.
        units: names and signs of which one must stand right before or behind the number: ("km",), ("$", "USD").
        thousands: what may stand between groups of three digits: ",", "_", "'" or " "; never needed.
        reference: gives what is expected of a task. Default: its reference.

    Raises:
        ConfigError: a tolerance that is negative or not finite, a pattern without one group, another separator.

    Example: reference 1234: "So 5 trips, 1234 km." -> 1; "1,234" -> 0, with thousands="," -> 1; "12345" -> 0
    """
    check_where(where, "numeric_answer")
    form = NumberForm.of(pattern=pattern, units=units, thousands=thousands)
    for name, value in (("tolerance", tolerance), ("relative", relative)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"numeric_answer got {name}={value!r}, and a finite number of at least 0 is expected.")

    def numeric_answer(task: Task, state: Any) -> Verdict:
        expected, answer = number_of_reference(task.id, reference(task), form), answer_in(state, where)
        found, said = form.number_in(answer)
        if found is None:
            return _verdict(False, f"no number: {said}; expected {shown(reference(task))}")
        room = max(form.exact(tolerance), form.exact(relative) * abs(expected))
        return _verdict(abs(found - expected) <= room, f"answered {said}, expected {shown(reference(task))}")

    return numeric_answer


def json_answer(
    *, schema: Mapping[str, Any] | None = None, reference: Reference | None = of_task, where: Where = None
) -> Callable[[Task, Any], Verdict]:
    """A verifier: 1 where the answer is JSON that fits the schema and equals the reference.

    A text must be JSON as a whole: no words around it, no key twice, no NaN. A value in the state is taken as it is; a
    pydantic model by its fields.

    Args:
        schema: JSON Schema. None: any JSON.
        reference: gives what is expected of a task. Default: its reference. None: the schema alone is asked, as for a
            gate of kind "format".
        where: the answer stands in the state. None: the last message, where it is the assistant's.

    Raises:
        ConfigError: neither a schema nor a reference, or a schema that is none.
    """
    check_where(where, "json_answer")
    if schema is None and reference is None:
        raise ConfigError("json_answer got neither schema= nor reference=, and accepts anything. Give one of the two.")
    faults = _schema_faults(schema) if schema is not None else _no_faults

    def json_answer(task: Task, state: Any) -> Verdict:
        answer, unreadable = json_in(answer_in(state, where))
        if unreadable:
            return _verdict(False, unreadable, [_check("json", False, unreadable)])
        try:
            checks = [_check("json", True), *faults(answer)]
            if reference is not None:
                expected = reference(task)
                right = same(answer, expected)
                why = "" if right else f"answered {shown(answer)}, expected {shown(expected)}"
                checks.append(_check("reference", right, why))
        except RecursionError:
            return _verdict(False, "nested too deep", [_check("json", False, "nested too deep")])
        wrong = [check for check in checks if not check["passed"]]
        return _verdict(not wrong, "; ".join(f"{each['name']}: {each['reason']}" for each in wrong[:3]), checks)

    return json_answer


def _schema_faults(schema: Mapping[str, Any]) -> Callable[[Any], list[Verdict]]:
    """What of an answer doesn't fit the schema, as checks."""
    import referencing
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"json_answer got a schema that is none, at {error.json_path}: {error.message}.") from error
    registry: Any = referencing.Registry()  # empty: jsonschema 4.26 would fetch a $ref from the network

    def faults(answer: Any) -> list[Verdict]:
        validator = kind(schema, registry=registry)  # here, so that the verifier's hash is of the schema
        try:
            errors = [error for _, error in zip(range(MOST_ERRORS), validator.iter_errors(answer), strict=False)]
        except (OverflowError, ValueError) as error:  # jsonschema 4.26 on a number of the state that is not finite
            return [_check("schema", False, f"it can't be held against the schema: {error}")]
        found = [_check(f"schema {error.json_path}", False, error.message) for error in errors]
        return found or [_check("schema", True)]

    return faults


def _no_faults(answer: Any) -> list[Verdict]:
    return []


def _check(name: str, passed: bool, reason: str = "") -> Verdict:
    return {"name": name, "passed": passed, "reason": reason}


def _verdict(right: bool, comment: str, checks: Sequence[Verdict] = ()) -> Verdict:
    """The comment only where it was wrong, or where there are no checks that say it."""
    verdict: Verdict = {"score": float(right), "comment": comment}
    return verdict | {"evidence": {"checks": list(checks)}} if checks else verdict
