"""veRL's agent loop worker, with a graph: an actor that the driver opens, asks and listens to.

veRL hands it groups and it runs our agent loop for each session, see `agent_loop`; evaluations don't pass through veRL.
Invariant: what is ours alone in a group's row is not written into TransferQueue, which would keep it beside each row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from agenttrain.errors import AgenttrainError
from agenttrain.records import RolloutRequest
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from agenttrain_verl.agent_loop import OURS
from agenttrain_verl.host import Host, HostSpec, Shipped, host_of_process, portable
from agenttrain_verl.verl_engine import VerlEngine


class RolloutWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """`ray.remote(RolloutWorker)` makes the actor; it runs nothing before `open`.

    Ray calls its process AgentLoopWorkerTQ: the name is inherited with what Ray makes of veRL's class (2.60: actor.py,
    _modify_class), and the class below it can't be pickled.
    """

    async def open(self, spec: HostSpec) -> None:
        """Load the graph in this process.

        Raises:
            AgenttrainError: graph, policy or plugins can't be opened here.
        """
        loop = asyncio.get_running_loop()
        self._engine = VerlEngine(
            self.llm_client,
            loop,
            name=spec.engine_name,
            max_length=spec.max_length,
            takes_seeds=spec.takes_seeds,
            stock=spec.stock,
        )
        is_here = ray.get_runtime_context().get_node_id() == spec.node_id
        try:
            await asyncio.to_thread(Host.open, spec, self._engine, loop, is_on_drivers_node=is_here)
        except AgenttrainError as error:
            raise portable(error) from None

    async def evaluate(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rollouts that veRL knows nothing of; `take` tells their results."""
        await host_of_process().begin(requests)

    async def take(self, timeout_s: float) -> list[Shipped]:
        """What has come since the last call; waits for the first as long as given."""
        return await host_of_process().take(timeout_s)

    async def stop(self) -> None:
        """Cut off what is under way; returns when it has ended as aborted, and `take` may tell it."""
        await host_of_process().stop()

    async def close(self) -> None:
        """Write and export what is left, and free the graph; the actor may be ended then."""
        await asyncio.to_thread(host_of_process().close)
        self._engine.close()

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **row: Any) -> None:
        """Put the rows of one rollout into TransferQueue, without what is for our agent loop alone."""
        rest = {name: value for name, value in row.items() if not name.startswith(OURS)}
        await super()._agent_loop_postprocess(output, validate, **rest)
