"""hidden_tests: pytest with tests that are put in after the agent has finished.

Every expected test must be reported as passed through a channel that is not the output; an exit code alone says
nothing. A suite that can't run whatever the agent wrote is the environment's failure; code that can't be imported is
the agent's.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.errors import RewardError
from agenttrain.records import Task
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxFile, SandboxRefusal
from agenttrain.sandbox_spec import SandboxLimits
from agenttrain.verifiers.judging import (
    Check,
    HiddenFiles,
    HiddenFolder,
    answer,
    content_of,
    end_of,
    environment,
    folder_of_caller,
    given_sandbox,
    harness_files,
    hidden_files,
    judging_sandbox,
    listed,
    named,
    program_argv,
    submission_in,
)
from agenttrain.verifiers.relay import END_S, WIRE, Relay
from agenttrain.verifiers.submission import JUDGE_FOLDER, TEST_FILES, Submission, laid_over

NAME = "hidden_tests"
RESULTS = f"{JUDGE_FOLDER}/results.json"
INI = f"{JUDGE_FOLDER}/pytest.ini"
PROGRAMS = ("tests", "guard", "proxies", "wire")
SNAPSHOT_S = 10.0
"""To look, after the agent's code ran beside them, whether the hidden files are what they were."""
MAX_COLLECTIONS = 256
"""Suites whose test ids are remembered."""


def hidden_tests(
    *,
    files: HiddenFiles | None = None,
    folder: HiddenFolder | None = None,
    include: Sequence[str] = ("*.py",),
    apart: bool = True,
    expected: Sequence[str] | None = None,
    modules: Sequence[str] = (),
    roots: Sequence[str] = (".",),
    options: Sequence[str] = (),
    strict: bool = True,
    seconds: float | None = None,
    call_seconds: float = 5.0,
    limits: SandboxLimits | None = None,
) -> Callable[..., dict[str, Any]]:
    """A verifier that runs hidden pytest tests on what the agent left.

    Apart (the default), the tests run in one sandbox and the agent's code in another. A test imports the agent's
    modules as always; what it gets is asked for over there. Plain data crosses by value: None, bool, int, float, str,
    bytes, complex, list, tuple, dict, set, frozenset, deque, range, Decimal, Fraction, dates and times, built-in types
    and exceptions. Any other object stays there behind a handle: attributes, calls, iteration, len, bool, str, repr,
    indexing, arithmetic, `with`, assignment, and isinstance of the agent's classes are forwarded. Functions of the
    test's may be given and are called here; a list, dict, set or bytearray that a call changes is changed here too, as
    in one process. What the agent's code prints is printed here. No value that a result is held against is judged over
    there: a handle is never equal to plain data (a named tuple or IntEnum compares by the plain value that it is), `<`
    between them raises, and `in` compares the elements here. Between two of the agent's own objects `==`, `<` and `in`
    are the agent's word: compare plain data where it matters. Not forwarded: coroutines, derived classes, objects of
    the test's own classes, files of tmp_path, type(x), replacing methods by monkeypatch.

    In one process (apart=False), all of Python works and the agent's code may do what the tests may. The ids that must
    pass are collected beforehand from the initial files; audit hooks and a comparison of pytest's own functions report
    what touches pytest, frames, or memory, and such a rollout scores 0. Code that is made to forge can still: an object
    whose `__eq__` is always true passes `==`, and native code can write pytest's memory unseen.

    Args:
        files: path to content of the hidden files, or a function of the task that gives them.
        folder: of the hidden files, relative to the file that calls this, or a function of the task.
        include: patterns of the files that are the agent's to change (see docs/hidden-tests.md).
        apart: whether the agent's code stays out of the tests' process.
        expected: ids of the tests that must pass, such as "tests/test_a.py::test_b". None: all that pytest collects.
        modules: top-level modules that the agent is to write; those of the initial files are known.
        roots: folders that modules are imported from.
        options: of pytest, such as ["-p", "no:randomly"].
        strict: the score is 1 only if all pass; else it is the share that pass.
        seconds: for the whole suite. None: the sandbox's own limit.
        call_seconds: for one answer of the agent's code, apart.
        limits: of the judging sandboxes. None: the agent's own.

    Raises:
        ConfigError: a text where a list is expected.
    """
    listed(NAME, include=include, expected=expected, modules=modules, roots=roots, options=options)
    suite = Suite(
        include=tuple(include),
        expected=None if expected is None else tuple(expected),
        modules=tuple(modules),
        roots=tuple(roots),
        options=tuple(options),
        strict=strict,
        seconds=seconds,
        call_seconds=call_seconds,
        limits=limits,
    )
    judged = suite.judged_apart if apart else suite.judged_together
    base = folder_of_caller()

    def hidden_tests_pass(task: Task, sandbox: Sandbox | None) -> dict[str, Any]:
        own = given_sandbox(sandbox, NAME)
        hidden = hidden_files(files, folder, task, base=base, verifier=NAME)
        names = names_of_tests(hidden)
        with environment(NAME):
            submission = submission_in(own, suite.include, hidden)
            return judged(own, submission, hidden, names)

    def agent_seconds(limits: SandboxLimits) -> float:
        of_suite = limits.seconds if seconds is None else min(seconds, limits.seconds)
        return of_suite + (END_S if apart else of_suite + SNAPSHOT_S)

    hidden = content_of(files, folder, base=base, verifier=NAME)
    return named(hidden_tests_pass, NAME, limits=limits, agent_seconds=agent_seconds, hidden=hidden)


def names_of_tests(hidden: Mapping[str, SandboxFile]) -> dict[str, list[str]]:
    """Test file to the ids of its tests, as far as its text tells them: without parameters.

    Raises:
        RewardError: there is no test file, or one that is no Python.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(hidden):
        if any(fnmatch.fnmatch(path.rsplit("/", 1)[-1], pattern) for pattern in TEST_FILES):
            found[path] = _names_in(path, hidden[path].data)
    if not found:
        raise RewardError(f"{NAME} got no test file among {sorted(hidden)}. Name one test_….py.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What pytest's process wrote."""

    execution: Execution
    written: Mapping[str, Any]
    """Empty: nothing that can be trusted was written."""

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Of collection."""
        return list(self.written.get("errors", ()))

    def end(self) -> str:
        """How the process ended before pytest was through, in words."""
        return f"the process {end_of(self.execution)} before pytest was through"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """How hidden tests are run."""

    include: tuple[str, ...]
    expected: tuple[str, ...] | None
    modules: tuple[str, ...]
    roots: tuple[str, ...]
    options: tuple[str, ...]
    strict: bool
    seconds: float | None
    call_seconds: float
    limits: SandboxLimits | None
    _ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Hash of initial and hidden files to the ids that pytest collects of them."""

    def judged_apart(
        self, own: Sandbox, submission: Submission, hidden: Mapping[str, SandboxFile], names: Mapping[str, list[str]]
    ) -> dict[str, Any]:
        """The answer where tests and agent are in two sandboxes."""
        under_test = self._modules(own.initial)
        tests = laid_over(_without(own.initial, under_test, self.roots), hidden)
        worker = harness_files("worker", "wire")
        given = self._given(hidden, names, apart=sorted(under_test))
        with (
            own.fresh({**tests, **self._harness()}, limits=self.limits) as ours,
            judging_sandbox(own, submission, worker, limits=self.limits) as (theirs, submission),
        ):
            relay = Relay(tests=ours, agents=theirs, roots=self.roots, call_seconds=self.call_seconds)
            execution = relay.run(given, seconds=self.seconds)
            results = _results(ours, execution, given["nonce"])
        self._refuse_broken(results, under_test, hidden)
        ids = self.expected or results.written.get("ids") or ()
        return self._answer(results, submission, _complete(ids, names))

    def judged_together(
        self, own: Sandbox, submission: Submission, hidden: Mapping[str, SandboxFile], names: Mapping[str, list[str]]
    ) -> dict[str, Any]:
        """The answer where the agent's code is in pytest's process."""
        ids = self.expected or self._collected(own, hidden, names)
        given = self._given(hidden, names, apart=None)
        more = {**hidden, **self._harness()}
        with judging_sandbox(own, submission, more, limits=self.limits) as (place, submission):
            execution = place.run(program_argv("tests"), stdin=json.dumps(given), seconds=self.seconds)
            place.settle()
            results, rewritten = _results(place, execution, given["nonce"]), _rewritten(place, hidden)
        suspicions = [*map(str, results.written.get("suspicions", ())), *rewritten]
        return self._answer(results, submission, _complete(ids, names), suspicions)

    def _collected(
        self, own: Sandbox, hidden: Mapping[str, SandboxFile], names: Mapping[str, list[str]]
    ) -> tuple[str, ...]:
        """The ids that pytest finds with the initial files; empty where those can't be imported."""
        key = _digest(own.initial, hidden)
        if key not in self._ids:
            given = self._given(hidden, names, apart=None)
            given |= {"options": [*given["options"], "--collect-only"], "guarded": False}
            with own.fresh({**laid_over(own.initial, hidden), **self._harness()}, limits=self.limits) as place:
                execution = place.run(program_argv("tests"), stdin=json.dumps(given), seconds=self.seconds)
                results = _results(place, execution, given["nonce"])
            self._refuse_broken(results, self._modules(own.initial), hidden)
            if len(self._ids) >= MAX_COLLECTIONS:
                self._ids.clear()
            self._ids[key] = () if results.errors else tuple(results.written.get("ids", ()))
        return self._ids[key]

    def _modules(self, initial: Mapping[str, SandboxFile]) -> set[str]:
        """Top-level modules that the agent's code gives."""
        found = set(self.modules)
        for path in (*initial, *(path for path in self.include if "*" not in path)):
            for root in self.roots:
                below = _below(path, root)
                if below and below.endswith(".py") and not _is_test(below):
                    found.add(below.split("/")[0].removesuffix(".py"))
        return {name for name in found if name.isidentifier()}

    def _given(
        self, hidden: Mapping[str, SandboxFile], names: Mapping[str, list[str]], *, apart: Any
    ) -> dict[str, Any]:
        options = ["-c", INI, "--rootdir", ".", "-p", "no:cacheprovider", "--color=no", "-q", *self.options]
        return {
            "results": RESULTS,
            "nonce": secrets.token_hex(16),
            "roots": self.roots,
            "paths": sorted(names),
            "hidden": sorted(hidden),
            "options": options,
            "apart": apart,
            "folder": WIRE,
            "guarded": apart is None,
        }

    def _harness(self) -> dict[str, SandboxFile]:
        return {**harness_files(*PROGRAMS), INI: SandboxFile(data=b"[pytest]\n")}

    def _refuse_broken(self, results: Results, under_test: set[str], hidden: Mapping[str, SandboxFile]) -> None:
        """Refuse a suite that can't run whatever the agent wrote.

        Raises:
            RewardError: pytest is missing or was used wrongly, or a hidden file can't be imported by its own fault.
        """
        written, output = results.written, results.execution.text[-1000:]
        if "missing" in written:
            raise RewardError(
                f"{NAME} needs pytest in the sandbox, and its Python {written['python']} has none: "
                f"{written['missing']}. Install it there, or judge with hidden_cases."
            )
        for error in results.errors:
            missing = (error["missing"] or "").partition(".")[0]
            is_of_suite = not error["at"] or error["at"] in hidden or _is_test(error["at"])
            if missing and missing not in under_test and is_of_suite and not error["crossed"]:
                raise RewardError(
                    f"{NAME} can't import {error['where']}: {error['text']}. Mend the hidden files; name a module that "
                    f"the agent is to write by modules=[{missing!r}]."
                )
        is_conftest = "while loading conftest" in output
        if written.get("exit_code") in (3, 4) and not written["crossed"] and not is_conftest:
            raise RewardError(f"{NAME} could not run pytest (exit code {written['exit_code']}): {output}")
        if written.get("exit_code") == 5 and not results.errors:
            raise RewardError(f"{NAME} found no test in its hidden files. {output}")

    def _answer(
        self, results: Results, submission: Submission, ids: Sequence[str], suspicions: Sequence[str] = ()
    ) -> dict[str, Any]:
        checks = [_check(id, results) for id in ids]
        if suspicions:
            reason = f"the agent's code touched what judged it: {suspicions[0]}"
            checks = [Check(name=check.name, passed=False, reason=check.reason or reason) for check in checks]
        exit_code = results.written.get("exit_code", results.execution.exit_code)
        return answer(
            checks,
            submission,
            strict=self.strict,
            exit_code=exit_code if isinstance(exit_code, int) else None,
            output=results.execution.text,
            tampering=suspicions,
        )


def _check(id: str, results: Results) -> Check:
    """Whether a test passed, by its whole id or by all ids that it has with parameters."""
    tests = results.written.get("tests", {})
    own = [phases for other, phases in tests.items() if other == id or other.startswith(f"{id}[")]
    if not results.written:
        return Check(name=id, passed=False, reason=results.end())
    if not own:
        error = next((each for each in results.errors if id.startswith(each["where"])), None)
        return Check(name=id, passed=False, reason=error["text"] if error else "it was not run")
    for phases in own:
        for phase in ("setup", "call", "teardown"):
            outcome, reason = phases.get(phase, ["not run", ""])
            if outcome != "passed":
                return Check(name=id, passed=False, reason=f"{phase} {outcome}: {reason}" if reason else outcome)
    return Check(name=id, passed=True)


def _complete(ids: Sequence[str], names: Mapping[str, list[str]]) -> list[str]:
    """Ids that pytest told, and the tests that it told none of: what can't be imported collects nothing."""
    told = {id.partition("[")[0] for id in ids}
    return [*ids, *(name for each in names.values() for name in each if name not in told)]


def _results(place: Sandbox, execution: Execution, nonce: str) -> Results:
    try:
        written = json.loads(place.read_bytes(RESULTS))
    except (SandboxRefusal, ValueError, RecursionError):
        written = {}
    return Results(execution=execution, written=written if is_of_pytest(written, nonce) else {})


def is_of_pytest(written: Any, nonce: str) -> bool:
    """Whether results have the shape that our program gives them, and its nonce."""
    if not isinstance(written, dict) or written.get("nonce") != nonce:
        return False
    if "missing" in written:
        return all(isinstance(written.get(key), str) for key in ("missing", "python"))
    tests, errors, ids = (written.get(key) for key in ("tests", "errors", "ids"))
    return (
        isinstance(written.get("crossed"), bool)
        and _is_texts(ids)
        and _is_texts(written.get("suspicions"))
        and isinstance(errors, list)
        and all(isinstance(each, dict) and each.keys() == _OF_ERROR for each in errors)
        and all(isinstance(each["where"], str) and isinstance(each["text"], str) for each in errors)
        and isinstance(tests, dict)
        and all(isinstance(phases, dict) for phases in tests.values())
        and all(_is_texts(came) and len(came) == 2 for phases in tests.values() for came in phases.values())
    )


_OF_ERROR = {"where", "at", "text", "missing", "crossed"}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _rewritten(place: Sandbox, hidden: Mapping[str, SandboxFile]) -> list[str]:
    """Hidden files that are no longer what they were."""
    try:
        now = place.snapshot()
    except SandboxRefusal as refusal:
        return [f"the judging sandbox can't be read any more: {refusal}"]
    return [
        f"{path} was rewritten while the agent's code was judged"
        for path, file in hidden.items()
        if path not in now or now[path].data != file.data or now[path].kind != "file"
    ]


def _names_in(path: str, data: bytes) -> list[str]:
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"{NAME} can't read the hidden file {path}: {error}. Mend it.") from error
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append(f"{path}::{node.name}")
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += [
                f"{path}::{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test")
            ]
    return found


def _without(initial: Mapping[str, SandboxFile], modules: set[str], roots: Sequence[str]) -> dict[str, SandboxFile]:
    """The initial files but for the modules under test."""
    return {
        path: file
        for path, file in initial.items()
        if not (
            path.endswith((".py", ".pyi", ".so"))
            and any((_below(path, root) or "").split("/")[0].split(".")[0] in modules for root in roots)
        )
    }


def _below(path: str, root: str) -> str | None:
    root = root.strip("./")
    if not root:
        return path
    return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None


def _is_test(path: str) -> bool:
    parts = Path(path).parts
    is_named = any(fnmatch.fnmatch(parts[-1], pattern) for pattern in (*TEST_FILES, "conftest.py", "setup.py"))
    return is_named or parts[0] in ("test", "tests")


def _digest(*files: Mapping[str, SandboxFile]) -> str:
    digest = hashlib.sha256()
    for each in files:
        for path in sorted(each):
            digest.update(f"{path!r} {each[path].kind} {len(each[path].data)} ".encode() + each[path].data)
    return digest.hexdigest()
