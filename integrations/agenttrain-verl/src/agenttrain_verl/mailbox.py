"""veRL's checkpoint engine "agenttrain": weights through Ray's object store, where ranks and replicas are apart.

It needs no GPU and no group of processes that a dead replica would break. Invariant: every replica gets the weights of
one round, whole; the first rank sends, all of them read.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from agenttrain_verl.mailbox_actor import Mailbox
from agenttrain_verl.ray_errors import first_line, own_error
from agenttrain_verl.weight_stream import in_buckets, unpacked

NAME = "agenttrain"


@CheckpointEngineRegistry.register(NAME)
class MailboxEngine(CheckpointEngine):  # type: ignore[misc]
    """One of a sender or of a receiver."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_bytes, self._is_master = bucket_size, is_master
        self._box: Any = None
        self._own_box: Any = None
        """Of the sender. Ray ends an actor when the handle that made it is gone, whoever else has one."""
        self._round, self._receiver, self._n_receivers = "", -1, 0

    def prepare(self) -> dict[str, Any]:
        """Make the mailbox, at the sender, the first time."""
        if not self._is_master:
            return {}
        if self._own_box is None:
            self._own_box = ray.remote(Mailbox).options(num_cpus=0).remote()
        return {"box": self._own_box}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everybody gets the sender's mailbox and the name of the round."""
        box = next(each["box"] for each in metadata if each)
        name = secrets.token_hex(8)

        def of(receivers: Sequence[int]) -> dict[str, list[Any]]:
            n = len(receivers)
            return {
                "box": [box] * n,
                "name": [name] * n,
                "receiver": list(receivers),
                "n_receivers": [rollout_world_size] * n,
            }

        return of([-1] * actor_wg_world_size), of(range(rollout_world_size))

    def init_process_group(self, box: Any, name: str, receiver: int, n_receivers: int) -> None:
        """Take part in a round."""
        self._box, self._round, self._receiver, self._n_receivers = box, name, receiver, n_receivers

    def finalize(self) -> None:
        """The round is over; the mailbox is empty, since all have fetched all."""
        self._box = None

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> dict[str, float]:
        """Send the weights to all receivers, from the first rank; read them, on the others.

        Raises:
            EngineError: a receiver fetches nothing any more.
        """
        named = ensure_async_iterator(weights)
        if not self._is_master:
            async for _ in named:
                pass
            return {}
        number = 0
        await self._asked(self._box.begin.remote(self._round, self._n_receivers))
        try:
            async for bucket in in_buckets(named, n_bytes=self._bucket_bytes):
                await self._asked(self._box.put.remote(number, [ray.put(bucket)]))
                number += 1
        except Exception as error:
            await self._asked(self._box.fail.remote(first_line(error)))
            raise
        await self._asked(self._box.end.remote(number))
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The weights of the round, in the sender's order.

        Raises:
            EngineError: the sender has failed.
        """
        number = 0
        while references := await self._asked(self._box.get.remote(self._round, self._receiver, number)):
            for name, tensor in unpacked(await references[0]):
                yield name, tensor
            del references
            number += 1

    async def _asked(self, reference: Any) -> Any:
        try:
            return await reference
        except ray.exceptions.RayError as error:
            raise own_error(error, where="the mailbox of weights") from error
