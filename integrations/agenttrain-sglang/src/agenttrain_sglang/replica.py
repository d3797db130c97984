"""One server's place in a run: the server that fills it, how that one is watched, and what takes its place.

A server that ends, breaks off or goes silent is gone for good: calls that wait for it see `ServerGone` at once, and the
next server gets the weights of now before anybody may ask it. Everything here runs on the engine's loop. Nothing here
knows calls, ids or how weights travel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agenttrain.errors import EngineError

from agenttrain_sglang.client import ServerClient, ServerFacts, ServerGone

MOST_WATCH_S = 10.0
"""Between two health checks of a server that is being asked."""
LOOKED_AT_S = 0.25
"""Between two looks at a server that is starting."""


class Running(Protocol):
    """A server process that we started; `server.ServerProcess` is it."""

    @property
    def address(self) -> str: ...

    def has_ended(self) -> str | None: ...

    def kill(self) -> None: ...

    def cpu_s(self) -> float: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server, from its first answer to its end."""

    number: int
    """Of its replica's servers, from 0."""
    client: ServerClient
    process: Running | None
    """None: it was started by somebody else."""
    facts: ServerFacts
    gone: asyncio.Future[str]
    """Done, with the reason, when it answers no more."""
    n_running: int = 0
    """Calls that it was sent and has not answered."""
    sampled_ids: float = 0.0
    """Of its own counter, when it was last asked."""

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
        """Its answer to one call.

        Raises:
            ServerGone: it broke off, or it was found dead or hung meanwhile.
            ServerRefused: it answered with an HTTP error.
        """
        asked = asyncio.ensure_future(self.client.generate(body, headers=headers))
        self.n_running += 1
        try:
            await asyncio.wait((asked, self.gone), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise ServerGone(self.gone.result())
        finally:
            self.n_running -= 1
            asked.cancel()


@dataclass(slots=True, kw_only=True)
class ReplicaSettings:
    """How long a replica waits, and how often it is filled again."""

    restarts: int
    start_s: float
    silence_s: float
    max_running: int


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """The place of one server. Fill it once; it fills itself again."""

    number: int
    settings: ReplicaSettings
    start: Callable[[], Running] | None
    """Starts a server process. None: the server at `address` is somebody else's."""
    address: str = ""
    client_of: Callable[[str], ServerClient]
    restore: Callable[[Server], Awaitable[None]]
    """Gives a new server the weights of now; it may be asked when this returns."""
    say: Callable[[str], None]
    """Told what a user should know."""
    server: Server | None = None
    """The one that may be asked. None: it is being replaced, or the replica has failed."""
    failure: EngineError | None = None
    """Why it will not be filled again."""
    restarts: int = 0
    n_assigned: int = 0
    """Sessions that are asked here."""
    max_length: int = 0
    takes_seeds: bool = False
    """Of the servers here, once there was one."""
    is_held_still: bool = False
    """Weights are arriving: a health check would wait for them."""
    ended_cpu_s: float = 0.0
    ended_sampled_ids: float = 0.0
    """Of the servers that were here before."""
    slots: asyncio.Semaphore = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `server` or `failure` was set."""
    _process: Running | None = None
    """The last one started, whether it may be asked yet or not."""
    _watch: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.settings.max_running)

    @property
    def name(self) -> str:
        return f"SGLang server {self.number}" + (f" at {self.address}" if self.address else "")

    async def fill(self) -> None:
        """Get a server that may be asked, or fail; `changed` is set in both cases."""
        try:
            await self._fill()
        except EngineError as error:
            self.failure = error
        except Exception as error:
            self.failure = EngineError(
                f"{self.name} can't be made ready: {type(error).__name__}: {error}. Start again; if it happens again, "
                "look into the server's log."
            )
        if self.failure is not None:
            await asyncio.to_thread(self._end_process)
        self.changed.set()

    def lost(self, server: Server, why: str) -> None:
        """A server broke off or went silent; only the first word of it counts."""
        if server.gone.done():
            return
        server.gone.set_result(why)
        if self.server is server:
            self.server = None
            self.changed.clear()
            task = asyncio.ensure_future(self._replace(server, why))
            task.add_done_callback(lambda _: None)
            self._watch = task

    async def close(self) -> None:
        """End the watch and the process."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._end_process)

    async def counted(self) -> tuple[float, float]:
        """(CPU seconds, the servers' own count of sampled ids) of all servers that were here."""
        server = self.server
        if server is not None:
            try:
                server.sampled_ids = await server.client.sampled_tokens() or 0.0
            except Exception:  # counted at the next time; a dead server is found by its calls
                pass
        cpu_s = self._process.cpu_s() if self._process is not None else 0.0
        return self.ended_cpu_s + cpu_s, self.ended_sampled_ids + (server.sampled_ids if server else 0.0)

    # ── filling ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _fill(self) -> None:
        if self.start is not None:
            self._process = self.start()  # on the loop: a close can't come between the start and its note
            self.address = self._process.address
        client = self.client_of(self.address)
        await self._answers(client)
        facts = await client.facts()
        number = self.restarts
        server = Server(
            number=number,
            client=client,
            process=self._process,
            facts=facts,
            gone=asyncio.get_running_loop().create_future(),
        )
        await self.restore(server)
        self.max_length, self.takes_seeds = facts.max_length, facts.takes_seeds
        self.server = server
        self._watch = asyncio.ensure_future(self._watched(server))

    async def _answers(self, client: ServerClient) -> None:
        """Wait until a server answers its health check.

        Raises:
            EngineError: it ended before, or took too long.
        """
        until = time.monotonic() + self.settings.start_s
        while not await client.is_healthy(max(1.0, min(self.settings.start_s, 30.0))):
            ended = await asyncio.to_thread(self._process.has_ended) if self._process is not None else None
            if ended is not None:
                raise EngineError(f"{self.name} ended before it was ready: {ended}")
            if time.monotonic() > until:
                raise EngineError(
                    f"{self.name} did not answer within {self.settings.start_s:g} s. See its log, or give it longer: "
                    "sglang.start_s."
                )
            await asyncio.sleep(LOOKED_AT_S)

    async def _replace(self, server: Server, why: str) -> None:
        """Fill the place again, or say why that can't be done."""
        began = time.monotonic()
        self.ended_sampled_ids += server.sampled_ids
        await asyncio.to_thread(self._end_process)
        if self.restarts >= self.settings.restarts:
            self.failure = EngineError(
                f"{self.name} is gone ({why}), and was replaced {self.restarts} times already. Look into its log; "
                "sglang.restarts allows more."
            )
            self.changed.set()
            return
        self.restarts += 1
        await self.fill()
        if self.failure is None:
            self.say(
                f"{self.name} was gone ({why}) and is replaced: {time.monotonic() - began:.0f} s, its weights pushed "
                "again, its calls asked again"
            )

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.ended_cpu_s += process.cpu_s()
            process.kill()

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watched(self, server: Server) -> None:
        """Find a server that has ended, or that leaves its calls without an answer."""
        period = min(MOST_WATCH_S, self.settings.silence_s / 4)
        heard = time.monotonic()
        while not server.gone.done():
            await asyncio.sleep(period)
            ended = await asyncio.to_thread(server.process.has_ended) if server.process is not None else None
            if ended is not None:
                self.lost(server, ended)
            elif not server.n_running or self.is_held_still or await server.client.is_healthy(self.settings.silence_s):
                heard = time.monotonic()
            elif time.monotonic() - heard >= self.settings.silence_s and server.n_running and not self.is_held_still:
                self.lost(server, f"it left its health check unanswered for {self.settings.silence_s:g} s")
