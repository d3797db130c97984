"""Joins two sandboxes that know nothing of each other: tests in one ask for the agent's code in the other.

A message is a file; each is carried over, within bounds of size and time, and its answer back. When the agent's process
ends, the test that asked fails, and the next one finds a new process.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agenttrain.errors import SandboxError
from agenttrain.sandbox_protocol import Execution, Sandbox, SandboxRefusal
from agenttrain.verifiers.judging import HARNESS, end_of, program_argv

WIRE = f"{HARNESS}/wire"
MAX_MESSAGE_BYTES = 4 << 20
MAX_WORKERS = 50
"""Processes of the agent's that one suite may use up."""
SHORTEST_S, LONGEST_S = 0.001, 0.02
"""Between two looks for a message."""


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
    _gone: str = ""
    """Why there will be no answer any more; empty: there may be."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, given: dict[str, Any], *, seconds: float | None) -> Execution:
        """Run the tests to their end.

        Raises:
            SandboxError: one of the sandboxes failed.
            SandboxRefusal: pytest can't be started.
        """
        suite = _started(self.tests, program_argv("tests"), json.dumps(given), seconds)
        pause = SHORTEST_S
        while not suite.done():
            call = self._call()
            if call is None:
                time.sleep(pause)
                pause = min(pause * 1.3, LONGEST_S)
                continue
            self.tests.write(f"{WIRE}/answers/{self.n_calls}", self._answer(call, suite))
            self.n_calls += 1
            pause = SHORTEST_S
        if self._worker is not None:
            self.agents.settle()
        return suite.result()

    def _call(self) -> bytes | None:
        try:
            return self.tests.read_bytes(f"{WIRE}/calls/{self.n_calls}")
        except SandboxRefusal:
            return None

    def _answer(self, call: bytes, suite: Future[Execution]) -> bytes:
        """What the agent's process answers, or why it doesn't."""
        if len(call) > MAX_MESSAGE_BYTES:
            return _error(f"more than {MAX_MESSAGE_BYTES} bytes were to be given to it")
        if self._gone:
            return _error(self._gone)
        worker = self._alive()
        until, pause = time.monotonic() + self.call_seconds, SHORTEST_S
        try:
            self.agents.write(f"{WIRE}/calls/{self.n_calls}", call)
            while not suite.done():
                is_over, is_late = worker.done(), time.monotonic() > until
                answer = self._answered()
                if answer is not None:
                    return _whole(answer)
                if is_over or is_late:
                    return self._ended(worker, is_late and not is_over)
                time.sleep(pause)
                pause = min(pause * 1.3, LONGEST_S)
        except SandboxRefusal as refusal:
            return self._lost(str(refusal))
        return _error("the tests have ended")

    def _answered(self) -> bytes | None:
        try:
            return self.agents.read_bytes(f"{WIRE}/answers/{self.n_calls}")
        except SandboxRefusal:
            return None

    def _alive(self) -> Future[Execution]:
        """The agent's process, a new one where the last has ended."""
        if self._worker is None or self._worker.done():
            self.n_workers += 1
            given = {"roots": self.roots, "folder": WIRE, "first": self.n_calls, "generation": self.n_workers}
            self._worker = _started(self.agents, program_argv("worker"), json.dumps(given), None)
        return self._worker

    def _ended(self, worker: Future[Execution], is_late: bool) -> bytes:
        """End what is left of a process that gives no answer."""
        self.agents.settle()
        if is_late:
            return self._lost(f"it took more than {self.call_seconds:g} s")
        try:
            return self._lost(f"its process {end_of(worker.result())}")
        except SandboxRefusal as refusal:
            return self._lost(str(refusal))

    def _lost(self, why: str) -> bytes:
        if self.n_workers >= MAX_WORKERS:
            self._gone = f"{MAX_WORKERS} processes of it have ended"
        return _error(why)


def _whole(answer: bytes) -> bytes:
    if len(answer) > MAX_MESSAGE_BYTES:
        return _error(f"its answer has more than {MAX_MESSAGE_BYTES} bytes")
    try:
        is_answer = isinstance(json.loads(answer), dict)
    except (ValueError, RecursionError):
        is_answer = False
    return answer.rstrip(b"\n") + b"\n" if is_answer else _error("its answer can't be read")


def _error(why: str) -> bytes:
    return json.dumps({"error": why}).encode() + b"\n"


def _started(place: Sandbox, argv: list[str], stdin: str, seconds: float | None) -> Future[Execution]:
    """A program that runs on a thread of its own, until it ends or its sandbox is settled."""
    future: Future[Execution] = Future()

    def run() -> None:
        try:
            future.set_result(place.run(argv, stdin=stdin, seconds=seconds))
        except (SandboxError, SandboxRefusal) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="agenttrain-judge", daemon=True).start()
    return future
