"""What runs rollouts in a worker's process: the graph, loaded once, its store and its threads.

Requests go in; every attempt that ends is shipped to the driver, and the last one is what veRL's agent loop gets.
Invariants: nothing of a graph runs on the event loop; whatever a rollout does, no exception leaves, and what ends the
run is shipped; a result is shipped once, after it was written, and what the driver gets of it unpickles there. What
veRL does with rows is not known here.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from agenttrain.capture.store import SqliteStore
from agenttrain.errors import AgenttrainError, TrainerError
from agenttrain.exporters import NOTHING, Exported, exporting
from agenttrain.pool import RolloutPool
from agenttrain.protocols import Engine
from agenttrain.records import RolloutRequest, RolloutResult, RolloutSpec, Task, Turn
from agenttrain.rollout import Runner, open_runner_of
from agenttrain.run_folder import RunFolder
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from agenttrain_verl.emission import EmissionError, RowRules, outputs_of, refusal
from agenttrain_verl.outbox import Outbox


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """All that a worker must know to run rollouts; picklable."""

    rollout: RolloutSpec
    node_id: str
    """Of the driver's Ray node: a worker there writes into the run's own folder."""
    max_length: int
    """Positions of the policy."""
    takes_seeds: bool | None
    """As the engine says."""
    engine_name: str
    stock: bool
    """Whether veRL's own rollout answers, and not an engine of agenttrain."""
    concurrency: int
    """Rollouts that this worker makes at once."""
    with_experts: bool = False
    """Whether the trainer replays routed experts, so that every row must have them."""
    exported: Exported = NOTHING
    """Where the driver's traces and metrics go, and as which run: `agenttrain.exporters.exported()` there."""

    @property
    def rules(self) -> RowRules:
        return RowRules(max_length=self.max_length, with_experts=self.with_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """What a worker tells the driver: a rollout that has ended, or what ends the run."""

    result: RolloutResult | None = None
    """Every attempt of a rollout, those that are made again included. None: this tells an error."""
    is_stored: bool = False
    """Whether it stands in the run's own folder, on the disk."""
    refused: str = ""
    """Why veRL gets no row of it, though it may be trained; empty when it does, or when it may not."""
    error: BaseException | None = None
    """What ends the run, such as a GraphError."""
    escaped: tuple[int, str] = (0, "")
    """Model calls that got past the worker's gate before this, and where the first of them was made."""


class Host:
    """The one that a process has. Its coroutines run on the loop that it was opened for."""

    def __init__(
        self,
        spec: HostSpec,
        engine: Engine,
        outbox: Outbox[Shipped],
        *,
        opened: tuple[Runner, _TellingStore],
        owner: ThreadPoolExecutor,
        stack: ExitStack,
    ) -> None:
        """Use `Host.open`."""
        self.spec, self._engine, self._outbox = spec, engine, outbox
        self._runner, self._store = opened
        self._owner, self._stack = owner, stack
        self._stopping, self._ended = Event(), Event()
        self._begins = asyncio.Event()
        """Clear while what is under way is cut off: what is asked meanwhile begins after it."""
        self._begins.set()
        self._pool = RolloutPool(
            runner=self._runner,
            concurrency=spec.concurrency,
            seconds=self._runner.limits.seconds,
            should_stop=lambda: self._stopping.is_set() or self._ended.is_set(),
        )
        self._callers = ThreadPoolExecutor(spec.concurrency, thread_name_prefix="agenttrain-caller")
        self._calls: set[Future[Any]] = set()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="agenttrain-flush")
        self._flush: Future[None] | None = None

    @classmethod
    def open(cls, spec: HostSpec, engine: Engine, loop: asyncio.AbstractEventLoop, *, is_on_drivers_node: bool) -> Host:
        """Load the graph, and be the process's host; blocks.

        Args:
            loop: on which `take` is awaited.
            is_on_drivers_node: whether the run's own folder can be written here.

        Raises:
            AgenttrainError: graph, policy or plugins can't be opened here.
        """
        global _host
        outbox: Outbox[Shipped] = Outbox(loop)
        owner, stack = ThreadPoolExecutor(1, thread_name_prefix="agenttrain-host"), ExitStack()
        try:
            opened = owner.submit(_opened, spec, outbox, stack, is_on_drivers_node).result()
        except BaseException:
            owner.submit(stack.close).result()
            owner.shutdown()
            raise
        _host = cls(spec, engine, outbox, opened=opened, owner=owner, stack=stack)
        return _host

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────────────────────

    async def roll_out(self, request: RolloutRequest) -> RolloutResult | None:
        """Make a rollout, again after an environment failure.

        Returns:
            The last attempt. None: it was cut off, or the run ends.
        """
        await self._begins.wait()
        if self._ended.is_set():
            return None
        results = await asyncio.wrap_future(self._submit([request]))
        return results[0] if results else None

    async def begin(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rollouts whose results `take` tells."""
        await self._begins.wait()
        if requests and not self._ended.is_set():
            self._submit(requests)

    def outputs(self, result: RolloutResult) -> list[AgentLoopOutput]:
        """What veRL gets of a rollout: nothing where it may not be trained, or where a row can't be made of it."""
        try:
            return outputs_of(result, self.spec.rules)
        except EmissionError:
            return []  # its reason was shipped with it
        except Exception as error:
            self.fail(error)
            return []

    async def take(self, timeout_s: float) -> list[Shipped]:
        """What has come since the last call; waits for the first as long as given."""
        shipped = await self._outbox.take(timeout_s)
        if shipped:
            shipped[-1] = replace(shipped[-1], escaped=self._runner.gate.escaped())
        if shipped and self.spec.exported.exporter is not None and (self._flush is None or self._flush.done()):
            self._flush = self._flusher.submit(_flush_exporters)
        return shipped

    async def stop(self) -> None:
        """Cut off what is under way; returns when it has ended as aborted, and was shipped.

        What waited for its turn ends without a record.
        """
        self._begins.clear()
        self._stopping.set()
        self._runner.stop_all()
        try:
            if under_way := [asyncio.wrap_future(call) for call in list(self._calls)]:
                await asyncio.wait(under_way)
        finally:
            self._stopping.clear()
            self._begins.set()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, error: BaseException) -> None:
        """Ship what ends the run, the first time; nothing new begins."""
        if not self._ended.is_set():
            self._ended.set()
            self._outbox.put(Shipped(error=portable(error)))

    def close(self) -> None:
        """Cut off what is under way, write and export what is left, free the graph; blocks. Safe to call twice."""
        global _host
        self._ended.set()
        self._runner.stop_all()
        self._callers.shutdown(cancel_futures=True)
        self._pool.close()
        self._flusher.shutdown()
        if _host is self:
            _host = None
            self._owner.submit(self._stack.close).result()
            self._owner.shutdown()

    def _submit(self, requests: Sequence[RolloutRequest]) -> Future[list[RolloutResult]]:
        own = self._store.own(requests)
        call = self._callers.submit(self._make, own)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _make(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        try:
            return self._pool.run(self._engine, requests)
        except KeyboardInterrupt:  # as the pool ends when it is stopped; it must not reach the loop
            return []
        except BaseException as error:
            self.fail(error)
            return []


_host: Host | None = None


def host_of_process() -> Host:
    """The host that was opened here.

    Raises:
        TrainerError: none was: whatever process this is, agenttrain's trainer did not make it.
    """
    if _host is None:
        raise TrainerError(
            "No graph is open in this process. veRL's agent loop 'agenttrain' runs in the rollout workers of "
            "agenttrain fit --trainer verl alone; it can't be named in a configuration of veRL's own."
        )
    return _host


@dataclass(slots=True)
class _TellingStore:
    """A TurnStore that ships each result when it is written: exactly those that are a rollout's record."""

    store: SqliteStore
    outbox: Outbox[Shipped]
    rules: RowRules
    is_the_runs: bool
    """Whether it writes into the run's own folder."""
    _tasks: dict[str, Task] = field(default_factory=dict)
    """By id, as they came: a graph may put into its own copy what the driver can't unpickle."""

    def own(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """The requests with tasks of their own, which no other rollout sees."""
        self._tasks |= {request.task.id: request.task for request in requests}
        return [pickle.loads(pickle.dumps(request)) for request in requests]

    def put_begun(self, request: RolloutRequest, *, started_at: float) -> None:
        self.store.put_begun(request, started_at=started_at)

    def put_intent(self, *, turn_id: str, rollout_id: str, started_at: float) -> None:
        self.store.put_intent(turn_id=turn_id, rollout_id=rollout_id, started_at=started_at)

    def put_turn(self, turn: Turn) -> None:
        self.store.put_turn(turn)

    def put_result(self, result: RolloutResult) -> None:
        result = replace(result, request=replace(result.request, task=self._tasks[result.request.task.id]))
        self.store.put_result(result)
        self.store.flush()
        self.outbox.put(Shipped(result=result, is_stored=self.is_the_runs, refused=refusal(result, self.rules)))

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


def _opened(
    spec: HostSpec, outbox: Outbox[Shipped], stack: ExitStack, is_on_drivers_node: bool
) -> tuple[Runner, _TellingStore]:
    """What the host's own thread holds open; it is closed there, too, since contexts belong to a thread."""
    stack.enter_context(exporting(spec.exported.exporter, spec.exported.run_id))
    if is_on_drivers_node:
        folder = RunFolder(Path(spec.rollout.run_dir)).rollouts
    else:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)))
    store = SqliteStore(folder)
    stack.callback(store.close)
    telling = _TellingStore(store, outbox, spec.rules, is_on_drivers_node)
    return stack.enter_context(open_runner_of(spec.rollout, store=telling)), telling


FOLDER = "agenttrain-rollouts-"
"""Before the name of a folder of records on a node that is not the driver's."""


def portable(error: BaseException) -> BaseException:
    """The error as the driver can unpickle it: of a class that agenttrain has, with its own message."""
    if isinstance(error, AgenttrainError):
        known: type[AgenttrainError] = next(
            each for each in type(error).__mro__ if each.__module__ == AgenttrainError.__module__
        )
        return known(str(error))
    return TrainerError(
        f"A rollout worker raised {type(error).__name__}: {error}. That is a fault of agenttrain or of a plugin: see "
        "the worker's log."
    )


def _flush_exporters() -> None:
    """Send the spans that have ended: the process may be ended before they go by themselves."""
    from opentelemetry import metrics, trace

    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        if hasattr(provider, "force_flush"):
            provider.force_flush()
