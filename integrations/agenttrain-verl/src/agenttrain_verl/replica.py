"""veRL's rollout replica "agenttrain": one EngineServer, beside the trainer's ranks or on a device of its own."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from agenttrain.errors import TrainerError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from agenttrain_verl.engine_server import EngineServer, ServerFacts
from agenttrain_verl.ray_errors import own_error
from agenttrain_verl.server_spec import ServerSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
MARGIN = 64
"""Calls that are no generate, at once."""


class EngineReplica(RolloutReplica):  # type: ignore[misc]
    """A RolloutReplica whose server holds any engine of agenttrain.

    Attributes:
        facts: what the engine says of itself, once it is up.
    """

    facts: ServerFacts

    async def launch_servers(self) -> None:
        """Start the actor where its workers are, and wait until its engine is ready.

        Raises:
            AgenttrainError: what the engine found wrong; or the replica is to do what it can't.
        """
        self._refuse()
        spec = ServerSpec.of_custom(self.config.custom)
        server = (
            ray.remote(EngineServer)
            .options(
                name=spec.actor_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=max(self.max_concurrency, 2 * spec.config.engine.concurrency + MARGIN),
                **await self._placement(spec),
            )
            .remote(spec, self.replica_rank)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = spec.actor_name(self.replica_rank)
        try:
            self.facts = await server.open.remote()
        except Exception as error:
            raise own_error(error, where=f"replica {self.replica_rank}") from error

    async def _placement(self, spec: ServerSpec) -> dict[str, Any]:
        """Ray's options: the node of the workers, and their GPUs where the engine is to have them.

        The workers hold the GPUs; an actor that asked Ray for them too would wait for ever.
        """
        seen = await asyncio.gather(*(worker.__ray_call__.remote(_node_and_devices) for worker in self.workers))
        node_id = seen[0][0]
        devices = sorted({device for _, visible in seen for device in visible.split(",") if device})
        variables = (
            {VISIBLE: ""}
            if spec.device == "cpu"
            else {VISIBLE: ",".join(devices), f"RAY_EXPERIMENTAL_NOSET_{VISIBLE}": "1"}
        )
        return {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            "runtime_env": {"env_vars": variables},
        }

    def _refuse(self) -> None:
        if self.rollout_mode == RolloutMode.COLOCATED or self.is_reward_model or self.is_teacher_model:
            raise TrainerError(
                'The rollout "agenttrain" serves the trained policy, and veRL asks it for a reward or teacher model. '
                "Name another rollout for that one in [verl.overrides]."
            )
        if self.nnodes > 1:
            raise TrainerError(
                f"A replica is to span {self.nnodes} nodes ({self.world_size} ranks), and an engine of agenttrain "
                "stays on one. Lower verl.tensor_parallel."
            )


def _node_and_devices(worker: Any) -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), os.environ.get(VISIBLE, "")
