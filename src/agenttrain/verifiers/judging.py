"""What the verifiers that judge in a sandbox share: the submission, the judging sandbox, the answer.

Invariant: what fails on the agent's side is an answer with a reason; what fails on ours is a RewardError.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agenttrain.errors import ConfigError, RewardError, SandboxError
from agenttrain.records import Task
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxFile, SandboxRefusal
from agenttrain.sandbox_spec import Files, SandboxLimits
from agenttrain.verifiers import programs
from agenttrain.verifiers.submission import JUDGE_FOLDER, Submission, first_of, plain_text, submission_of

MAX_OUTPUT = 4000
"""Characters of output that are kept as evidence: its end."""
MAX_REASON = 500
BESIDE_S = 20.0
"""Of a verifier, beside what it gives the agent's code: to read what it left, and to open and close sandboxes."""


def named(
    verifier: Callable[..., dict[str, Any]],
    name: str,
    *,
    limits: SandboxLimits | None,
    agent_seconds: Callable[[SandboxLimits], float],
    hidden: HiddenContent | None = None,
) -> Callable[..., dict[str, Any]]:
    """A verifier under its name, that tells by `most_seconds` how long it may take whatever the agent's code does.

    Args:
        limits: of its judging sandboxes. None: those of the agent's.
        agent_seconds: what the agent's code may take, in a sandbox of these limits.
        hidden: what it judges by, besides its source and the task.
    """
    told: Any = verifier
    told.__name__ = name
    told.most_seconds = lambda own: BESIDE_S + agent_seconds(limits or own)
    told.hidden = hidden
    return verifier


def listed(verifier: str, **given: Any) -> None:
    """Refuse a text where texts are asked for: each of its letters would be taken for one.

    Raises:
        ConfigError: naming the argument, and how it is written.
    """
    for name, value in given.items():
        if isinstance(value, str | bytes):
            raise ConfigError(
                f"{verifier} got {name}={value!r}: a text, where a list is expected. Write {name}=[{value!r}]."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was asked of the agent's code."""

    name: str
    passed: bool
    reason: str = ""
    """Empty where it passed."""

    def as_json(self) -> dict[str, Any]:
        return {"name": plain_text(self.name), "passed": self.passed, "reason": cut_reason(self.reason)}


def answer(
    checks: Sequence[Check],
    submission: Submission,
    *,
    strict: bool,
    exit_code: int | None,
    output: str,
    tampering: Sequence[str] = (),
) -> dict[str, Any]:
    """A verifier's answer: the share of checks that pass, or, if strict, 1 only where all do.

    Args:
        tampering: beside what the submission tells.
    """
    n_passed, n = sum(check.passed for check in checks), len(checks)
    success = n > 0 and n_passed == n
    failed = next((check for check in checks if not check.passed), None)
    comment = f"{n_passed} of {n} pass" + (f"; {failed.name}: {failed.reason}" if failed else "")
    return {
        "score": float(success) if strict or not n else n_passed / n,
        "success": success,
        "comment": cut_reason(comment),
        "evidence": {
            "exit_code": exit_code,
            "output": plain_text(output[-MAX_OUTPUT:]),
            "checks": [check.as_json() for check in checks],
            "tampering": [*submission.tampering, *map(plain_text, tampering)],
            **_of_the_agents_files(submission),
        },
    }


def _of_the_agents_files(submission: Submission) -> dict[str, list[str]]:
    """Which of what the agent changed or added was judged, and which was not."""
    paths = {"submitted": submission.submitted, "left_behind": submission.left_behind}
    return {key: [plain_text(path) for path in first_of(found)] for key, found in paths.items() if found}


def cut_reason(text: str) -> str:
    """One reason, in as many characters as people read."""
    text = plain_text(text)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


def given_sandbox(sandbox: Sandbox | None, verifier: str) -> Sandbox:
    """The rollout's sandbox.

    Raises:
        RewardError: there is none.
    """
    if sandbox is None:
        raise RewardError(
            f"{verifier} judges what an agent left in its sandbox, and this rollout had none. "
            "Give the graph one: @trainable(…, sandbox=SandboxSpec(template=…))."
        )
    return sandbox


@contextmanager
def environment(verifier: str) -> Iterator[None]:
    """What fails in this block is the environment's, whatever the sandbox calls it.

    Raises:
        RewardError: the sandbox failed or refused something.
    """
    try:
        yield
    except (SandboxError, SandboxRefusal) as error:
        raise RewardError(f"{verifier} could not judge: {error}") from error


def submission_in(sandbox: Sandbox, include: Sequence[str], hidden: Mapping[str, SandboxFile]) -> Submission:
    """What is judged of a settled sandbox: the initial files where what the agent left can't be read."""
    try:
        found = sandbox.snapshot()
    except SandboxRefusal as refusal:
        return Submission(files=sandbox.initial, tampering=(f"the working directory can't be read: {refusal}",))
    return submission_of(found, sandbox.initial, include=include, hidden=hidden)


@contextmanager
def judging_sandbox(
    own: Sandbox, submission: Submission, more: Mapping[str, SandboxFile], *, limits: SandboxLimits | None
) -> Iterator[tuple[Sandbox, Submission]]:
    """A sandbox with the submission and more over it, and what is judged there: the initial files where none can be
    made with the agent's own, since they are too many or too large for its limits.

    Raises:
        SandboxError: none can be made with the initial files either.
    """
    bare = Submission(files=own.initial)
    with ExitStack() as stack:
        try:
            place = stack.enter_context(own.fresh(submission.with_hidden(more), limits=limits))
        except SandboxError:
            with own.fresh(bare.with_hidden(more), limits=limits):
                pass  # so it is the agent's files, if they can't be laid a second time either
            try:
                place = stack.enter_context(own.fresh(submission.with_hidden(more), limits=limits))
            except SandboxError as error:
                told = plain_text(
                    f"the submission can't be laid in a judging sandbox, and none of it was taken: {error}"
                )
                behind = (*submission.submitted, *submission.left_behind)
                submission = replace(bare, tampering=(*submission.tampering, told), left_behind=behind)
                place = stack.enter_context(own.fresh(bare.with_hidden(more), limits=limits))
        yield place, submission


def harness_files(*names: str) -> dict[str, SandboxFile]:
    """Our programs of these names, as files of a judging sandbox."""
    package = f"{JUDGE_FOLDER}/agenttrain/verifiers/programs"
    empty = ("agenttrain", "agenttrain/verifiers", "agenttrain/verifiers/programs")
    return {
        **{f"{JUDGE_FOLDER}/{folder}/__init__.py": SandboxFile() for folder in empty},
        **{f"{package}/{name}.py": SandboxFile(data=_program(name)) for name in names},
    }


def program_argv(name: str) -> list[str]:
    """What starts one of our programs: Python without the folder, environment or user's packages in its path."""
    module = f"agenttrain.verifiers.programs.{name}"
    start = f"import sys; sys.path.insert(0, {JUDGE_FOLDER!r}); from {module} import main; main()"
    return ["python", "-I", "-B", "-c", start]


def end_of(execution: Execution) -> str:
    """How a process ended, in words that follow "the process "."""
    if execution.ended_by:
        return f"was ended by its limit of {execution.ended_by}"
    if execution.exit_code is not None and execution.exit_code < 0:
        return f"was ended by signal {-execution.exit_code}"
    return f"ended with exit code {execution.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenContent:
    """What a verifier judges by, besides its source and the task, such as hidden files."""

    of: Callable[[Task], Mapping[str, bytes]]
    """A name, such as a path, to what it holds."""
    by_task: bool
    """Whether one task's may be another than the next one's."""

    def digest(self, tasks: Sequence[Task]) -> str:
        """SHA-256, hexadecimal, over that of all these tasks, in whatever order. What can't be had counts as such:
        a rollout will tell why."""
        digest = hashlib.sha256()
        for task in sorted(tasks, key=lambda task: task.id)[: None if self.by_task else 1]:
            digest.update(f"{task.id if self.by_task else ''}\0".encode("utf-8", "surrogatepass"))
            try:
                found = self.of(task)
            except Exception as error:
                found = {type(error).__name__: b""}
            for name, content in sorted(found.items()):
                digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogatepass") + content)
        return digest.hexdigest()


HiddenFiles = Files | Callable[[Task], Files]
HiddenFolder = str | Path | Callable[[Task], str | Path]


def hidden_files(
    files: HiddenFiles | None, folder: HiddenFolder | None, task: Task, *, base: Path, verifier: str
) -> dict[str, SandboxFile]:
    """What is put in after the agent has finished.

    Args:
        base: that a relative folder begins at.

    Raises:
        RewardError: there is no such folder, nothing in it, or a path that leads out.
    """
    found: dict[str, SandboxFile] = {}
    if folder is not None:
        found |= _in_folder(base / (folder(task) if callable(folder) else folder), verifier)
    for path, content in ((files(task) if callable(files) else files) or {}).items():
        name = os.path.normpath(path)
        if os.path.isabs(name) or name.split("/")[0] in ("..", ".") or not isinstance(content, str | bytes):
            raise RewardError(
                f"{verifier} got the hidden file {path!r} with {type(content).__name__}. Give paths within the working "
                "directory, and text or bytes."
            )
        found[name] = SandboxFile(data=content.encode() if isinstance(content, str) else content)
    return found


def content_of(
    files: HiddenFiles | None, folder: HiddenFolder | None, *, base: Path, verifier: str
) -> HiddenContent | None:
    """That of hidden files; None where there are none. Arguments as of `hidden_files`."""
    if files is None and folder is None:
        return None
    return HiddenContent(
        of=lambda task: {
            f"{path}\0executable" if file.executable else path: file.data
            for path, file in hidden_files(files, folder, task, base=base, verifier=verifier).items()
        },
        by_task=callable(files) or callable(folder),
    )


def folder_of_caller(depth: int = 2) -> Path:
    """Folder of the file that calls the caller of this, which relative paths begin at; else the current one."""
    file = sys._getframe(depth).f_globals.get("__file__")
    return Path(file).absolute().parent if isinstance(file, str) else Path.cwd()


def _in_folder(folder: Path, verifier: str) -> dict[str, SandboxFile]:
    files = {
        str(path.relative_to(folder)): SandboxFile(data=path.read_bytes(), executable=bool(path.stat().st_mode & 0o100))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if not files:
        raise RewardError(f"{verifier} takes its hidden files from {folder}, and there are none. Name their folder.")
    return files


@functools.lru_cache
def _program(name: str) -> bytes:
    return (Path(programs.__file__).parent / f"{name}.py").read_bytes()
