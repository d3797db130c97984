"""Joins two sandboxes that know nothing of each other: tests in one ask for the agent's code in the other.

Each message is carried over, within bounds of size and time, and its answer back: a small program in either sandbox
hands a line to a pipe and waits for the next. When the agent's process ends, the test that asked fails, and the next
one finds a new process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxRefusal
from agenttrain.verifiers.judging import end_of, program_argv
from agenttrain.verifiers.programs.wire import AS_FILE, LONG, MAX_LINE
from agenttrain.verifiers.submission import JUDGE_FOLDER

WIRE = f"{JUDGE_FOLDER}/wire"
MAX_MESSAGE_BYTES = 4 << 20
MAX_WORKERS = 50
"""Processes of the agent's that one suite may use up."""
END_S = 10.0
_MAKE = f"mkdir -p {WIRE} && rm -f {WIRE}/in {WIRE}/out && mkfifo {WIRE}/in {WIRE}/out"
_TAKE = f"IFS= read -r line < {WIRE}/out && printf '%s\\n' \"$line\""
_GIVE = f"IFS= read -r line && printf '%s\\n' \"$line\" > {WIRE}/in"
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Relay:
    """One suite of tests, and the agent's process that answers them."""

    tests: Sandbox
    agents: Sandbox
    roots: tuple[str, ...]
    call_seconds: float
    """For one answer."""
    n_calls: int = 0
    n_workers: int = 0
    _worker: Future[Execution] | None = None

    def run(self, given: dict[str, Any], *, seconds: float | None) -> Execution:
        """Run the tests to their end.

        Raises:
            SandboxError: one of the sandboxes failed.
            SandboxRefusal: pytest can't be started.
        """
        self.tests.run(_MAKE)
        suite = _begun(lambda: self.tests.run(program_argv("tests"), stdin=json.dumps(given), seconds=seconds))
        answer: bytes | None = None
        while (call := self._next_call(answer, suite)) is not None:
            self.n_calls += 1
            answer = self._answer(call, suite)
        if self._worker is not None:
            _settle(self.agents, self._worker)
        return suite.result()

    def _next_call(self, answer: bytes | None, suite: Future[Execution]) -> bytes | None:
        """Hand the tests an answer, and wait for what they ask next. None: they have ended."""
        handing = _begun(lambda: _taken(self.tests, self._line(answer), None))
        wait(_any(handing, suite), return_when=FIRST_COMPLETED)
        _settle(self.tests, handing)
        if handing.exception() is not None:
            wait(_any(suite), timeout=END_S)  # both have one limit of time
        return None if suite.done() else handing.result()

    def _line(self, answer: bytes | None) -> bytes | None:
        """What the tests are handed for an answer; one that they have no room for is none."""
        try:
            return _line_of(self.tests, answer)
        except SandboxRefusal as refusal:
            return _error(f"its answer can't be carried over: {refusal}")

    def _answer(self, call: bytes, suite: Future[Execution]) -> bytes:
        """What the agent's process answers, or why it doesn't."""
        if len(call) > MAX_MESSAGE_BYTES:
            return _error(f"more than {MAX_MESSAGE_BYTES} bytes were to be given to it")
        if self.n_workers >= MAX_WORKERS and (self._worker is None or self._worker.done()):
            return _error(f"{MAX_WORKERS} processes of it have ended")
        try:
            worker = self._alive()
            handing = _begun(lambda: _taken(self.agents, _line_of(self.agents, call), self.call_seconds))
            wait(_any(handing, worker, suite), timeout=self.call_seconds, return_when=FIRST_COMPLETED)
            if not handing.done():
                return self._lost(worker, handing)
            return _whole(handing.result())
        except SandboxRefusal as refusal:
            self.agents.settle()
            return _error(str(refusal))

    def _alive(self) -> Future[Execution]:
        """The agent's process, a new one where the last has ended."""
        if self._worker is None or self._worker.done():
            self.n_workers += 1
            self.agents.settle()
            self.agents.run(_MAKE)
            given = json.dumps({"roots": self.roots, "folder": WIRE, "generation": self.n_workers})
            self._worker = _begun(lambda: self.agents.run(program_argv("worker"), stdin=given))
        return self._worker

    def _lost(self, worker: Future[Execution], handing: Future[bytes]) -> bytes:
        """End what is left of a process that gives no answer, and say why there is none."""
        is_late = not worker.done()
        _settle(self.agents, worker, handing)
        end = worker.result()
        return _error(f"it took more than {self.call_seconds:g} s" if is_late else f"its process {end_of(end)}")


def _line_of(place: Sandbox, message: bytes | None) -> bytes | None:
    """What goes through the pipe for a message: itself, or that it lies in the file beside.

    Raises:
        SandboxRefusal: the sandbox has no room for that file.
    """
    if message is None or len(message) <= MAX_LINE:
        return message
    try:
        place.write(f"{WIRE}/in{LONG}", message)
    except SandboxRefusal:
        place.write(f"{WIRE}/in{LONG}", b"")  # what was written of it has taken the last room
        raise
    return AS_FILE.encode()


def _taken(place: Sandbox, line: bytes | None, seconds: float | None) -> bytes:
    """Hand a line to a program in a sandbox, if there is one, and take what it says next.

    Raises:
        SandboxRefusal: nothing came that can be read.
    """
    script = _TAKE if line is None else f"{_GIVE} && {_TAKE}"
    execution = place.run(script, stdin=(line or b"") + b"\n", seconds=seconds)
    said = execution.stdout.strip()
    if not execution.ok or execution.n_dropped:
        raise SandboxRefusal(f"what hands messages over {end_of(execution)} {execution.stderr.strip()[:200]}")
    return place.read_bytes(f"{WIRE}/out{LONG}") if said == AS_FILE else said.encode()


def _settle(place: Sandbox, *futures: Future[Any]) -> None:
    """Have runs end, also one that is only about to begin."""
    while not all(future.done() for future in futures):
        place.settle()
        wait(futures, timeout=0.2)


def _whole(answer: bytes) -> bytes:
    if len(answer) > MAX_MESSAGE_BYTES:
        return _error(f"its answer has more than {MAX_MESSAGE_BYTES} bytes")
    try:
        is_answer = isinstance(json.loads(answer), dict)
    except (ValueError, RecursionError):
        is_answer = False
    return answer.replace(b"\n", b" ") if is_answer else _error("its answer can't be read")


def _error(why: str) -> bytes:
    return json.dumps({"error": why}).encode()


def _any(*futures: Future[Any]) -> tuple[Future[Any], ...]:
    return futures


def _begun(call: Callable[[], _T]) -> Future[_T]:
    """A call on a thread of its own."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="agenttrain-judge", daemon=True).start()
    return future
