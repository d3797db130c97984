"""The processes without which a run can't go on: when one dies, whoever waits is told instead of waiting for ever.

Ray tells the caller of an actor that has died, and nobody else: TransferQueue's clients wait for an answer without a
limit (0.1.11, client.py: the pool of controller calls has no timeout), in the driver and in the trainer's ranks. So the
first death ends the others that are watched, and this process's calls to the queue. Knows no rollouts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
import transfer_queue as tq
from agenttrain.errors import TrainerError
from ray.exceptions import ActorDiedError

from agenttrain_verl.worker_logs import worker_trouble

LOOK_EVERY_S = 1.0
FREE_EVERY_S = 0.2
"""Between two times that calls to a dead queue are ended; whoever made one may make the next."""


class ProcessWatch:
    """Looks at actors of Ray on a thread of its own, until `close`."""

    def __init__(self, actors: Mapping[str, Any], *, next_step: str, died: Callable[[TrainerError], None]) -> None:
        """Begin to look.

        Args:
            actors: by what they are, such as "the trainer's rank 0".
            next_step: how a user goes on.
            died: told of the first death, on the watch's thread.
        """
        self._actors, self._next_step, self._died = dict(actors), next_step, died
        self._trouble: TrainerError | None = None
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agenttrain-watch", daemon=True)
        self._thread.start()

    def trouble(self, *, within_s: float = 0.0) -> TrainerError | None:
        """What ends the run, once a process has died.

        Args:
            within_s: to wait for it: who called a dead process may know of it before the watch does.
        """
        self._noticed.wait(within_s)
        return self._trouble

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        dead = self._first_dead()
        if dead is None:
            return
        what, error = dead
        self._trouble = TrainerError(f"The run can't go on without {what}: {worker_trouble(error)}. {self._next_step}")
        self._noticed.set()
        self._died(self._trouble)
        for actor in self._actors.values():
            with suppress(Exception):  # it may have died too
                ray.kill(actor)
        tq.interface._TQ_STORAGE = None  # tq.close() would ask dead units to shut down, and warn that they don't
        while not self._closed.wait(FREE_EVERY_S):
            _end_calls_to_the_queue()

    def _first_dead(self) -> tuple[str, ActorDiedError] | None:
        """What has died, and of what; None: the watch was closed before."""
        asked = {actor.__ray_ready__.remote(): what for what, actor in self._actors.items()}
        while not self._closed.wait(LOOK_EVERY_S):
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for answer in done:
                what = asked.pop(answer)
                try:
                    ray.get(answer)
                except ActorDiedError as error:
                    return what, error
                except Exception:
                    pass  # it can't be reached just now; it is asked again
                asked[self._actors[what].__ray_ready__.remote()] = what
        return None


def vital_of(controller: Any) -> dict[str, Any]:
    """veRL's actors that nothing replaces, by what they are: the ranks, and TransferQueue's.

    Args:
        controller: veRL's trainer; its worker groups may share ranks.
    """
    groups = [getattr(controller, f"{name}_wg", None) for name in ("actor_rollout", "critic", "ref_policy")]
    ranks = {rank._actor_id: rank for group in groups if group is not None for rank in group.workers}
    units = ((tq.interface._TQ_STORAGE or {}).get("SimpleStorage") or {}).values()
    return {
        **{f"the trainer's rank {n}": rank for n, rank in enumerate(ranks.values())},
        "the transfer queue's controller": tq.interface._TQ_CONTROLLER,
        **{f"the transfer queue's storage {n}": unit for n, unit in enumerate(units)},
    }


def _end_calls_to_the_queue() -> None:
    """End what this process has asked the queue: a call that is ended raises where it was made."""
    client = tq.interface._TQ_CLIENT
    loop = getattr(client, "_loop", None)
    if loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
