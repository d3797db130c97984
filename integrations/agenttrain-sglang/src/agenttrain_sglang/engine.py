"""Token ids to sampled ids: protocols.Engine over SGLang servers.

Any thread may ask; what it asks is done on a loop of the engine's own (`calls`, `fleet`), and new weights travel on the
thread that brings them (`published`). Invariants: no id outside the vocabulary reaches a server; the next call after
`update_weights` is answered by the new weights, on every server; nobody waits for ever. Knows nothing of messages,
tools or rewards.

Servers start while the rest of a run opens; the first use waits for them.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from agenttrain import telemetry
from agenttrain.errors import EngineError
from agenttrain.records import Generation, Ids, Sampling
from agenttrain.switching import lower_switch_interval, restore_switch_interval

from agenttrain_sglang.calls import Call, Calls
from agenttrain_sglang.client import ServerClient, ServerGone, check_prompt
from agenttrain_sglang.fleet import Fleet
from agenttrain_sglang.loop import LoopThread
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.plan import refuse_unfit
from agenttrain_sglang.published import Outcome, Published
from agenttrain_sglang.weights import ServerSpoiled

if TYPE_CHECKING:
    from agenttrain.protocols import AdapterWeights

    from agenttrain_sglang.plan import Plan
    from agenttrain_sglang.replica import Replica

CLOSED = "The SGLang engine is closed. Open a new one to generate or to publish weights."
KEPT_S = 2.5
"""How long an idle connection is kept: less than SGLang's 5 s (SGLANG_TIMEOUT_KEEP_ALIVE, 0.5.23). A call over one that
the server is just closing would look as if the server were gone."""
T = TypeVar("T")

SPANS_S = 1.5
"""How long servers are left to send their last spans before they are ended: they send them every 0.5 s."""


class SglangEngine:
    """protocols.Engine, TakesAdapters and TellsNews over the servers of a Plan."""

    name = "sglang"

    def __init__(self, plan: Plan) -> None:
        """Start the servers; what is wrong with them is raised at the first use."""
        self._plan = plan
        self._news: list[str] = []
        self._lock = threading.Lock()
        self._closed = False
        self._loop = LoopThread("agenttrain-sglang")
        self._folder = plan.own_folder()
        self._published = Published(
            plan.settings,
            model=plan.model,
            begins_with=plan.begins_with,
            has_adapters=plan.adapter_rank is not None,
            folder=plan.weights_folder(self._folder),
            say=self._say,
        )
        self._fleet = Fleet(
            plan.replicas(
                self._folder,
                client_of=lambda address: ServerClient(address, self._http),
                restore=self._restored,
                say=self._say,
            )
        )
        self._calls = Calls(
            self._fleet,
            self._published,
            n_vocabulary=plan.n_vocabulary,
            routed=plan.routed,
            busy_s=plan.settings.silence_s,
        )
        lower_switch_interval()
        self._ready: Future[Fleet] = self._loop.run(self._opened())

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def max_length(self) -> int:
        """Of the server that takes least; waits until all are ready."""
        return min(replica.max_length for replica in self.replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The servers' places; waits until all are filled."""
        return self._opened_fleet().replicas

    @property
    def weight_version(self) -> int:
        return self._published.version

    @property
    def takes_seeds(self) -> bool:
        """Whether equal (prompt, seed) give equal ids; waits until all are ready."""
        return all(replica.takes_seeds for replica in self.replicas)

    @property
    def takes_adapters(self) -> bool:
        """Whether the servers were made ready for LoRA, and the run wants that."""
        return self._plan.adapter_rank is not None

    def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str) -> Future[Generation]:
        """Sample a response; `release` ends it.

        Raises:
            EngineError: the engine is closed, or the prompt can't be sent.
        """
        self._check_open()
        check_prompt(
            prompt_ids,
            sampling,
            session=session,
            max_length=self.max_length,
            n_vocabulary=self._plan.n_vocabulary,
        )
        headers = telemetry.trace_context() if telemetry.is_traced() else {}
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        call = Call(prompt_ids, sampling, session, headers, future)
        with self._lock:
            self._check_open()
            self._loop.soon(lambda: self._calls.begin(call))
        return future

    def release(self, session: str) -> None:
        """The rollout has ended: its calls in flight end as aborted, with what was sampled until then."""
        with self._lock:
            if not self._closed:
                self._loop.soon(lambda: self._calls.end_session(session))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Push weights to every server; returns when each samples the next token from them.

        Raises:
            EngineError: a server refused them, or one that died meanwhile can't be replaced.
        """
        self._publish(lambda servers: self._published.push(weights, version, servers))

    def update_adapter(self, adapter: AdapterWeights, version: int) -> None:
        """Push an adapter alone to every server; the base stays.

        Raises:
            EngineError: as for `update_weights`.
        """
        self._publish(lambda servers: self._published.push_adapter(adapter, version, servers))

    def _publish(self, push: Callable[[Sequence[Server]], Outcome]) -> None:
        """Push to the servers that are up; those that died on it, and those that came meanwhile, get it anew."""
        fleet = self._opened_fleet()
        self._check_open()
        try:
            servers = self._on_loop(fleet.hold_still())
            outcome = push(servers)
        finally:
            self._on_loop(fleet.let_go())
        self._on_loop(fleet.settle(outcome.dead, is_behind=self._published.is_behind, restore=self._restored))
        if outcome.refusal is not None:
            raise outcome.refusal

    def stats(self) -> Mapping[str, float]:
        """Counters since the start; waits until the servers are ready.

        sampled_ids are those that were handed on, server_sampled_ids what the servers' own counters say: more where
        answers were lost.

        Raises:
            EngineError: no server answers, or will.
        """
        fleet = self._opened_fleet()
        self._check_open()
        fleet.check()
        counts = dict(self._calls.counts)
        cpu_s, server_sampled_ids = self._on_loop(self._counted(fleet))
        return {
            **counts,
            "server_sampled_ids": server_sampled_ids,
            "restarts": float(sum(replica.restarts for replica in fleet.replicas)),
            "update_s": self._published.update_s,
            "pause_s": self._published.pause_s,
            "cpu_s": cpu_s,
            "gpus": float(self._plan.n_gpus),
        }

    def news(self) -> Sequence[str]:
        """What happened to the servers since this was last asked."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """End the servers that were started; calls in flight end as aborted. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._loop.run(self._shut()).result()
        finally:
            restore_switch_interval()
            self._loop.close()
            self._published.close()
            if self._plan.folder is None and (self._is_well or self._plan.is_given):
                shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _is_well(self) -> bool:
        """Whether nobody will want to read the servers' logs."""
        return all(replica.failure is None for replica in self._fleet.replicas)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(CLOSED)

    def _say(self, news: str) -> None:
        with self._lock:
            self._news.append(news)

    def _opened_fleet(self) -> Fleet:
        """Waits until every replica has a server.

        Raises:
            EngineError: one will not, or the engine was closed meanwhile.
        """
        try:
            return self._ready.result()
        except CancelledError:
            raise EngineError(CLOSED) from None

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives.

        Raises:
            EngineError: its own, or the engine was closed meanwhile.
        """
        try:
            return self._loop.run(work).result()
        except CancelledError:
            raise EngineError(CLOSED) from None

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _opened(self) -> Fleet:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S))
        await self._fleet.fill()
        return self._fleet

    async def _restored(self, server: Server) -> None:
        """Give a server the weights of now.

        Raises:
            ServerGone: another one in its place may take them.
            EngineError: no other one would.
        """
        refuse_unfit(self._plan, server.client.address, server.facts)
        try:
            await asyncio.to_thread(self._published.restore, server)
        except ServerSpoiled as spoiled:
            raise ServerGone(str(spoiled)) from spoiled

    async def _counted(self, fleet: Fleet) -> tuple[float, float]:
        each = await asyncio.gather(*(replica.counted() for replica in fleet.replicas))
        return sum(cpu_s for cpu_s, _ in each), sum(sampled for _, sampled in each)

    async def _shut(self) -> None:
        self._ready.cancel()
        await self._calls.close()
        if self._plan.otlp_endpoint is not None:
            await asyncio.sleep(SPANS_S)
        await self._fleet.close()
        await self._http.close()
