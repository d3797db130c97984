"""A run, as it looks to a trainer whose rollouts are made in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.earlier_lives import UNDER_WAY, KeptRollouts
from agenttrain.elsewhere import RunElsewhere
from agenttrain.graph.roles import RoleBook
from agenttrain.records import CallSite, Rollout, RolloutRequest, RolloutResult, Status, Task, Turn
from agenttrain.run_folder import RunFolder
from agenttrain.trajectory.tree import trajectories


class World:
    """A run of one life that was, and of one that is; `worker` is the file of a process that makes rollouts for it."""

    def __init__(self, folder: Path, kept: KeptRollouts) -> None:
        self.run = RunFolder(folder)
        self.store, self.worker = SqliteStore(self.run.rollouts), SqliteStore(self.run.rollouts)
        self.noted: list[str] = []
        self.should_stop = False
        self.roles = RoleBook(train=["answer"])
        self.elsewhere = RunElsewhere(
            run=self.run,
            life=1,
            store=self.store,
            kept=kept,
            roles=self.roles,
            note=lambda result: self.noted.append(result.rollout.id),
            is_of_these_weights=lambda result: True,
            should_stop=lambda: self.should_stop,
        )

    def begins(self, request: RolloutRequest) -> Turn:
        """In the worker: a rollout with one turn, which stand on the disk."""
        made = turn(request)
        self.worker.put_begun(request, started_at=1.0)
        self.worker.put_intent(turn_id=made.id, rollout_id=request.rollout_id, started_at=1.0)
        self.worker.put_turn(made)
        self.worker.flush()
        return made

    def ends(self, request: RolloutRequest, status: Status = "completed") -> RolloutResult:
        """In the worker: a whole rollout."""
        ended = result(request, status, self.begins(request))
        self.worker.put_result(ended)
        self.worker.flush()
        return ended


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, KeptRollouts([result(asked(0, life=0)), result(asked(1, life=0), "environment_failure")]))
    yield made
    made.store.close()
    made.worker.close()


def asked(sibling: int, *, life: int = 1) -> RolloutRequest:
    return RolloutRequest(task=Task(id="t", input={"n": 1}), phase="train", step=1, sibling=sibling, life=life)


def turn(request: RolloutRequest) -> Turn:
    return Turn(
        id=f"{request.rollout_id}#0",
        rollout_id=request.rollout_id,
        index=0,
        role="trained",
        role_reason="node: answer",
        site=CallSite(node="answer"),
        prompt_ids=(1, 2),
        response_ids=(3, 4, 5),
        response_logprobs=(-0.5, -0.25, -0.125),
        weight_versions=(0, 0, 0),
        ended_at=2.0,
    )


def result(request: RolloutRequest, status: Status = "completed", *turns: Turn) -> RolloutResult:
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase=request.phase,
        step=request.step,
        sibling=request.sibling,
        attempt=request.attempt,
        remake=request.remake,
        life=request.life,
        status=status,
        started_at=1.0,
    )
    return RolloutResult(request=request, rollout=rollout, turns=turns, trajectories=trajectories(turns), samples=())


def test_a_step_goes_on_with_what_earlier_lives_made(world: World) -> None:
    """What ended stands and is noted, a failure is tried again, and what is still to be made is of this life."""
    gone_on = world.elsewhere.go_on([asked(sibling, life=0) for sibling in range(3)])
    assert [made.rollout.sibling for made in gone_on.kept.values()] == [0]
    assert {n: (r.sibling, r.attempt, r.life) for n, r in gone_on.open.items()} == {1: (1, 1, 1), 2: (2, 0, 1)}
    assert world.noted == [asked(0, life=0).rollout_id, asked(1, life=0).rollout_id]


def test_what_another_node_made_is_stored_here(world: World) -> None:
    """Whole, with its turns."""
    ended = result(asked(0), "completed", turn(asked(0)))
    world.elsewhere.rolled_out(ended, is_stored=False)
    world.store.flush()
    assert list(read_store(world.run.rollouts).results()) == [ended]
    assert world.noted == [ended.rollout.id]


def test_what_was_written_by_its_process_is_not_written_again(world: World) -> None:
    """It stands in one file."""
    ended = world.ends(asked(0))
    world.elsewhere.rolled_out(ended, is_stored=True)
    world.store.flush()
    assert not _rollouts_in(world.store.path)
    assert list(read_store(world.run.rollouts).results()) == [ended]
    assert world.noted == [ended.rollout.id]


def test_selectors_are_known_to_have_matched(world: World) -> None:
    """The graph's calls were made in another process, and this one is asked about them."""
    assert len(world.roles.unmatched()) == 1
    world.elsewhere.rolled_out(world.ends(asked(0)), is_stored=True)
    assert world.roles.unmatched() == []


def test_a_lost_rollout_that_was_under_way_is_told_as_aborted(world: World) -> None:
    """With the turns that its process had written, and noted once."""
    made = world.begins(asked(0))
    (told,) = world.elsewhere.lost([asked(0)])
    assert told is not None
    assert (told.rollout.status, told.rollout.cause, told.rollout.n_sampled_ids) == ("aborted", UNDER_WAY, 3)
    assert told.turns == (made,)
    world.store.flush()
    view = read_store(world.run.rollouts)
    assert view.unfinished() == ()
    assert view.rollout(told.rollout.id) == told.rollout
    assert world.noted == [told.rollout.id]


def test_a_lost_rollout_that_had_ended_keeps_its_end(world: World) -> None:
    """Its process died between writing and telling: it is no other than the one that was written."""
    ended = world.ends(asked(0))
    assert world.elsewhere.lost([asked(0)]) == [ended]
    world.store.flush()
    assert list(read_store(world.run.rollouts).results()) == [ended]
    assert world.noted == [ended.rollout.id]


def test_a_lost_rollout_that_had_not_begun_leaves_nothing(world: World) -> None:
    """Nor does one whose records lie on another node."""
    world.begins(asked(1))
    told = world.elsewhere.lost([asked(0), asked(1)])
    assert [result is None for result in told] == [True, False]
    world.store.flush()
    assert [rollout.sibling for rollout in read_store(world.run.rollouts).rollouts()] == [1]


def test_a_stop_is_passed_on(world: World) -> None:
    """As Ctrl-C is in the process of the run."""
    world.elsewhere.check_stop()
    world.should_stop = True
    with pytest.raises(KeyboardInterrupt):
        world.elsewhere.check_stop()


def _rollouts_in(path: Path) -> list[str]:
    import sqlite3

    with sqlite3.connect(path) as connection:
        return [id for (id,) in connection.execute("SELECT rollout_id FROM results")]
