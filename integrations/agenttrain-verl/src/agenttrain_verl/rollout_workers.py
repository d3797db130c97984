"""The processes in which graphs run: asked for rollouts, watched, and replaced when one dies.

Groups and evaluation requests become results, each told to the run as it comes. Invariants: every request that was
taken has one final result, whatever dies; what a dead worker had written counts, what it had under way is told as
aborted and made again with its seed; no row of a group reaches veRL twice. Knows nothing of updates.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import transfer_queue as tq
from agenttrain.alarms import escapes_text
from agenttrain.errors import TrainerError
from agenttrain.protocols import Elsewhere
from agenttrain.records import RolloutRequest, RolloutResult
from agenttrain.reward.status import following
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from agenttrain_verl.agent_loop import KEPT, REQUESTS
from agenttrain_verl.emission import refusal
from agenttrain_verl.host import HostSpec, Shipped
from agenttrain_verl.rollout_worker import RolloutWorker
from agenttrain_verl.worker_logs import worker_trouble

TAKE_S = 5.0
"""How long a worker holds an empty answer back."""
STOP_S = 15.0
"""How long rollouts that are cut off may take to come home."""
HASTE_S = 3.0
"""How long a worker may take to close when the run ends by an error: what it waits for may be gone."""
SETTLED_S = 0.5
"""After so long without a result none is on its way."""
TRAIN = "train"
"""veRL's partition of training rows."""
UNDER_WAY = ("pending", "running")
"""A group's status in veRL's books until the worker that has it says how it ended."""


@dataclass(slots=True, kw_only=True)
class Place:
    """One rollout to make: the request of now, and its final result once there is one."""

    request: RolloutRequest
    worker: int
    uid: str | None = None
    """Of its group in veRL; None: an evaluation."""
    session: int = 0
    result: RolloutResult | None = None
    refused: str = ""
    """Why veRL gets no row of it, though it may be trained."""


@dataclass(slots=True, kw_only=True)
class Group:
    """A row that veRL handed over: the rollouts of one task."""

    row: TensorDict
    places: list[Place]

    @property
    def results(self) -> list[RolloutResult]:
        """The final ones, in the order of the sessions."""
        return [place.result for place in self.places if place.result is not None]

    @property
    def refused(self) -> dict[str, str]:
        """Rollout id to why veRL gets no row of it."""
        return {place.result.rollout.id: place.refused for place in self.places if place.result and place.refused}


@dataclass(slots=True)
class _Worker:
    number: int
    actor: Any
    pump: threading.Thread | None = None
    is_open: bool = False
    """It has its graph, and has not died: it may be asked."""


@dataclass(slots=True)
class _Books:
    """Everything that is under way; guarded by one condition."""

    places: dict[tuple[str, int, str, int], Place] = field(default_factory=dict)
    """By phase, step, task and sibling, until their result is final."""
    groups: dict[str, Group] = field(default_factory=dict)
    trouble: BaseException | None = None
    heard_at: float = field(default_factory=time.monotonic)
    restarts: int = 0
    is_cut_off: bool = False
    """What is under way is being ended: nothing of it is made again."""
    is_closed: bool = False


def place_of(request: RolloutRequest) -> tuple[str, int, str, int]:
    """What names a rollout's place whatever its attempt."""
    return request.phase, request.step, request.task.id, request.sibling


class RolloutWorkers(AgentLoopManagerTQ):  # type: ignore[misc]
    """veRL's agent loop manager, whose workers hold a graph."""

    def __init__(
        self,
        *,
        config: Any,
        llm_client: Any,
        host: HostSpec,
        n_workers: int,
        elsewhere: Elsewhere,
        restarts: int,
        silence_s: float,
    ) -> None:
        super().__init__(config=config, llm_client=llm_client, teacher_client=None, reward_loop_worker_handles=[])
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        self._host, self._n_workers, self._elsewhere = host, n_workers, elsewhere
        self._restarts, self._silence_s = restarts, silence_s
        self._books, self._lock = _Books(), threading.Condition()
        self._workers: dict[int, _Worker] = {}
        self._numbers = itertools.count()
        self._news: list[str] = []
        self._n_escaped, self._escape = 0, ""

    # ── their life ───────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Start the workers and load the graph in each.

        Raises:
            AgenttrainError: the graph can't be opened there.
        """
        self._nodes = _nodes()
        opened = [self._started() for _ in range(self._n_workers)]
        ray.get([worker.actor.open.remote(self._host) for worker in opened])
        for worker in opened:
            self._watch(worker)

    def _started(self) -> _Worker:
        number = next(self._numbers)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=self._nodes[number % len(self._nodes)], soft=True
        )
        actor = self.agent_loop_workers_class.options(scheduling_strategy=strategy).remote(
            self.config, self.llm_client, None, []
        )
        worker = _Worker(number, actor)
        with self._lock:
            self._workers[number] = worker
        return worker

    def _watch(self, worker: _Worker) -> None:
        worker.pump = threading.Thread(target=self._pump, args=(worker,), name="agenttrain-results", daemon=True)
        worker.pump.start()
        with self._lock:
            worker.is_open = True
            self._lock.notify_all()

    def close(self) -> None:
        """End the workers; what they had under way is lost. Safe to call twice."""
        with self._lock:
            if self._books.is_closed:
                return
            self._books.is_closed = True
            workers = list(self._workers.values())
            patience_s = STOP_S if self._books.trouble is None else HASTE_S
            self._lock.notify_all()
        for worker in workers:
            try:
                ray.get(worker.actor.close.remote(), timeout=patience_s)
            except Exception:
                pass  # it has died, or hangs in a graph: it is ended either way
            ray.kill(worker.actor)
        for worker in workers:
            if worker.pump is not None:
                worker.pump.join(timeout=STOP_S)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand groups to the workers without waiting; each row holds the requests of one."""
        for at in range(len(prompts)):
            row = prompts[at : at + 1]
            uid, requests = str(row["uid"][0]), list(_cell(row, REQUESTS))
            kept: Mapping[int, RolloutResult] = _cell(row, KEPT) or {}
            worker = self._idlest()
            with self._lock:
                places = [
                    Place(request=request, worker=worker.number, uid=uid, session=n, result=kept.get(n))
                    for n, request in enumerate(requests)
                ]
                for place in places:
                    place.refused = refusal(place.result, self._host.rules) if place.result is not None else ""
                self._books.groups[uid] = Group(row=row, places=places)
                self._books.places |= {place_of(p.request): p for p in places if p.result is None}
                self._books.heard_at = time.monotonic()
            self._asked(worker, "generate_sequences", row)

    def evaluate(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Make rollouts that are not trained on; waits for all.

        Raises:
            KeyboardInterrupt: the run is to end; the rollouts under way are cut off.
            AgenttrainError: what ended the run.
        """
        shares: dict[int, list[RolloutRequest]] = {}
        places = []
        for request in requests:
            worker = self._idlest()
            place = Place(request=request, worker=worker.number)
            with self._lock:
                self._books.places[place_of(request)] = place
                self._books.heard_at = time.monotonic()
            shares.setdefault(worker.number, []).append(request)
            places.append(place)
        for number, share in shares.items():
            self._asked(self._workers[number], "evaluate", share)
        self._wait_for(places)
        return [place.result for place in places if place.result is not None]

    def take_group(self, uid: str) -> Group:
        """A group that veRL has the rows of; waits for results that are still on their way.

        Raises:
            KeyboardInterrupt, AgenttrainError: as `check`.
        """
        with self._lock:
            group = self._books.groups[uid]
        self._wait_for(group.places)
        with self._lock:
            del self._books.groups[uid]
        return group

    def check(self) -> None:
        """Ask often while rollouts are made.

        Raises:
            KeyboardInterrupt: the run is to end; the rollouts under way are cut off.
            AgenttrainError: what ended the run, in a worker or in what watches them.
        """
        try:
            self._elsewhere.check_stop()
        except KeyboardInterrupt:
            self.cut_off()
            raise
        with self._lock:
            silent_s = time.monotonic() - self._books.heard_at
            trouble, n_open = self._books.trouble, len(self._books.places)
        if trouble is not None:
            raise trouble
        if n_open and silent_s > self._silence_s:
            raise TrainerError(
                f"{n_open} rollouts are under way, and nothing came back for {silent_s:.0f} s (verl.silence_s is "
                f"{self._silence_s:g}). See the workers' logs, or raise verl.silence_s where rollouts take that long."
            )

    def cut_off(self) -> None:
        """End the rollouts under way as aborted, and take their records; what had not begun is forgotten."""
        with self._lock:
            self._books.is_cut_off = True
            actors = [worker.actor for worker in self._workers.values() if worker.is_open]
        try:
            ray.get([actor.stop.remote() for actor in actors], timeout=STOP_S)
        except ray.exceptions.RayError:
            pass  # a worker that died, or a graph that does not return: what they had is told when the run goes on
        with self._lock:
            self._books.heard_at = time.monotonic()
            while time.monotonic() - self._books.heard_at < SETTLED_S and self._books.trouble is None:
                self._lock.wait(timeout=SETTLED_S)
            self._books.places.clear()
            self._books.groups.clear()
            self._books.is_cut_off = False

    def _idlest(self) -> _Worker:
        """Of those that may be asked; waits while the last one is being replaced.

        Raises:
            KeyboardInterrupt, AgenttrainError: as `check`.
        """
        while True:
            self.check()
            with self._lock:
                there = [worker for worker in self._workers.values() if worker.is_open]
                if there:
                    busy = [place.worker for place in self._books.places.values()]
                    return min(there, key=lambda worker: busy.count(worker.number))
                self._lock.wait(timeout=0.25)

    def _asked(self, worker: _Worker, method: str, what: Any) -> None:
        """A worker that dies of it is noticed by who watches it."""
        getattr(worker.actor, method).remote(what)

    def _wait_for(self, places: Sequence[Place]) -> None:
        while True:
            self.check()
            with self._lock:
                if all(place.result is not None for place in places):
                    return
                self._lock.wait(timeout=0.25)

    # ── on a thread for each worker ──────────────────────────────────────────────────────────────────────────────

    def _pump(self, worker: _Worker) -> None:
        while True:
            try:
                arrived: list[Shipped] = ray.get(worker.actor.take.remote(TAKE_S))
                for shipped in arrived:
                    self._arrived(shipped)
            except ray.exceptions.RayActorError as error:
                if not self._books.is_closed:
                    self._replaced(worker, error)
                return
            except BaseException as error:
                self.give_up(error)
                return
            if self._books.is_closed:
                return

    def _replaced(self, dead: _Worker, why: BaseException) -> None:
        try:
            self._replace(dead, why)
        except BaseException as error:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """End the run with an error: whoever waits for rollouts gets the first one. Any thread."""
        with self._lock:
            self._books.trouble = self._books.trouble or error
            self._lock.notify_all()

    def _arrived(self, shipped: Shipped) -> None:
        if shipped.error is not None:
            self.give_up(shipped.error)
        result = shipped.result
        if result is None:
            return
        self._elsewhere.rolled_out(result, is_stored=shipped.is_stored)
        with self._lock:
            self._books.heard_at = time.monotonic()
            self._n_escaped += shipped.escaped[0]
            self._escape = self._escape or shipped.escaped[1]
            place = self._books.places.get(place_of(result.request))
            if place is not None:
                self._entered(place, result, shipped.refused)

    def _entered(self, place: Place, result: RolloutResult, refused: str) -> None:
        """A result takes its place, unless it is to be made again; with the lock."""
        again = following(result.request, result.rollout.status)
        if again is not None:
            place.request = again
            return
        place.result, place.refused = result, refused
        del self._books.places[place_of(result.request)]
        self._lock.notify_all()

    def _replace(self, dead: _Worker, error: BaseException) -> None:
        """Tell what became of a dead worker's rollouts, and have those that are not done made by a new one."""
        why = worker_trouble(error)
        ray.kill(dead.actor)  # one that merely can't be reached must not go on
        with self._lock:
            dead.is_open = False
            self._books.restarts += 1
            if self._books.restarts > self._restarts:
                raise TrainerError(
                    f"A rollout worker died: {why}. {self._restarts} were replaced already (verl.worker_restarts). "
                    "Look for what ends them in the logs: often memory."
                ) from error
        n_lost = self._told_as_lost(dead)
        with self._lock:
            self._news.append(f"a rollout worker was replaced, and {n_lost} rollouts are made again: {why}")
        worker = self._started()
        ray.get(worker.actor.open.remote(self._host))
        self._watch(worker)
        self._hand_over(dead, worker)

    def _told_as_lost(self, dead: _Worker) -> int:
        """Enter what the run's folder says of a dead worker's rollouts; gives how many were under way."""
        with self._lock:
            places = [place for place in self._books.places.values() if place.worker == dead.number]
        n_lost = 0
        while places:  # again for those that were made again, and may have ended before it was told
            told = self._elsewhere.lost([place.request for place in places])
            known = [(place, result) for place, result in zip(places, told, strict=True) if result is not None]
            with self._lock:
                for place, result in known:
                    if place_of(place.request) in self._books.places:
                        self._entered(place, result, refusal(result, self._host.rules))
            n_lost += sum(result.rollout.status == "aborted" for _, result in known)
            places = [place for place, _ in known if place.result is None]
        return n_lost

    def _hand_over(self, dead: _Worker, worker: _Worker) -> None:
        """Ask a new worker for what a dead one was asked for and has not done."""
        with self._lock:
            if self._books.is_cut_off:
                return
            of_dead = [place for place in self._books.places.values() if place.worker == dead.number]
            evaluations = [place.request for place in of_dead if place.uid is None]
            groups = {u: g for u, g in self._books.groups.items() if any(p.worker == dead.number for p in g.places)}
            for place in (*of_dead, *(place for group in groups.values() for place in group.places)):
                place.worker = worker.number
            self._books.heard_at = time.monotonic()
        if evaluations:
            self._asked(worker, "evaluate", evaluations)
        for group in _unfinished(groups):
            self._asked(worker, "generate_sequences", self._row_again(group))

    def _row_again(self, group: Group) -> TensorDict:
        """The row for a new worker: what is done is handed over again, what is not is to be made."""
        row = group.row.clone()
        with self._lock:
            requests = [place.request for place in group.places]
            kept = {place.session: place.result for place in group.places if place.result is not None}
        _set_cell(row, REQUESTS, requests)
        _set_cell(row, KEPT, kept)
        return row

    def news(self) -> list[str]:
        """What happened to the workers since this was last asked, in words."""
        with self._lock:
            news, self._news = self._news, []
            n, where, self._n_escaped, self._escape = self._n_escaped, self._escape, 0, ""
        return [*news, escapes_text(n, where)] if n else news


def _unfinished(groups: Mapping[str, Group]) -> list[Group]:
    """The groups that veRL waits for, without the rows that their dead worker put there.

    They are put again: a row may be there by its key alone, since a key is registered before its data is written
    (TransferQueue 0.1.11, interface.py, async_kv_batch_put). Nobody else changes a group before its status is told.
    """
    there = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
    waited_for = [uid for uid in groups if there.get(uid, {}).get("status") in UNDER_WAY]
    half = [key for key in there if "_" in key and key.rsplit("_", 2)[0] in waited_for]
    if half:
        tq.kv_clear(keys=half, partition_id=TRAIN)
    return [groups[uid] for uid in waited_for]


def _set_cell(row: TensorDict, name: str, value: Any) -> None:
    """Put one Python object into a batch of one row."""
    row[name] = NonTensorStack.from_list([NonTensorData(value)])


def _cell(row: TensorDict, name: str) -> Any:
    value = row.get(name)[0]
    return getattr(value, "data", value)


def _nodes() -> list[str]:
    """Ids of the nodes that can run graphs."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
