"""command_exits: a command in a judging sandbox; how it exits is the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
    hidden_files,
    judging_sandbox,
    listed,
    named,
    submission_in,
)
from agenttrain.verifiers.submission import Submission

NAME = "command_exits"


def command_exits(
    argv: Sequence[str] | Callable[[Task], Sequence[str]],
    *,
    files: HiddenFiles | None = None,
    folder: HiddenFolder | None = None,
    include: Sequence[str] = ("*.py",),
    expect: int = 0,
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
) -> Callable[..., dict[str, Any]]:
    """A verifier that runs a command on what the agent left, in a new sandbox, with hidden files put in.

    The exit code is all that counts, so a command that runs the agent's code in its own process lets that code decide:
    `python agent.py` may exit with 0 whatever it did. Let a hidden script judge what the agent's code prints or writes
    in a process of its own, or use `hidden_cases` or `hidden_tests`.

    Args:
        argv: the program, which must be hidden, initial or of the system, and its arguments; no shell.
        files: path to content of the hidden files, or a function of the task that gives them.
        folder: of the hidden files, relative to the file that calls this, or a function of the task.
        include: patterns of the files that are the agent's to change (see docs/hidden-tests.md).
        expect: the exit code of success.
        seconds: None: the sandbox's own limit.
        env: beside the sandbox's own, whose PATH the agent can't change.
        limits: of the judging sandbox. None: the agent's own.

    Raises:
        ConfigError: a text where a list is expected.
    """
    listed(NAME, argv=argv, include=include)
    base = folder_of_caller()

    def command_exits_well(task: Task, sandbox: Sandbox | None) -> dict[str, Any]:
        own = given_sandbox(sandbox, NAME)
        hidden = hidden_files(files, folder, task, base=base, verifier=NAME)
        words = list(argv(task) if callable(argv) else argv)
        with environment(NAME):
            submission = submission_in(own, include, hidden)
            with judging_sandbox(own, submission, hidden, limits=limits) as (place, submission):
                try:
                    execution = place.run(words, env=env, seconds=seconds)
                except SandboxRefusal as refusal:
                    return _refused(words, refusal, submission, own.initial)
        check = _check(words, execution, expect)
        return answer([check], submission, strict=True, exit_code=execution.exit_code, output=execution.text)

    def agent_seconds(limits: SandboxLimits) -> float:
        return limits.seconds if seconds is None else min(seconds, limits.seconds)

    hidden = content_of(files, folder, base=base, verifier=NAME)
    return named(command_exits_well, NAME, limits=limits, agent_seconds=agent_seconds, hidden=hidden)


def _refused(
    words: Sequence[str], refusal: SandboxRefusal, submission: Submission, initial: Mapping[str, SandboxFile]
) -> dict[str, Any]:
    """The answer where the program of a command can't be run: the agent's failure if it changed an initial one.

    Raises:
        RewardError: it is none of what the agent changed.
    """
    program = os.path.normpath(words[0])
    if program not in initial or submission.files.get(program) == initial[program]:
        raise RewardError(
            f"{NAME} can't run {list(words)!r}: {refusal} The command must be one of the system, or of the hidden or "
            "initial files."
        ) from refusal
    check = Check(name=" ".join(words), passed=False, reason=str(refusal))
    return answer([check], submission, strict=True, exit_code=None, output="")


def _check(words: Sequence[str], execution: Execution, expect: int) -> Check:
    passed = execution.exit_code == expect and not execution.ended_by
    return Check(
        name=" ".join(words), passed=passed, reason="" if passed else f"{end_of(execution)}, and {expect} is expected"
    )
