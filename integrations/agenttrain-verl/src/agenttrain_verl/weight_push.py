"""New weights from a trainer's rank, or from a checkpoint engine's worker, to the replica's EngineServer.

Invariant: every rank reads all the weights, since gathering a sharded tensor needs every rank; the first rank of the
replica sends them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import ray
from agenttrain.errors import AgenttrainError, EngineError, TrainerError
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from agenttrain_verl.ray_errors import first_line, own_error
from agenttrain_verl.server_spec import ServerSpec
from agenttrain_verl.weight_stream import Bucket, in_buckets

BASE_LAYER = ".base_layer."
"""What veRL puts into the name of a base weight under an adapter (utils/fsdp_utils.py, replace_lora_wrapper, 0.9.1)."""


class WeightPush(BaseRollout):  # type: ignore[misc]
    """veRL's adapter for the rollout "agenttrain"."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, *args: Any, **kwargs: Any
    ) -> None:
        """Take the configuration; the server may not be up yet.

        Args:
            replica_rank: -1: told by the process's own rank.
        """
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        rank = int(os.environ["RANK"])
        ranks_per_replica = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // ranks_per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks_per_replica == 0
        self._spec = ServerSpec.of_custom(self.config.custom)

    async def resume(self, tags: list[str]) -> None:
        """Nothing: the engine keeps its memory."""

    async def release(self) -> None:
        """Nothing: the engine keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Send weights; returns when the replica's next token is sampled from them.

        Args:
            global_steps: their version. None: the version stays, such as where memory was only lent to a reward model.
            peft_config: the weights are an adapter's alone; or, before base_sync_done, the base's under one.

        Raises:
            AgenttrainError: the engine refused them, or its process has died.
        """
        if wire_format != "named_tensors":
            raise TrainerError(
                f'Weights come as {wire_format!r}, and the rollout "agenttrain" takes named tensors. Set '
                "actor_rollout_ref.rollout.checkpoint_engine.backend to another one."
            )
        named = _of_base(ensure_async_iterator(weights))
        if not self.is_leader_rank:
            async for _ in named:
                pass
            return
        adapter = None if peft_config is None or not base_sync_done else plain(peft_config)
        sender = _Sender(self._spec.actor_name(self.replica_rank), f"replica {self.replica_rank}")
        await sender.begin(global_steps, adapter)
        try:
            async for bucket in in_buckets(named, n_bytes=self._bucket_bytes):
                await sender.put(bucket)
        except Exception as error:
            await sender.abandon(f"the trainer failed on them: {first_line(error)}")
            raise
        await sender.end()

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20


class _Sender:
    """The buckets of one push, to one server: one travels while the next is gathered.

    What the server refuses is kept and raised at the end: until then the other ranks gather, and wait for this one.
    """

    def __init__(self, actor_name: str, where: str) -> None:
        self._actor_name, self._where = actor_name, where
        self._server: Any = None
        self._travelling: Any = None
        self._refusal: AgenttrainError | None = None

    async def begin(self, version: int | None, adapter: Mapping[str, Any] | None) -> None:
        try:
            self._server = ray.get_actor(self._actor_name)
        except ValueError:
            self._refusal = EngineError(f"The process of {self._where} has died: no actor {self._actor_name} runs.")
            return
        await self._told(self._server.begin_weights.remote(version, adapter))

    async def put(self, bucket: Bucket) -> None:
        await self._arrived()
        if self._refusal is None:
            self._travelling = self._server.put_weights.remote(bucket)

    async def end(self) -> None:
        """Raises:
        AgenttrainError: what the server refused.
        """
        await self._arrived()
        if self._refusal is None:
            await self._told(self._server.end_weights.remote())
        elif self._server is not None:
            await self.abandon("it has refused them")
        if self._refusal is not None:
            raise self._refusal

    async def abandon(self, why: str) -> None:
        """The server need not wait for more."""
        if self._server is not None:
            await self._told(self._server.abandon_weights.remote(why))

    async def _arrived(self) -> None:
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            await self._told(travelling)

    async def _told(self, asked: Any) -> None:
        try:
            await asked
        except ray.exceptions.RayError as error:
            self._refusal = self._refusal or own_error(error, where=self._where)


async def _of_base(weights: AsyncIterator[tuple[str, Any]]) -> AsyncIterator[tuple[str, Any]]:
    """The same weights under the names of the model's own files."""
    async for name, tensor in weights:
        yield name.replace(BASE_LAYER, "."), tensor


def plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """peft's configuration as adapter_config.json holds it: enumerations by value, sets as sorted lists."""
    return {key: _plain(value) for key, value in table.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return getattr(value, "value", value)
