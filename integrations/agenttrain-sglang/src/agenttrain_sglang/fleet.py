"""All servers of a run: which of them answers whom, and what is known of all.

A session stays with one replica, whose cache knows its prefix, as long as that replica has a server; while it is being
replaced and another one has, the session moves. Everything here runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agenttrain.errors import EngineError

from agenttrain_sglang.client import ServerGone
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.replica import Replica


class Fleet:
    """The replicas of a run, at least one."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self._replica_by_session: dict[str, Replica] = {}

    async def fill(self) -> None:
        """Get every replica its first server.

        Raises:
            EngineError: of the first one that fails; all are ended then, however far they are.
        """
        fills = [asyncio.ensure_future(replica.fill()) for replica in self.replicas]
        try:
            for filled in asyncio.as_completed(fills):
                await filled
                for replica in self.replicas:
                    if replica.failure is not None:
                        raise replica.failure
        except BaseException:
            for fill in fills:
                fill.cancel()
            await asyncio.gather(*fills, return_exceptions=True)
            await self.close()
            raise

    async def replica_of(self, session: str) -> Replica:
        """The replica that answers a session now; waits until one can.

        Raises:
            EngineError: none will.
        """
        while True:
            known = self._replica_by_session.get(session)
            if known is not None and known.server is not None:
                return known
            able = [replica for replica in self.replicas if replica.server is not None]
            if able:
                return self._assigned(session, min(able, key=lambda replica: (replica.n_assigned, replica.number)))
            self.check()
            hopeful = [replica for replica in self.replicas if replica.failure is None]
            waits = [asyncio.ensure_future(replica.changed.wait()) for replica in hopeful]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def check(self) -> None:
        """Raises:
        EngineError: no replica has a server, or will have one.
        """
        failures = [replica.failure for replica in self.replicas if replica.failure is not None]
        if len(failures) == len(self.replicas):
            raise EngineError(" ".join(dict.fromkeys(map(str, failures))))

    @property
    def has_a_server(self) -> bool:
        """Whether anybody can be asked now."""
        return any(replica.server is not None for replica in self.replicas)

    def release(self, session: str) -> None:
        """The session has ended."""
        replica = self._replica_by_session.pop(session, None)
        if replica is not None:
            replica.n_assigned -= 1

    async def hold_still(self) -> list[Server]:
        """The servers that answer; until `let_go` none of them is taken for hung. A silent one is replaced."""
        for replica in self.replicas:
            replica.is_held_still = True
        return [server for server in await asyncio.gather(*map(_answering, self.replicas)) if server is not None]

    async def let_go(self) -> None:
        """Weights have arrived."""
        for replica in self.replicas:
            replica.let_go()

    async def settle(
        self,
        dead: Mapping[Server, str],
        *,
        is_behind: Callable[[Server], bool],
        restore: Callable[[Server], Awaitable[None]],
    ) -> None:
        """Wait until every replica that is not lost for good has a server that is not behind.

        Args:
            dead: servers to why they must be replaced.

        Raises:
            EngineError: no replica is left, or a server takes the weights no more.
        """
        for replica in self.replicas:
            if replica.server is not None and replica.server in dead:
                replica.lost(replica.server, dead[replica.server])
        for replica in self.replicas:
            while replica.failure is None:
                server = replica.server
                if server is None:
                    await replica.changed.wait()
                elif not is_behind(server):
                    break
                else:
                    await _restored(replica, server, restore)
        self.check()

    async def close(self) -> None:
        """End every server that we started."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _assigned(self, session: str, replica: Replica) -> Replica:
        self.release(session)
        self._replica_by_session[session] = replica
        replica.n_assigned += 1
        return replica


async def _answering(replica: Replica) -> Server | None:
    server = replica.server
    if server is None or await server.answers(replica.settings.silence_s):
        return server
    replica.lost(server, f"it did not answer within {replica.settings.silence_s:g} s before weights were sent")
    return None


async def _restored(replica: Replica, server: Server, restore: Callable[[Server], Awaitable[None]]) -> None:
    replica.is_held_still = True
    try:
        await restore(server)
    except ServerGone as gone:
        replica.lost(server, str(gone))
    finally:
        replica.let_go()
