"""Runs the agent's code on cases and writes what came out, as JSON lines. Knows no expected value.

Stands in the judging sandbox beside the agent's code, which can do to it what it likes: whatever is written is only
what the agent's code answers.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
"""Of a result."""


class NotPlain(Exception):
    """A result that is no JSON value."""


def main() -> None:
    """Read {"results", "roots", "seconds", "cases": [{"index", "call", "args", "kwargs"}]} from stdin and run them."""
    given = json.loads(sys.stdin.buffer.read())
    out = os.open(given["results"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [""]
    sys.path[:1] = [os.path.abspath(root) for root in given["roots"]]

    def say(line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        while data:
            data = data[os.write(out, data) :]

    run_cases(given["cases"], say, given["seconds"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the agent's threads and exit handlers do is not waited for


def run_cases(cases: list[dict[str, Any]], say: Callable[[dict[str, Any]], None], seconds: float) -> None:
    """Each case in turn: said before it begins, and what came out after."""
    for case in cases:
        say({"begin": case["index"]})
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        came = outcome(case)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say({"index": case["index"], **came})


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """{"value"} that a call returned, {"raises", "message"} that it raised, or {"unusable"}: why it is no JSON."""
    try:
        function = called(case["call"])
    except BaseException as error:
        return {"missing": f"{case['call']} can't be imported: {said(error)}"}
    try:
        value = function(*case["args"], **case["kwargs"])
        if hasattr(type(value), "__await__"):
            value = awaited(value)
        return {"value": plain(value, MAX_DEPTH)}
    except NotPlain as error:
        return {"unusable": str(error)}
    except BaseException as error:
        return {"raises": [kind.__name__ for kind in type(error).__mro__], "message": said(error)}


def awaited(value: Any) -> Any:
    """What an awaitable gives, on a loop of its own."""
    import asyncio  # more time than all the rest of this program

    async def give() -> Any:
        return await value

    return asyncio.run(give())


def called(name: str) -> Any:
    """What "module:function" names; the function may be an attribute of a class."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def plain(value: Any, depth: int) -> Any:
    """A value as JSON has it: a tuple is an array; nothing else is turned into something.

    Raises:
        NotPlain: it is no JSON value.
    """
    if depth == 0:
        raise NotPlain(f"the result is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, list | tuple):
        return [plain(each, depth - 1) for each in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise NotPlain("the result is a dict with keys that are no texts")
        return {str.__str__(key): plain(each, depth - 1) for key, each in value.items()}
    raise NotPlain(f"the result is a {type(value).__name__}, which is no JSON value")


def said(error: BaseException) -> str:
    """Its type and message."""
    try:
        return f"{type(error).__name__}: {str(error)[:300]}"
    except BaseException:
        return type(error).__name__
