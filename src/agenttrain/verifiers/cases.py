"""hidden_cases: the agent's functions are called in a sandbox of their own; what they answer is compared here.

Only calls and arguments go in, and JSON comes out. Expected values never leave this process, so nothing the agent's
code can do to its own process (forge a report, leave early, replace what compares) tells it what would be right.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from agenttrain.errors import RewardError
from agenttrain.records import Task
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxRefusal
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.verifiers.judging import (
    MAX_OUTPUT,
    Check,
    HiddenContent,
    answer,
    end_of,
    environment,
    given_sandbox,
    harness_files,
    judging_sandbox,
    listed,
    named,
    program_argv,
    submission_in,
)
from agenttrain.verifiers.submission import JUDGE_FOLDER

NAME = "hidden_cases"
RESULTS = f"{JUDGE_FOLDER}/results.jsonl"
MAX_RESULT_BYTES = 8 << 20
"""Of all results of one process; more is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call and what must come of it."""

    index: int
    call: str
    """"module:function"."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    raises: str = ""
    """Name of the exception's type, or of one that it derives from. Empty: it must return `expected`."""

    @property
    def module(self) -> str:
        return self.call.partition(":")[0]

    @property
    def name(self) -> str:
        """The call as people would write it."""
        given = [_short(each) for each in self.args] + [f"{key}={_short(each)}" for key, each in self.kwargs.items()]
        return f"{self.call}({', '.join(given)})"


def hidden_cases(
    *,
    include: Sequence[str] = ("*.py",),
    cases: Callable[[Task], Sequence[Mapping[str, Any]]] | None = None,
    strict: bool = True,
    seconds: float = 10.0,
    case_seconds: float = 2.0,
    tolerance: float = 1e-9,
    roots: Sequence[str] = (".",),
    process_per_case: bool = False,
    limits: SandboxLimits | None = None,
) -> Callable[..., dict[str, Any]]:
    """A verifier that calls the agent's functions and compares what they return with what it alone knows.

    A result is compared by JSON's types: true is not 1, "1" is not 1, a tuple counts as an array. An expected integer
    must come as one; an expected float may come as either, within the tolerance. A coroutine is awaited.

    Args:
        include: patterns of the files that are the agent's to change (see docs/hidden-tests.md).
        cases: gives a task's cases: {"call": "module:function", "args": […], "kwargs": {…}, and either "expected":
            value or "raises": "ValueError"}. None: reference["cases"] of the task.
        strict: the score is 1 only if all pass; else it is the share that pass.
        seconds: for all cases together, whatever the number of processes that they need.
        case_seconds: for one case, unless its code takes the alarm away.
        tolerance: of floats, relative and absolute.
        roots: folders that modules are imported from.
        process_per_case: each case in a process of its own, so that no state is carried over; about 30 ms a case.
        limits: of the judging sandbox. None: the agent's own.

    Raises:
        ConfigError: a text where a list is expected.
        RewardError: a tolerance or seconds that can't be.
    """
    listed(NAME, include=include, roots=roots)
    if not (math.isfinite(tolerance) and tolerance >= 0 and case_seconds > 0):
        raise RewardError(
            f"{NAME} got tolerance={tolerance!r} and case_seconds={case_seconds!r}. Give numbers above 0."
        )

    def hidden_cases_pass(task: Task, sandbox: Sandbox | None) -> dict[str, Any]:
        own, asked = given_sandbox(sandbox, NAME), cases_of(task, cases)
        with environment(NAME):
            submission = submission_in(own, include, {})
            programs = harness_files("cases")
            with judging_sandbox(own, submission, programs, limits=limits) as (place, submission):
                trial = _Trial(place=place, seconds=seconds, case_seconds=case_seconds, roots=tuple(roots))
                groups = [[case] for case in asked] if process_per_case else _by_module(asked)
                for group in groups:
                    trial.ask(group)
        checks = [_check(case, trial.came.get(case.index), tolerance) for case in asked]
        return answer(checks, submission, strict=strict, exit_code=trial.exit_code, output=trial.output)

    hidden = HiddenContent(of=lambda task: {"cases": _text(cases(task))}, by_task=True) if cases is not None else None
    return named(hidden_cases_pass, NAME, limits=limits, agent_seconds=lambda limits: seconds, hidden=hidden)


def cases_of(task: Task, cases: Callable[[Task], Sequence[Mapping[str, Any]]] | None) -> list[Case]:
    """A task's cases, read and checked.

    Raises:
        RewardError: there are none, or one can't be used.
    """
    reference = task.reference
    rows = cases(task) if cases is not None else reference.get("cases") if isinstance(reference, Mapping) else None
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise RewardError(
            f'{NAME} found no cases for task {task.id!r}. Give {{"cases": [{{"call": "module:function", "args": [1], '
            '"expected": 2}]} as its reference, or hidden_cases(cases=lambda task: …).'
        )
    return [_case(row, index, task) for index, row in enumerate(rows)]


def _text(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The same for the same cases; what is no JSON goes by its type."""
    return json.dumps(rows, sort_keys=True, default=lambda value: type(value).__qualname__).encode()


def is_same(expected: Any, seen: Any, tolerance: float) -> bool:
    """Whether a value that came out is the expected one, by JSON's types.

    Example: 1.0 and 1 are the same, 1 and 1.0 are not, and true is neither.
    """
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(expected) is type(seen) and expected == seen
    if isinstance(expected, int):
        return type(seen) is int and expected == seen
    if isinstance(expected, float):
        return type(seen) in (int, float) and _is_close(expected, seen, tolerance)
    if isinstance(expected, Mapping):
        return (
            isinstance(seen, dict)
            and expected.keys() == seen.keys()
            and all(is_same(value, seen[key], tolerance) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(seen, list)
            and len(expected) == len(seen)
            and all(is_same(one, other, tolerance) for one, other in zip(expected, seen, strict=True))
        )
    return False


@dataclass(slots=True, kw_only=True)
class _Trial:
    """Cases asked of the agent's code in one judging sandbox, in as few processes as it lets them be."""

    place: Sandbox
    seconds: float
    case_seconds: float
    roots: tuple[str, ...]
    came: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Case index to what came out; {"ended"} where its process ended first."""
    exit_code: int | None = None
    """Of the last process."""
    output: str = ""
    _n_read: int = 0
    _n_runs: int = 0
    _started: float = field(default_factory=time.monotonic)

    def ask(self, cases: Sequence[Case]) -> None:
        """Ask until each case has an outcome: one that ends its process has had its turn, and others get a new one."""
        left = list(cases)
        while left:
            seconds = self._seconds_left()
            if seconds <= 0:
                self.came.update({case.index: {"ended": "there was no time left for it"} for case in left})
                return
            end = self._run(left, seconds)
            begun = self._read({case.index for case in left})
            lost = [case for case in left if case.index not in self.came]
            if not lost:
                return
            last = lost if begun is None else [case for case in lost if case.index == begun] or lost
            self.came.update({case.index: {"ended": end} for case in last})
            left = [case for case in lost if case.index not in self.came]
            self.place.settle()

    def _run(self, cases: Sequence[Case], seconds: float) -> str:
        given = {
            "results": RESULTS,
            "roots": self.roots,
            "seconds": self.case_seconds,
            "cases": [
                {"index": case.index, "call": case.call, "args": case.args, "kwargs": case.kwargs} for case in cases
            ],
        }
        try:
            execution = self.place.run(program_argv("cases"), stdin=json.dumps(given), seconds=seconds)
        except SandboxRefusal as refusal:
            if not self._n_runs:
                raise
            return f"it could not be asked any more: {refusal}"  # what the agent's code did to its sandbox
        self._n_runs += 1
        self.exit_code, self.output = execution.exit_code, (self.output + execution.text)[-MAX_OUTPUT:]
        return self._end(execution)

    def _end(self, execution: Execution) -> str:
        if execution.exit_code == -14:  # SIGALRM
            return f"it took more than {self.case_seconds:g} s"
        return f"the process {end_of(execution)} before it was done"

    def _read(self, asked: set[int]) -> int | None:
        """Take in what the process wrote; gives the case that it said it began last."""
        begun = None
        for line in self._lines():
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(said, dict):
                continue
            if type(said.get("begin")) is int and said["begin"] in asked:
                begun = said["begin"]
            elif type(said.get("index")) is int and said["index"] in asked:
                self.came[said["index"]] = said
        return begun

    def _lines(self) -> list[bytes]:
        try:
            data = self.place.read_bytes(RESULTS)
        except SandboxRefusal:  # the agent's code may have removed it
            return []
        new, self._n_read = data[self._n_read :], len(data)
        return new.split(b"\n") if len(new) <= MAX_RESULT_BYTES else []

    def _seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self._started)


def _check(case: Case, came: Mapping[str, Any] | None, tolerance: float) -> Check:
    try:
        reason = _reason(case, came or {}, tolerance)
    except (RecursionError, ValueError):  # what came was read, and is too deep or too long to be written down
        reason = "what came of it can't be written down"
    return Check(name=case.name, passed=not reason, reason=reason)


def _reason(case: Case, came: Mapping[str, Any], tolerance: float) -> str:
    """Why a case fails; empty: it passes."""
    for key in ("ended", "missing", "unusable"):
        if key in came:
            return str(came[key])
    wanted = f"raises {case.raises}" if case.raises else _short(case.expected)
    if "raises" in came:
        kinds = came["raises"] if isinstance(came["raises"], list) else []
        is_right = bool(case.raises) and case.raises in kinds
        return "" if is_right else f"expected {wanted}, and it raised {came.get('message')}"
    if "value" not in came:
        return "nothing came of it"
    if not case.raises and is_same(case.expected, came["value"], tolerance):
        return ""
    return f"expected {wanted}, got {_short(came['value'])}"


def _case(row: Any, index: int, task: Task) -> Case:
    where = f"Case {index} of task {task.id!r}"
    if not isinstance(row, Mapping) or not isinstance(row.get("call"), str) or row["call"].count(":") != 1:
        raise RewardError(f'{where} is {_short(row)}. Give a "call" such as "module:function".')
    if ("expected" in row) == ("raises" in row):
        raise RewardError(f'{where} must have either "expected" or "raises".')
    unknown = sorted(set(row) - {"call", "args", "kwargs", "expected", "raises"})
    args, kwargs = row.get("args", []), row.get("kwargs", {})
    if unknown or not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise RewardError(f'{where} has {unknown or "unusable arguments"}. "args" is a list, "kwargs" a mapping.')
    if "raises" in row and not (isinstance(row["raises"], str) and row["raises"]):
        raise RewardError(f'{where} has raises={row["raises"]!r}. Give the name of an exception, such as "ValueError".')
    try:
        json.dumps([args, kwargs, row.get("expected")])
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} holds what is no JSON: {error}. Give plain values.") from error
    return Case(
        index=index,
        call=row["call"],
        args=args,
        kwargs=kwargs,
        expected=row.get("expected"),
        raises=row.get("raises", ""),
    )


def _by_module(cases: Sequence[Case]) -> list[list[Case]]:
    ordered = sorted(cases, key=lambda case: case.module)
    return [list(group) for _, group in groupby(ordered, key=lambda case: case.module)]


def _is_close(expected: float, seen: float, tolerance: float) -> bool:
    if math.isnan(expected):
        return math.isnan(seen)
    try:
        return math.isclose(expected, seen, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer too large for a float
        return False


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
