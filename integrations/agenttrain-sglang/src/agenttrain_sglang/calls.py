"""Calls of `generate` on their way: each waits for a place at its rollout's server and is sent there.

It is sent again when that server dies, or answers from weights that it should not hold: nothing of the lost answer was
kept, so nothing is trained half. Invariants: whatever happens, a call's future is done in the end; a Generation holds
exactly what one server told, or several parts of which each continues the one before. Everything here runs on the
engine's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from agenttrain.errors import EngineError
from agenttrain.records import Generation, Ids, Sampling

from agenttrain_sglang.client import ServerGone, ServerRefused, new_rid
from agenttrain_sglang.experts import RoutedShape
from agenttrain_sglang.fleet import Fleet
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.published import OtherWeights, Published
from agenttrain_sglang.replica import Replica
from agenttrain_sglang.wire import Sent, generate_body, generation_of, goes_on, going_on, joined

MOST_SENT = 4
"""How often one call is sent before it fails: it may be what ends its servers."""
BUSY = (429, 502, 503)
"""HTTP statuses of a server that has sampled nothing and may take the same call later."""
BUSY_S = 0.5
SECOND_LOOK_S = 5.0
"""How long a server whose connection broke may take to show that it lives."""
ABORT_AGAIN_S = 0.5
"""A server may not know a call yet when its end is asked for."""
ABORTS_IN_S = 1.0
"""How long a server may take to hear that a call is to end; a rollout waits 2 s for what it has."""
LARGE = 65536
"""Numbers of routed experts from which an answer is read beside the loop."""
NOTHING = Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")
COUNTED = ("sampled_ids", "prefilled_ids", "cached_ids", "calls", "asked_again", "aborted", "busy")


@dataclass(slots=True, eq=False)
class Call:
    """One call of `generate`."""

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
    so_far: Generation = NOTHING
    """The parts of its answer that are whole."""
    ended: bool = False
    """Its rollout has ended: what was sampled until then is its answer."""
    was_held_up: bool = False
    """It ended in time that a dead or hung server had taken."""


class Calls:
    """Every call that has arrived and not ended."""

    def __init__(
        self, fleet: Fleet, published: Published, *, n_vocabulary: int, routed: RoutedShape | None, busy_s: float
    ) -> None:
        """Begin with none.

        Args:
            busy_s: how long a server may refuse a call because it is busy, before the call fails.
        """
        self.counts = dict.fromkeys(COUNTED, 0.0)
        self._fleet, self._published = fleet, published
        self._n_vocabulary, self._routed, self._busy_s = n_vocabulary, routed, busy_s
        self._open: set[Call] = set()
        self._held_up: set[str] = set()
        """Sessions of which a server has died."""

    def begin(self, call: Call) -> None:
        """Send it as soon as there is a place."""
        self._open.add(call)
        call.task = asyncio.ensure_future(self._answered(call))
        call.task.add_done_callback(lambda task: self._done(call, task))

    def end_session(self, session: str) -> None:
        """Its calls end as aborted, with what was sampled until now; or fail, where a dead server took their time.

        Of calls that ran in parallel each says so: only the first word counts.
        """
        self._fleet.release(session)
        was_held_up = session in self._held_up or not self._fleet.has_a_server
        self._held_up.discard(session)
        for call in [call for call in self._open if call.session == session and not call.ended]:
            call.ended, call.was_held_up = True, was_held_up
            if call.server is None and call.task is not None:
                call.task.cancel()
            else:
                call.abort = asyncio.ensure_future(self._aborted(call))

    async def close(self) -> None:
        """All end as aborted."""
        tasks = [call.task for call in self._open if call.task is not None]
        for call in self._open:
            call.ended = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, call: Call, task: asyncio.Task[Generation]) -> None:
        """However a call's task ended, its future is done now."""
        self._open.discard(call)
        error = None if task.cancelled() else task.exception()
        if call.was_held_up:
            error = EngineError(f"The time of session {call.session} was up while its server was gone or hung.")
        if error is not None:
            call.future.set_exception(_as_engine_error(error))
            return
        generation = replace(call.so_far, stop_reason="aborted") if task.cancelled() else task.result()
        counts = self.counts
        counts["calls"] += 1
        counts["aborted"] += generation.stop_reason == "aborted"
        counts["sampled_ids"] += len(generation.token_ids)
        counts["cached_ids"] += generation.n_cached_ids
        counts["prefilled_ids"] += len(call.prompt_ids) - generation.n_cached_ids
        call.future.set_result(generation)

    async def _answered(self, call: Call) -> Generation:
        """The whole answer: a server's own end of text, which is none of the turn's stop ids, is gone on from."""
        prompt, sampling = call.prompt_ids, call.sampling
        call.so_far = part = await self._part(call, prompt, sampling)
        while goes_on(part, sampling) and not call.ended:
            prompt, sampling = going_on(prompt, part, sampling)
            part = await self._part(call, prompt, sampling)
            call.so_far = joined(call.so_far, part)
        return call.so_far

    async def _part(self, call: Call, prompt: Ids, sampling: Sampling) -> Generation:
        """One server's answer, asked for again where a server died or was too busy to begin."""
        n_lost, busy_until = 0, time.monotonic() + self._busy_s
        while not call.ended:
            replica = await self._fleet.replica_of(call.session)
            async with replica.slots:
                server = replica.server
                if server is None or call.ended:
                    continue
                try:
                    return await self._asked(call, server, prompt, sampling)
                except (ServerGone, OtherWeights) as gone:
                    if isinstance(gone, OtherWeights) or not await self._lives(server):
                        replica.lost(server, str(gone))
                        self._held_up.add(call.session)
                    n_lost += 1
                    self._note_lost(call, n_lost, gone)
                    continue
                except ServerRefused as refused:
                    busy = refused.status in BUSY and time.monotonic() < busy_until
                    if not busy and not await self._lost_its_weights(replica, server):
                        raise _refused(call, replica, refused) from refused
                    self.counts["busy"] += busy
            await asyncio.sleep(BUSY_S)
        return NOTHING

    def _note_lost(self, call: Call, n_lost: int, gone: Exception) -> None:
        if call.ended:
            return
        if n_lost == MOST_SENT:
            raise EngineError(
                f"A call of session {call.session} was sent {n_lost} times, and each time its server died or broke off "
                f"(the last time: {gone}). See the servers' logs."
            ) from gone
        self.counts["asked_again"] += 1

    async def _asked(self, call: Call, server: Server, prompt: Ids, sampling: Sampling) -> Generation:
        adapter, version_of = self._published.on(server)
        routed = self._routed if server.facts.tells_experts else None
        sent = Sent(
            prompt_ids=prompt,
            sampling=sampling,
            rid=new_rid(),
            address=server.client.address,
            n_vocabulary=self._n_vocabulary,
            routed=routed,
        )
        body = generate_body(prompt, sampling, rid=sent.rid, adapter=adapter, wants_experts=routed is not None)
        call.rid, call.server = sent.rid, server
        try:
            answer = await server.generate(body, call.headers)
        finally:
            call.server = None
        if is_large(sent):
            return await asyncio.to_thread(generation_of, answer, sent=sent, version_of=version_of)
        return generation_of(answer, sent=sent, version_of=version_of)

    async def _lives(self, server: Server) -> bool:
        """A second look at a server whose connection broke: it may have broken on the way."""
        return not server.gone.done() and await server.answers(SECOND_LOOK_S)

    async def _lost_its_weights(self, replica: Replica, server: Server) -> bool:
        """Whether a refusal is no wonder: somebody has started the server again, without what it was given."""
        try:
            self._published.check(await server.client.weight_version())
        except OtherWeights as other:
            replica.lost(server, str(other))
            return True
        except (EngineError, ServerGone, ServerRefused):
            return False
        return False

    async def _aborted(self, call: Call) -> None:
        """Ask the server to end a call until it has; one that doesn't even take the question is hung."""
        while call in self._open and call.server is not None:
            try:
                await asyncio.wait_for(call.server.client.abort(call.rid), ABORTS_IN_S)
            except (ServerGone, ServerRefused, TimeoutError):
                call.was_held_up = True
                if call.task is not None:
                    call.task.cancel()
                return
            await asyncio.sleep(ABORT_AGAIN_S)


def is_large(sent: Sent) -> bool:
    """Whether reading an answer may take longer than the loop should wait."""
    if sent.routed is None:
        return False
    rows = len(sent.prompt_ids) + sent.sampling.max_tokens - sent.sampling.experts_from
    return rows * sent.routed.n_hidden * sent.routed.n_chosen >= LARGE


def _refused(call: Call, replica: Replica, refused: ServerRefused) -> EngineError:
    return EngineError(
        f"{replica.name} refused a call of session {call.session} with HTTP {refused.status}: {refused.message} See "
        "its log."
    )


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    failed = EngineError(f"A call of the SGLang engine failed: {type(error).__name__}: {error}. See the server's log.")
    failed.__cause__ = error
    return failed
