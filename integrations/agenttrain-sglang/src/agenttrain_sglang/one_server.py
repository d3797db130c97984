"""One server that may be asked, from its first answer to its end: its calls in flight, its end, its own count.

Runs on the engine's loop. Knows nothing of what comes before it or after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from agenttrain.errors import EngineError

from agenttrain_sglang.client import ServerClient, ServerFacts, ServerGone, ServerRefused

COUNTED_IN_S = 5.0
"""How long a server may take to tell its counters; later ones are told the next time."""


class Running(Protocol):
    """A server process that we started; `server.ServerProcess` is it."""

    @property
    def address(self) -> str: ...

    def has_ended(self) -> str | None: ...

    def listens(self) -> bool: ...

    def kill(self) -> None: ...

    def cpu_s(self) -> float: ...


def _future() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server."""

    client: ServerClient
    process: Running | None
    """None: it was started by somebody else."""
    facts: ServerFacts
    gone: asyncio.Future[str] = field(default_factory=_future)
    """Done, with the reason, when it answers no more."""
    n_running: int = 0
    """Calls that it was sent and has not answered."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it last answered."""
    _n_answered_ids: int = 0
    """Sampled ids of its answers."""
    _counter: float = 0.0
    """Its own, when it was last asked."""
    _counter_at_first: float = 0.0

    @property
    def sampled_ids(self) -> float:
        """What it has sampled for this run, by its own counter, and at least what its answers held."""
        return max(self._counter - self._counter_at_first, self._n_answered_ids)

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
            if not asked.done():
                raise ServerGone(self.gone.result())
            answer = asked.result()
        finally:
            self.n_running -= 1
            asked.cancel()
        self.heard_at = time.monotonic()
        ids = answer.get("output_ids")
        self._n_answered_ids += len(ids) if isinstance(ids, list) else 0
        return answer

    async def begin_count(self) -> None:
        """What it has sampled until now was for somebody else."""
        await self.count()
        self._counter_at_first = self._counter

    async def count(self) -> None:
        """Ask for its own counter; a dead server is found by its calls."""
        with suppress(ServerGone, ServerRefused, TimeoutError, ValueError):
            async with asyncio.timeout(COUNTED_IN_S):
                self._counter = await self.client.sampled_tokens() or 0.0

    async def answers(self, within_s: float) -> bool:
        """Whether its scheduler answers; cheaper than a health check, and waits for a step at most."""
        try:
            async with asyncio.timeout(within_s):
                await self.client.facts(within_s=within_s)
        except (ServerGone, TimeoutError, EngineError):
            return False
        return True
