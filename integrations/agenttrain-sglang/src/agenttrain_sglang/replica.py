"""One server's place in a run: the server that fills it, how that one is watched, and what takes its place.

A server that ends, breaks off or goes silent is gone for good: calls that wait for it see `ServerGone` at once, and the
next server gets the weights of now before anybody may ask it. Everything here runs on the engine's loop. Nothing here
knows calls, ids or how weights travel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agenttrain.errors import EngineError

from agenttrain_sglang.client import ServerClient, ServerGone, ServerRefused
from agenttrain_sglang.one_server import Running, Server

MOST_WATCH_S = 10.0
"""Between two looks at a server that may be asked."""
LOOKED_AT_S = 0.25
"""Between two looks at a server that is starting."""
LEAST_HEALTH_S, MOST_HEALTH_S = 2.0, 30.0
"""For one health check of a server that is starting; SGLang takes a second for it."""
MOST_TRIES = 3
"""How often in a row a server is started that ends before it may be asked."""
LAST_WORDS_S = 1.0
"""How long after its last connection a server may take to end, before its end is told without its own words."""
TAKEN = "address already in use"


class EndedEarly(EngineError):
    """A server ended before it ever answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Gives a new server the weights of now; it may be asked when this returns.

    Raises:
        ServerGone: another server may take them.
        EngineError: no other one would.
    """
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
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The watch, and what fills the place again."""
    _is_closed: bool = False
    """Nothing takes the place of a server any more."""

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.settings.max_running)

    @property
    def name(self) -> str:
        return f"SGLang server {self.number}" + (f" at {self.address}" if self.address else "")

    async def fill(self) -> None:
        """Get a server that may be asked, or fail; `changed` is set in both cases."""
        try:
            await self._fill()
        except Exception as error:
            await self._fail(error)
        self.changed.set()

    def lost(self, server: Server, why: str) -> None:
        """A server broke off or went silent; only the first word of it counts."""
        if server.gone.done():
            return
        server.gone.set_result(why)
        if self.server is server:
            self.server = None
            self.changed.clear()
            if not self._is_closed:
                self._keep(self._replace(server, why))

    def let_go(self) -> None:
        """Weights have arrived: whoever took them is alive."""
        self.is_held_still = False
        if self.server is not None:
            self.server.heard_at = time.monotonic()

    async def close(self) -> None:
        """End the watch and the process; what is lost from now on is not replaced."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_process()

    async def counted(self) -> tuple[float, float]:
        """(CPU seconds, the servers' own count of sampled ids) of all servers that were here."""
        server, process = self.server, self._process
        if server is not None:
            await server.count()
        before = self.ended_cpu_s
        cpu_s = await asyncio.to_thread(process.cpu_s) if process is not None else 0.0
        return before + cpu_s, self.ended_sampled_ids + (server.sampled_ids if server is self.server and server else 0)

    # ── filling ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _fill(self) -> None:
        """Get a server; one that finds its port taken is started again, on another one.

        Raises:
            EndedEarly, ServerGone: it ended or broke off before it may be asked.
            ServerRefused, EngineError: it can't be used.
        """
        n_tried = 0
        while self.server is None:
            await self._end_process()
            n_tried += 1
            try:
                await self._fill_once()
            except EndedEarly as error:
                if n_tried == MOST_TRIES or TAKEN not in str(error).lower():
                    raise

    async def _fill_once(self) -> None:
        if self.start is not None:
            self._process = self.start()  # on the loop: a close can't come between the start and its note
            self.address = self._process.address
        client = self.client_of(self.address)
        await self._answers(client)
        server = Server(client=client, process=self._process, facts=await client.facts())
        await server.begin_count()
        await self.restore(server)
        self.max_length, self.takes_seeds = server.facts.max_length, server.facts.takes_seeds
        self.server = server
        self._keep(self._watched(server))

    async def _answers(self, client: ServerClient) -> None:
        """Wait until the server answers its health check.

        Raises:
            EndedEarly: it ended before.
            EngineError: it took too long.
        """
        until = time.monotonic() + self.settings.start_s
        while True:
            left = until - time.monotonic()
            if await self._listens() and await client.is_healthy(max(LEAST_HEALTH_S, min(left, MOST_HEALTH_S))):
                return
            ended = await asyncio.to_thread(self._process.has_ended) if self._process is not None else None
            if ended is not None:
                raise EndedEarly(f"{self.name} ended before it was ready: {ended}")
            if time.monotonic() > until:
                raise EngineError(
                    f"{self.name} did not answer within {self.settings.start_s:g} s. See its log, or give it longer: "
                    "sglang.start_s."
                )
            await asyncio.sleep(LOOKED_AT_S)

    async def _listens(self) -> bool:
        """Whether what answers is the server that was started: somebody else may have been quicker at its port."""
        return self._process is None or await asyncio.to_thread(self._process.listens)

    async def _replace(self, server: Server, why: str) -> None:
        """Fill the place again, or say why that can't be done."""
        began = time.monotonic()
        self.ended_sampled_ids += server.sampled_ids
        try:
            why = await _own_words(server) or why
            await self._fill_again(why)
        except Exception as error:
            await self._fail(error)
            self.say(f"{self.name} is lost for this run: {self.failure}")
        else:
            self.say(
                f"{self.name} takes the place of one that was gone ({why}): {time.monotonic() - began:.0f} s, weights "
                "pushed again, calls asked again"
            )
        self.changed.set()

    async def _fill_again(self, why: str) -> None:
        """Start servers until one may be asked.

        Raises:
            EngineError: none could be, or the place was filled often enough.
        """
        n_tried = 0
        while self.server is None:
            if self.restarts >= self.settings.restarts:
                raise EngineError(
                    f"{self.name} is gone ({why}), and was replaced {self.restarts} times already. Look into its log; "
                    "sglang.restarts allows more."
                )
            self.restarts += 1
            n_tried += 1
            try:
                await self._fill()
            except (EndedEarly, ServerGone) as error:
                why = str(error)
                if n_tried == MOST_TRIES:
                    raise EngineError(
                        f"{self.name} can't be replaced: {MOST_TRIES} servers in a row ended before they could be "
                        f"asked (the last one: {why}). Look into their logs."
                    ) from error

    async def _fail(self, error: Exception) -> None:
        self.failure = error if isinstance(error, EngineError) else _told(error, self.name)
        try:
            await self._end_process()
        except EngineError as left:
            self.failure = EngineError(f"{self.failure} {left}")

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.ended_cpu_s += await asyncio.to_thread(_killed, process)

    def _keep(self, work: Awaitable[None]) -> None:
        """Run it until it ends, or until `close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watched(self, server: Server) -> None:
        """Find a server that has ended, or that leaves its calls and its health check without an answer."""
        silence_s = self.settings.silence_s
        while not server.gone.done():
            await asyncio.sleep(min(MOST_WATCH_S, silence_s / 4))
            ended = await asyncio.to_thread(server.process.has_ended) if server.process is not None else None
            if ended is not None:
                self.lost(server, ended)
            elif not server.n_running or self.is_held_still or await server.client.is_healthy(silence_s):
                server.heard_at = time.monotonic()
            elif time.monotonic() - server.heard_at >= silence_s and server.n_running and not self.is_held_still:
                self.lost(server, f"it left its health check unanswered for {silence_s:g} s")


async def _own_words(server: Server) -> str | None:
    """Why a process of ours has ended. None: it runs, or is somebody else's."""
    until = time.monotonic() + LAST_WORDS_S
    while server.process is not None:
        ended = await asyncio.to_thread(server.process.has_ended)
        if ended is not None or time.monotonic() > until:
            return ended
        await asyncio.sleep(LAST_WORDS_S / 20)
    return None


def _killed(process: Running) -> float:
    """End a process; gives its CPU seconds."""
    process.kill()
    return process.cpu_s()


def _told(error: Exception, name: str) -> EngineError:
    """What went wrong with a server, where its own errors don't say it to a user."""
    if isinstance(error, ServerGone | ServerRefused):
        told = EngineError(f"{name} broke off before it could be asked ({error}). Look into its log.")
    else:
        told = EngineError(
            f"{name} can't be made ready: {type(error).__name__}: {error}. Start again; if it happens again, look into "
            "its log."
        )
    told.__cause__ = error
    return told
