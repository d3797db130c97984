"""All servers of a run: which of them answers whom, and what is known of all.

A session stays with one replica, whose cache knows its prefix, as long as that replica has a server; while it is being
replaced and another one has, the session moves. Everything here runs on the engine's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agenttrain.errors import EngineError

from agenttrain_sglang.replica import Replica


class Fleet:
    """The replicas of a run, at least one."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self._replica_by_session: dict[str, Replica] = {}

    async def fill(self) -> None:
        """Get every replica its first server.

        Raises:
            EngineError: of the first one that fails; all are ended then.
        """
        await asyncio.gather(*(replica.fill() for replica in self.replicas))
        for replica in self.replicas:
            if replica.failure is not None:
                await self.close()
                raise replica.failure

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
            hopeful = [replica for replica in self.replicas if replica.failure is None]
            if not hopeful:
                failure = self.replicas[0].failure
                assert failure is not None
                raise EngineError(str(failure))
            waits = [asyncio.ensure_future(replica.changed.wait()) for replica in hopeful]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def release(self, session: str) -> None:
        """The session has ended."""
        replica = self._replica_by_session.pop(session, None)
        if replica is not None:
            replica.n_assigned -= 1

    async def close(self) -> None:
        """End every server that we started."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _assigned(self, session: str, replica: Replica) -> Replica:
        self.release(session)
        self._replica_by_session[session] = replica
        replica.n_assigned += 1
        return replica
