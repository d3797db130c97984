"""The embedded engine in a process of its own: the same calls, answered across a socket.

A forward pass is hundreds of small operations, each of which gives up the GIL and has to get it back from whatever
Python the rollouts run: in one process the engine spends most of its time waiting for it. In its own process it has a
core to itself. Where calls are traced, it exports a span of each, a child of the call's. Invariants: `serve` ends when
the other side is gone, however that ended, so no engine is left behind; when the engine's process ends, every call in
flight fails with EngineError. Messages are pickles between two processes of one program.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from agenttrain import telemetry
from agenttrain.errors import AgenttrainError, EngineError
from agenttrain.exporters import exported, exporting
from agenttrain.records import Generation, Ids, Sampling

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from agenttrain.local.engine import LocalEngine
    from agenttrain.protocols import EngineContext

ENDS_IN_S = 10.0
"""How long a process that was asked to end may take."""
SERVE = "import sys; from agenttrain.local.process import serve; serve(int(sys.argv[1]))"
"""Not `-m`: what is pickled would then belong to a module named __main__."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an engine once its model is loaded."""

    max_length: int
    weight_version: int
    kv_cache: bool
    kv_cache_reason: str


class ProcessEngine:
    """protocols.Engine over a LocalEngine in another process, which loads its model while this one goes on."""

    name = "local"
    takes_seeds = True

    def __init__(self, context: EngineContext) -> None:
        """Start the process; what it finds wrong is raised at the first use."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C of the terminal is for this process alone
            )
        self._pipe = Connection(ours.detach())
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended: str | None = None
        """Why nothing is answered any more. None while it is."""
        self._loaded: Future[Facts] = self._asked()[1]
        self._send(("open", pickle.dumps(context), exported()))
        self._receiver = threading.Thread(target=self._receive, name="agenttrain-engine-replies", daemon=True)
        self._receiver.start()

    @property
    def facts(self) -> Facts:
        """Waits until the model is loaded.

        Raises:
            ModelError: the folder can't be loaded.
            EngineError: the process ended before.
        """
        return self._loaded.result()

    @property
    def max_length(self) -> int:
        return self.facts.max_length

    @property
    def kv_cache(self) -> bool:
        return self.facts.kv_cache

    @property
    def kv_cache_reason(self) -> str:
        return self.facts.kv_cache_reason

    @property
    def weight_version(self) -> int:
        return self.facts.weight_version

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        number, future = self._asked()
        future.set_running_or_notify_cancel()
        trace_context = telemetry.trace_context() if telemetry.is_recording() else {}
        self._send(("generate", number, prompt_ids, sampling, session, trace_context))
        return future

    def release(self, session: str) -> None:
        if self._ended is None:
            self._send(("release", session))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Send the weights one tensor at a time, and wait until the next token is sampled from them."""
        number, future = self._asked()
        for name, tensor in weights:
            self._send(("weight", name, tensor.detach().cpu().contiguous().numpy()))
        self._send(("update", number, version))
        future.result()
        facts: Future[Facts] = Future()
        facts.set_result(replace(self.facts, weight_version=version))
        self._loaded = facts

    def stats(self) -> Mapping[str, float]:
        """Counters, with `cpu_s` of the engine's process; waits until the model is loaded.

        Raises:
            ModelError: the model can't be loaded.
            EngineError: the engine has failed or is closed.
        """
        _ = self.facts
        number, future = self._asked()
        self._send(("stats", number))
        found: Mapping[str, float] = future.result()
        return found

    def close(self) -> None:
        """End the process; calls in flight end as aborted. Safe to call twice."""
        with self._lock:
            was_open, self._ended = self._ended is None, self._ended or "it was closed"
        if was_open:
            self._send(("close",))
        try:
            self._process.wait(ENDS_IN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._receiver.join()
        self._pipe.close()

    def _asked(self) -> tuple[int, Future[Any]]:
        """A number for a question, and the future of its answer."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise EngineError(f"The engine's process answers no more: {self._ended}. Open a new engine.")
            number = next(self._numbers)
            self._open[number] = future
        return number, future

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError as error:
            self._end(f"{type(error).__name__}: {error}")

    def _receive(self) -> None:
        """Hand answers to their futures until the process is gone."""
        try:
            while True:
                number, answer, error = self._pipe.recv()
                with self._lock:
                    future = self._open.pop(number, None)
                if future is None:
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(answer)
        except (EOFError, OSError):
            self._end(self._how_it_ended())
        except Exception as error:  # an answer that can't be read: nothing after it can be trusted
            self._process.kill()
            self._end(f"it sent something unreadable: {error!r}")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(ENDS_IN_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            left, self._open = list(self._open.values()), {}
        for future in left:
            if not future.done():
                future.set_exception(EngineError(f"The engine's process ended while it was asked: {why}."))


# ── the engine's process ─────────────────────────────────────────────────────────────────────────────────────────────


class _Server:
    """Answers messages from the socket until it is closed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._weights: dict[str, Any] = {}

    def run(self) -> None:
        _, context, exports = self._pipe.recv()
        with exporting(exports.exporter, exports.run_id):
            self._answer_all(context)

    def _answer_all(self, context: bytes) -> None:
        engine = self._opened(pickle.loads(context))
        if engine is None:
            return
        try:
            while self._serve(engine, self._pipe.recv()):
                pass
        except (EOFError, ConnectionResetError):  # reset: the other side was killed with answers unread
            pass
        finally:
            engine.close()

    def _opened(self, context: EngineContext) -> LocalEngine | None:
        """The engine; its facts, or what is wrong, are the answer to the first question."""
        from agenttrain.local.engine import LocalEngine

        try:
            engine = LocalEngine.from_context(context)
        except AgenttrainError as error:
            self._answer(0, None, error)
            return None
        facts = Facts(
            max_length=engine.max_length,
            weight_version=engine.weight_version,
            kv_cache=engine.kv_cache,
            kv_cache_reason=engine.kv_cache_reason,
        )
        self._answer(0, facts)
        return engine

    def _serve(self, engine: LocalEngine, message: tuple[Any, ...]) -> bool:
        """Do what one message asks; False: to end."""
        match message:
            case ("generate", number, prompt_ids, sampling, session, trace_context):
                span = telemetry.generate_span(trace_context, len(prompt_ids)) if trace_context else None
                self._generate(engine, number, prompt_ids, sampling, session, span)
            case ("release", session):
                engine.release(session)
            case ("weight", name, array):
                self._weights[name] = array
            case ("update", number, version):
                self._update(engine, number, version)
            case ("stats", number):
                self._stats(engine, number)
            case ("close",):
                return False
        return True

    def _generate(
        self,
        engine: LocalEngine,
        number: int,
        prompt_ids: Ids,
        sampling: Sampling,
        session: str,
        span: Span | None,
    ) -> None:
        def answer(done: Future[Generation]) -> None:
            error = done.exception()
            answered = None if error else done.result()
            if span is not None:
                _end(span, answered, error)
            self._answer(number, answered, error)

        try:
            engine.generate(prompt_ids, sampling, session=session).add_done_callback(answer)
        except EngineError as error:
            if span is not None:
                _end(span, None, error)
            self._answer(number, None, error)

    def _stats(self, engine: LocalEngine, number: int) -> None:
        try:
            self._answer(number, {**engine.stats(), "cpu_s": time.process_time()})
        except EngineError as error:
            self._answer(number, None, error)

    def _update(self, engine: LocalEngine, number: int, version: int) -> None:
        import torch

        weights, self._weights = self._weights, {}
        try:
            engine.update_weights([(name, torch.from_numpy(array)) for name, array in weights.items()], version)
        except EngineError as error:
            self._answer(number, None, error)
        else:
            self._answer(number, None)

    def _answer(self, number: int, answer: Any, error: BaseException | None = None) -> None:
        try:
            with self._sending:
                self._pipe.send((number, answer, error))
        except OSError:
            pass  # The other side is gone, which ends this process at the next receive.


def _end(span: Span, answered: Generation | None, error: BaseException | None) -> None:
    """End a call's span with what the engine answered."""
    if error is not None:
        telemetry.fail(span, error)
    elif answered is not None:
        telemetry.generated(
            span,
            n_sampled=len(answered.token_ids),
            n_cached=answered.n_cached_ids,
            stop_reason=answered.stop_reason,
            weight_version=answered.weight_versions[-1] if answered.weight_versions else None,
        )
    span.end()


def serve(descriptor: int) -> None:
    """Be the engine's process: answer on an inherited socket until the other side closes it or is gone."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(Connection(descriptor)).run()
