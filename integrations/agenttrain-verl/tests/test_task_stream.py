"""Our data cursor where veRL has its data loader: the local trainer's order, and where it stood after a resume."""

from __future__ import annotations

import pytest
from agenttrain.records import Task
from agenttrain.trainer.schedule import Cursor, tasks_at

from agenttrain_verl.controller import TaskStream

TASKS = [Task(id=str(n), input={}) for n in range(7)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def stream() -> TaskStream:
    return TaskStream(TASKS, batch=3, seed=5)


def test_steps_take_the_tasks_that_the_local_trainer_takes() -> None:
    """Over the end of an epoch too, and as often as they are asked for."""
    ours, cursor = stream(), Cursor()
    for step in range(1, 7):
        expected, cursor = tasks_at(TASKS, cursor, 3, 5)
        assert ids(ours.at(step)) == ids(ours.at(step)) == ids(expected)
        ours.done(step)


@pytest.mark.parametrize(("done", "ahead"), [(0, 1), (0, 4), (1, 2), (3, 4), (3, 6), (5, 5)])
def test_a_restored_stream_goes_on_after_what_is_trained(done: int, ahead: int) -> None:
    """Whatever was asked for ahead of it is asked for again."""
    whole, ours, again = stream(), stream(), stream()
    for step in range(1, done + 1):
        ours.at(step)
        ours.done(step)
    for step in range(done + 1, ahead + 1):
        ours.at(step)
    again.load_state_dict(ours.state_dict())
    assert [ids(again.at(step)) for step in range(done + 1, 9)] == [ids(whole.at(step)) for step in range(done + 1, 9)]


def test_no_task_is_twice_in_a_step() -> None:
    """Where a step asks for more than there are, it takes all of them."""
    assert sorted(ids(TaskStream(TASKS, batch=20, seed=5).at(3))) == [str(n) for n in range(7)]
