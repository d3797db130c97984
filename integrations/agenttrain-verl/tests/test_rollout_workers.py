"""What becomes of the rollouts of a worker that has died: the books of who asks them, on a real run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.earlier_lives import KeptRollouts
from agenttrain.elsewhere import RunElsewhere
from agenttrain.errors import TrainerError
from agenttrain.graph.roles import RoleBook
from agenttrain.records import Rollout, RolloutRequest, RolloutResult, Status, Task
from agenttrain.reward.status import MAX_REMAKES
from agenttrain.run_folder import RunFolder

from agenttrain_verl.emission import RowRules

CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None, model=None))


class World:
    """Rollouts asked of worker 0, which writes into the run's folder and dies before it tells anything."""

    def __init__(self, folder: Path) -> None:
        from agenttrain_verl.rollout_workers import RolloutWorkers, _Worker

        self.run = RunFolder(folder)
        self.store, self.worker = SqliteStore(self.run.rollouts), SqliteStore(self.run.rollouts)
        self.noted: list[str] = []
        self.workers = RolloutWorkers(
            config=CONFIG,
            llm_client=None,
            host=SimpleNamespace(rules=RowRules(max_length=64)),  # type: ignore[arg-type]
            n_workers=1,
            elsewhere=RunElsewhere(
                run=self.run,
                life=0,
                store=self.store,
                kept=KeptRollouts(),
                roles=RoleBook(),
                note=lambda result: self.noted.append(result.rollout.id),
                is_of_these_weights=lambda result: True,
                should_stop=lambda: False,
            ),
            restarts=1,
            silence_s=1.0,
        )
        self.dead = _Worker(0, None)

    def asked(self, request: RolloutRequest, *, worker: int = 0) -> Any:
        from agenttrain_verl.rollout_workers import Place, place_of

        place = Place(request=request, worker=worker)
        self.workers._books.places[place_of(request)] = place
        return place

    def begins(self, request: RolloutRequest) -> None:
        self.worker.put_begun(request, started_at=1.0)
        self.worker.flush()

    def ends(self, request: RolloutRequest, status: Status = "completed") -> RolloutResult:
        self.begins(request)
        result = RolloutResult(request=request, rollout=rollout(request, status), turns=(), trajectories=(), samples=())
        self.worker.put_result(result)
        self.worker.flush()
        return result


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()
    made.worker.close()


def request(sibling: int = 0) -> RolloutRequest:
    return RolloutRequest(task=Task(id="t", input={}), phase="train", step=1, sibling=sibling)


def rollout(of: RolloutRequest, status: Status) -> Rollout:
    return Rollout(
        id=of.rollout_id,
        task_id="t",
        phase=of.phase,
        step=1,
        sibling=of.sibling,
        attempt=of.attempt,
        remake=of.remake,
        status=status,
        started_at=1.0,
    )


def test_what_was_under_way_is_made_again_with_its_seed(world: World) -> None:
    """Another attempt would draw others; one that another worker has is not touched."""
    mine, others = world.asked(request(0)), world.asked(request(1), worker=1)
    world.begins(request(0))
    world.begins(request(1))
    assert world.workers._told_as_lost(world.dead) == 1
    assert (mine.request.attempt, mine.request.remake, mine.result) == (0, 1, None)
    assert (others.request, others.result) == (request(1), None)
    assert world.noted == [request(0).rollout_id]


def test_what_had_ended_is_final(world: World) -> None:
    """It was written, and died in the outbox of its process."""
    place, ended = world.asked(request()), world.ends(request())
    assert world.workers._told_as_lost(world.dead) == 0
    assert place.result == ended
    assert world.workers._books.places == {}


def test_what_had_not_begun_is_asked_for_as_it_was(world: World) -> None:
    """It was nobody's turn: there is nothing to tell."""
    place = world.asked(request())
    assert world.workers._told_as_lost(world.dead) == 0
    assert (place.request, place.result, world.noted) == (request(), None, [])


def test_a_failure_that_was_being_tried_again_is_followed_to_its_last_attempt(world: World) -> None:
    """The worker tries again by itself: the first attempt has ended, the second was under way."""
    place, second = world.asked(request()), replace(request(), attempt=1)
    world.ends(request(), "environment_failure")
    world.begins(second)
    assert world.workers._told_as_lost(world.dead) == 1
    assert (place.request.attempt, place.request.remake) == (1, 1)
    assert world.noted == [request().rollout_id, second.rollout_id]
    world.store.flush()
    assert read_store(world.run.rollouts).unfinished() == ()


def test_what_was_made_again_too_often_stays_aborted(world: World) -> None:
    """As in the pool of one process: a rollout that ends its worker each time ends the group, not the run."""
    last = replace(request(), remake=MAX_REMAKES)
    place = world.asked(last)
    world.begins(last)
    assert world.workers._told_as_lost(world.dead) == 1
    assert place.result is not None
    assert place.result.rollout.status == "aborted"


def test_nothing_is_handed_over_while_all_is_cut_off(world: World) -> None:
    """A worker that dies while the run is being stopped takes nothing up again."""
    world.asked(request())
    world.workers._books.is_cut_off = True
    world.workers._hand_over(world.dead, SimpleNamespace(number=1))  # type: ignore[arg-type]
    assert [place.worker for place in world.workers._books.places.values()] == [0]


def test_who_asks_waits_for_the_worker_that_takes_a_dead_ones_place(world: World) -> None:
    """Asked before it has its graph, it would fail the group; nobody would ask again."""
    from agenttrain_verl.rollout_workers import _Worker

    fresh = _Worker(1, None)
    world.workers._workers = {0: world.dead, 1: fresh}
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(world.workers._idlest)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.3)
        fresh.is_open = True
        assert asked.result(timeout=5) is fresh


def test_who_asks_is_told_that_a_worker_can_not_be_replaced(world: World) -> None:
    world.workers._workers = {0: world.dead}
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(world.workers._idlest)
        world.workers.give_up(TrainerError("too often"))
        with pytest.raises(TrainerError, match="too often"):
            asked.result(timeout=5)
