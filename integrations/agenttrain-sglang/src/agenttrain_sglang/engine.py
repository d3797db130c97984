"""Token ids to sampled ids: protocols.Engine over SGLang servers.

A call waits for a free place at its rollout's server, is sent, and is sent again when that server dies: nothing of
the lost answer was kept, so nothing is trained half. Invariants: no id outside the vocabulary reaches a server; a
Generation holds exactly what one server told, or several parts of which each continues the one before; the next call
after `update_weights` is answered by the new weights, on every server. Knows nothing of messages, tools or rewards.

Servers start while the rest of a run opens; the first use waits for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from agenttrain import telemetry
from agenttrain.errors import EngineError
from agenttrain.records import Generation, Ids, Sampling

from agenttrain_sglang.client import ServerClient, ServerGone, ServerRefused, check_prompt, new_rid
from agenttrain_sglang.fleet import Fleet
from agenttrain_sglang.loop import LoopThread
from agenttrain_sglang.published import Published
from agenttrain_sglang.replica import Server
from agenttrain_sglang.wire import Sent, generate_body, generation_of, goes_on, going_on, joined

if TYPE_CHECKING:
    from agenttrain.protocols import AdapterWeights

    from agenttrain_sglang.plan import Plan
    from agenttrain_sglang.replica import Replica

MOST_ASKED = 4
"""How often one call is sent before it fails."""
BUSY = (429, 502, 503)
"""HTTP statuses of a server that has sampled nothing and may take the same call later."""
BUSY_S = 0.5
SPANS_S = 1.5
"""How long a server is left to send its last spans before it is ended: it sends them every 0.5 s."""
ABORT_AGAIN_S = 0.5
"""A server may not know a call yet when its end is asked for."""
NOTHING = Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")


@dataclass(slots=True, eq=False)
class Call:
    """One call of `generate` on its way."""

    prompt_ids: Ids
    sampling: Sampling
    session: str
    headers: Mapping[str, str]
    future: Future[Generation]
    task: asyncio.Task[Generation] | None = None
    abort: asyncio.Task[None] | None = None
    """Asks for its end."""
    server: Server | None = None
    """The one that works on it. None: it waits."""
    rid: str = ""
    ended: bool = False
    """Its rollout has ended: what was sampled until then is its answer."""


class SglangEngine:
    """protocols.Engine, TakesAdapters and TellsNews over the servers of a Plan."""

    name = "sglang"

    def __init__(self, plan: Plan) -> None:
        """Start the servers; what is wrong with them is raised at the first use."""
        self._plan = plan
        self._counts = dict.fromkeys(
            ("sampled_ids", "prefilled_ids", "cached_ids", "calls", "asked_again", "aborted", "busy"), 0.0
        )
        self._news: list[str] = []
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[Call] = set()
        """Every call that has arrived and not ended; touched on the loop alone."""
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
        self._ready: Future[Fleet] = self._loop.run(self._opened())

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def max_length(self) -> int:
        """Of the server that takes least; waits until all are ready."""
        return min(replica.max_length for replica in self.replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The servers' places; waits until all are filled."""
        return self._ready.result().replicas

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
        headers = telemetry.trace_context() if telemetry.is_recording() else {}
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        call = Call(prompt_ids, sampling, session, headers, future)
        with self._lock:
            self._check_open()
            self._loop.soon(self._begin, call)
        return future

    def release(self, session: str) -> None:
        """The rollout has ended: its calls in flight end as aborted, with what was sampled until then."""
        with self._lock:
            if not self._closed:
                self._loop.soon(self._end_session, session)

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

    def _publish(self, push: Callable[[Sequence[Server]], Mapping[Server, str]]) -> None:
        """Push to the servers that are up; those that died on it, and those that came meanwhile, get it anew."""
        fleet = self._ready.result()
        self._check_open()
        servers = self._loop.run(self._held_still(fleet)).result()
        try:
            dead = push(servers)
        finally:
            self._loop.run(self._let_go(fleet)).result()
        self._loop.run(self._settled(fleet, dead)).result()

    def stats(self) -> Mapping[str, float]:
        """Counters since the start; waits until the servers are ready.

        sampled_ids are those that were handed on, server_sampled_ids what the servers' own counters say: more where
        answers were lost.

        Raises:
            EngineError: no server answers, or will.
        """
        fleet = self._ready.result()
        self._check_open()
        if all(replica.failure is not None for replica in fleet.replicas):
            raise EngineError(str(fleet.replicas[0].failure))
        cpu_s, server_sampled_ids = self._loop.run(self._counted(fleet)).result()
        return {
            **self._counts,
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
        self._loop.run(self._shut()).result()
        self._loop.close()
        self._published.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("The SGLang engine is closed. Open a new one to generate or to publish weights.")

    def _say(self, news: str) -> None:
        with self._lock:
            self._news.append(news)

    # ── opening and closing, on the loop ─────────────────────────────────────────────────────────────────────────

    async def _opened(self) -> Fleet:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )
        self._fleet = Fleet(
            self._plan.replicas(
                self._folder,
                client_of=lambda address: ServerClient(address, self._http),
                restore=self._restored,
                say=self._say,
            )
        )
        await self._fleet.fill()
        return self._fleet

    async def _restored(self, server: Server) -> None:
        await asyncio.to_thread(self._published.restore, server)

    async def _held_still(self, fleet: Fleet) -> list[Server]:
        """The servers that are up; none of them is taken for hung while weights arrive."""
        for replica in fleet.replicas:
            replica.is_held_still = True
        return [replica.server for replica in fleet.replicas if replica.server is not None]

    async def _let_go(self, fleet: Fleet) -> None:
        for replica in fleet.replicas:
            replica.is_held_still = False

    async def _settled(self, fleet: Fleet, dead: Mapping[Server, str]) -> None:
        """Wait until every replica that is not lost for good has a server with the weights of now.

        Raises:
            EngineError: none is left.
        """
        for replica in fleet.replicas:
            if replica.server is not None and replica.server in dead:
                replica.lost(replica.server, dead[replica.server])
        for replica in fleet.replicas:
            while replica.failure is None and (replica.server is None or self._published.is_behind(replica.server)):
                if replica.server is None:
                    await replica.changed.wait()
                else:
                    await self._restored(replica.server)
        if all(replica.failure is not None for replica in fleet.replicas):
            raise EngineError(str(fleet.replicas[0].failure))

    async def _counted(self, fleet: Fleet) -> tuple[float, float]:
        each = await asyncio.gather(*(replica.counted() for replica in fleet.replicas))
        return sum(cpu_s for cpu_s, _ in each), sum(sampled for _, sampled in each)

    async def _shut(self) -> None:
        tasks = [call.task for call in self._open if call.task is not None]
        for call in list(self._open):
            call.ended = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._plan.otlp_endpoint is not None:
            await asyncio.sleep(SPANS_S)
        if not self._ready.done() or self._ready.exception() is None:
            await self._fleet.close()
        await self._http.close()

    # ── calls, on the loop ───────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, call: Call) -> None:
        self._open.add(call)
        call.task = asyncio.ensure_future(self._answered(call))
        call.task.add_done_callback(lambda task: self._done(call, task))

    def _done(self, call: Call, task: asyncio.Task[Generation]) -> None:
        """However a call's task ended, its future is done now."""
        self._open.discard(call)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            call.future.set_exception(_as_engine_error(error))
            return
        generation = NOTHING if task.cancelled() else task.result()
        counts = self._counts
        counts["calls"] += 1
        counts["aborted"] += generation.stop_reason == "aborted"
        counts["sampled_ids"] += len(generation.token_ids)
        counts["cached_ids"] += generation.n_cached_ids
        counts["prefilled_ids"] += len(call.prompt_ids) - generation.n_cached_ids
        call.future.set_result(generation)

    async def _answered(self, call: Call) -> Generation:
        """The whole answer: a server's own end of text, which is none of the turn's stop ids, is gone on from."""
        prompt, sampling = call.prompt_ids, call.sampling
        whole = part = await self._part(call, prompt, sampling)
        while goes_on(part, sampling) and not call.ended:
            prompt, sampling = going_on(prompt, part, sampling)
            part = await self._part(call, prompt, sampling)
            whole = joined(whole, part)
        return whole

    async def _part(self, call: Call, prompt: Ids, sampling: Sampling) -> Generation:
        """One server's answer, asked for again where a server died or was too busy to begin."""
        for n_asked in range(1, MOST_ASKED + 1):
            replica = await self._fleet.replica_of(call.session)
            async with replica.slots:
                server = replica.server
                if call.ended:
                    return NOTHING
                if server is None:
                    continue
                try:
                    return await self._asked(call, server, prompt, sampling)
                except ServerGone as gone:
                    replica.lost(server, str(gone))
                    if call.ended:
                        return NOTHING
                    self._counts["asked_again"] += 1
                    failure = f"was sent {n_asked} times, and each server died on it (the last one: {gone})"
                except ServerRefused as refused:
                    if refused.status not in BUSY:
                        raise EngineError(
                            f"{replica.name} refused a call of session {call.session} with HTTP {refused.status}: "
                            f"{refused.message} See the server's log."
                        ) from refused
                    self._counts["busy"] += 1
                    failure = f"was refused {n_asked} times (the last time: HTTP {refused.status} {refused.message})"
            await asyncio.sleep(BUSY_S * n_asked if "refused" in failure else 0)
        raise EngineError(f"A call of session {call.session} {failure}. See the servers' logs.")

    async def _asked(self, call: Call, server: Server, prompt: Ids, sampling: Sampling) -> Generation:
        adapter, version_of = self._published.on(server)
        routed = self._plan.routed if server.facts.tells_experts else None
        sent = Sent(
            prompt_ids=prompt,
            sampling=sampling,
            rid=new_rid(),
            address=server.client.address,
            n_vocabulary=self._plan.n_vocabulary,
            routed=routed,
        )
        body = generate_body(prompt, sampling, rid=sent.rid, adapter=adapter, wants_experts=routed is not None)
        call.rid, call.server = sent.rid, server
        try:
            answer = await server.generate(body, call.headers)
        finally:
            call.server = None
        return generation_of(answer, sent=sent, version_of=version_of)

    def _end_session(self, session: str) -> None:
        if self._ready.done() and self._ready.exception() is None:
            self._fleet.release(session)
        for call in [call for call in self._open if call.session == session]:
            call.ended = True
            if call.server is None and call.task is not None:
                call.task.cancel()
            else:
                call.abort = asyncio.ensure_future(self._aborted(call))

    async def _aborted(self, call: Call) -> None:
        """Ask the server to end a call until it has."""
        while call in self._open and call.server is not None:
            try:
                await call.server.client.abort(call.rid)
            except (ServerGone, ServerRefused):
                return
            await asyncio.sleep(ABORT_AGAIN_S)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failed = EngineError(f"A call of the SGLang engine failed: {type(error).__name__}: {error}. See the server's log.")
    failed.__cause__ = error
    return failed
