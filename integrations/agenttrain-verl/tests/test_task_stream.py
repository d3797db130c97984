"""Our data cursor where veRL has its data loader: the local trainer's order, and where it stood after a resume."""

from __future__ import annotations

import pytest
from agenttrain.records import Task
from agenttrain.trainer.schedule import Cursor, tasks_at

from agenttrain_verl.controller import TaskStream

TASKS = [Task(id=str(n), input={}) for n in range(7)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_steps_take_the_tasks_that_the_local_trainer_takes() -> None:
    """Over the end of an epoch too."""
    stream, cursor = TaskStream(TASKS, batch=3, seed=5), Cursor()
    for _ in range(6):
        expected, cursor = tasks_at(TASKS, cursor, 3, 5)
        assert ids(stream.take(3)) == ids(expected)


@pytest.mark.parametrize("taken", [[], [3], [3, 3], [1], [3, 1], [2, 2, 2]])
def test_a_restored_stream_goes_on_where_it_stood(taken: list[int]) -> None:
    """In the middle of a batch too, where rollouts are asked for one by one."""
    stream = TaskStream(TASKS, batch=3, seed=5)
    for n in taken:
        stream.take(n)
    again = TaskStream(TASKS, batch=3, seed=5)
    again.load_state_dict(stream.state_dict())
    assert [ids(again.take(2)) for _ in range(5)] == [ids(stream.take(2)) for _ in range(5)]


def test_more_than_all_tasks_may_be_asked_for() -> None:
    """They come again, shuffled anew."""
    assert len(TaskStream(TASKS, batch=3, seed=5).take(20)) == 20
