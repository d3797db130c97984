"""What runs rollouts in a worker: real graphs and the real local engine, in this process."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.errors import EscapeError, GraphError, RewardError, TrainerError
from agenttrain.evaluation import opened
from agenttrain.records import RolloutResult
from agenttrain.run_folder import new_run

from agenttrain_verl.host import Host, Shipped, host_of_process, portable

SOON_S = 60.0
"""How long a test waits for what must happen, on a busy machine."""


async def taken(host: Host, n: int) -> list[Shipped]:
    """The next n that are shipped."""
    shipped: list[Shipped] = []
    deadline = time.monotonic() + SOON_S
    while len(shipped) < n and time.monotonic() < deadline:
        shipped += await host.take(0.2)
    assert len(shipped) == n, shipped
    return shipped


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def ids(result: RolloutResult) -> tuple[Any, ...]:
    """What a rollout is, whenever and wherever it was made."""
    turns = [(turn.id, turn.prompt_ids, turn.response_ids, turn.role) for turn in result.turns]
    reward = result.rollout.reward
    return result.rollout.id, result.rollout.status, reward.score if reward else None, turns


def test_rollouts_are_those_of_the_local_trainers_pool(desk: Any, tmp_path: Any) -> None:
    """The same requests, the same ids, the same rewards; each is shipped once, and stands in the run's folder."""
    requests = desk.group(0) + desk.group(1)

    async def work() -> tuple[list[RolloutResult | None], list[Shipped]]:
        host = await desk.host()
        results = await asyncio.gather(*(host.roll_out(request) for request in requests))
        return results, await host.take(1)

    results, shipped = desk.work(work)
    run = new_run(tmp_path / "others", "desk")
    with opened(desk.job, run) as (_, _, pool):
        expected = pool.run(desk.engine, requests)
    assert [ids(result) for result in results if result] == [ids(result) for result in expected]
    by_id = {each.result.rollout.id: each for each in shipped if each.result}
    assert sorted(by_id) == sorted(request.rollout_id for request in requests)
    assert all(each.is_stored and not each.refused and each.error is None for each in shipped)
    stored = {result.rollout.id: result for result in read_store(desk.run.rollouts).results()}
    assert stored == {id: each.result for id, each in by_id.items()}


def test_what_is_shipped_is_stored_already(desk: Any) -> None:
    """At the moment it is taken, another process can read it."""

    async def work() -> None:
        host = await desk.host()
        await host.begin(desk.group(0, n=2))
        for each in await taken(host, 2):
            assert read_store(desk.run.rollouts).rollout(each.result.rollout.id) == each.result.rollout

    desk.work(work)


def test_on_another_node_the_driver_stores_what_is_shipped(desk: Any) -> None:
    """Two workers' records meet in the run's folder, whoever wrote them; the node's own folder goes with the host."""

    async def made(first: int, *, is_on_drivers_node: bool) -> tuple[list[Shipped], Any]:
        host = await desk.host(is_on_drivers_node=is_on_drivers_node)
        await host.begin(desk.group(first, n=2))
        shipped, path = await taken(host, 2), host._store.store.path
        await asyncio.to_thread(host.close)
        return shipped, path

    async def work() -> list[tuple[list[Shipped], Any]]:
        return [await made(0, is_on_drivers_node=True), await made(1, is_on_drivers_node=False)]

    (here, path_here), (there, path_there) = desk.work(work)
    assert ([each.is_stored for each in here], [each.is_stored for each in there]) == ([True] * 2, [False] * 2)
    assert path_here.parent == desk.run.rollouts
    assert not path_there.parent.exists()
    store = SqliteStore(desk.run.rollouts)
    for each in there:
        from agenttrain.capture.store import Begun

        begun = Begun(request=each.result.request, started_at=each.result.rollout.started_at)
        store.put_all_of(begun, (), each.result)
    store.close()
    results = {each.result.rollout.id: each.result for each in (*here, *there)}
    assert {result.rollout.id: result for result in read_store(desk.run.rollouts).results()} == results


def test_a_broken_environment_is_tried_again_and_every_attempt_is_shipped(toy: Any) -> None:
    place = toy("break once", "break")

    async def work() -> tuple[Any, Any, list[Shipped]]:
        host = await place.host()
        once = await host.roll_out(place.group(0)[0])
        always = await host.roll_out(place.group(1)[0])
        return once, always, await host.take(1)

    once, always, shipped = place.work(work)
    assert (once.rollout.status, once.rollout.attempt) == ("truncated", 1)  # the toy's model may say 6 tokens
    assert (always.rollout.status, always.rollout.attempt, always.samples) == ("environment_failure", 2, ())
    assert [each.result.rollout.id for each in shipped if each.result] == [
        "train-1-0-0-0",
        "train-1-0-0-1",
        "train-1-1-0-0",
        "train-1-1-0-1",
        "train-1-1-0-2",
    ]


def test_a_broken_verifier_is_the_environments_failure(toy: Any) -> None:
    place = toy("no score")

    async def work() -> Any:
        return await (await place.host()).roll_out(place.group(0)[0])

    result = place.work(work)
    assert (result.rollout.status, result.rollout.reward, result.rollout.verifier_failed) == (
        "environment_failure",
        None,
        True,
    )


def test_a_graph_that_does_not_return_is_given_up(toy: Any) -> None:
    """Its siblings go on; its record is shipped once, though the graph comes back later."""
    place = toy("hang", "hello", limits={"seconds": 4})

    async def work() -> tuple[Any, Any, list[Shipped]]:
        host = await place.host()
        host._pool.grace_s = 0.2
        stuck = asyncio.create_task(host.roll_out(replace(place.group(0)[0], attempt=2)))
        other = await host.roll_out(place.group(1)[0])
        given_up = await stuck
        (place.run.path.parents[1] / "enough").touch()
        await asyncio.sleep(0.5)
        return given_up, other, await host.take(0.2)

    given_up, other, shipped = place.work(work)
    assert (given_up.rollout.status, other.rollout.status) == ("environment_failure", "truncated")
    assert "the graph did not return" in given_up.rollout.cause
    assert sorted(each.result.rollout.id for each in shipped if each.result) == ["train-1-0-0-2", "train-1-1-0-0"]


def test_an_escape_ends_the_run(toy: Any) -> None:
    """It is shipped as the error that it is; what else is under way ends, and nothing new begins."""
    place = toy("escape", "hang")

    async def work() -> list[Shipped]:
        host = await place.host()
        other = asyncio.create_task(host.roll_out(place.group(1)[0]))
        await until((place.run.path.parents[1] / "hangs").exists)
        (place.run.path.parents[1] / "enough").touch()
        assert await host.roll_out(place.group(0)[0]) is None
        await other
        assert await host.roll_out(place.group(1)[0]) is None
        return await host.take(1)

    errors = [each.error for each in place.work(work) if each.error is not None]
    assert [type(error) for error in errors] == [EscapeError]
    assert type(pickle.loads(pickle.dumps(errors[0]))) is EscapeError


def test_stop_ends_what_is_under_way_as_aborted(toy: Any) -> None:
    """What had begun has a record that is shipped; what is asked for meanwhile begins afterwards."""
    place = toy("hang", "hello")

    async def work() -> tuple[Any, list[Shipped], Any]:
        host = await place.host(concurrency=2)
        waiting = [asyncio.create_task(host.roll_out(request)) for request in place.group(0)]
        await until(lambda: len(read_store(place.run.rollouts).unfinished()) == 2)
        stopping = asyncio.create_task(host.stop())
        await asyncio.sleep(0.1)
        after = asyncio.create_task(host.roll_out(place.group(1)[0]))
        await asyncio.sleep(0.1)
        assert not after.done()
        (place.run.path.parents[1] / "enough").touch()
        await stopping
        shipped = await host.take(0.1)
        return await asyncio.gather(*waiting), shipped, await after

    cut, shipped, after = place.work(work)
    assert cut == [None] * 4
    aborted = [each.result.rollout for each in shipped if each.result and each.result.rollout.task_id == "0"]
    assert [rollout.status for rollout in aborted] == ["aborted"] * 2
    assert after.rollout.status == "truncated"


def test_nothing_of_a_graph_runs_on_the_loop(toy: Any) -> None:
    """The loop answers others while a node blocks, and the nodes ran on threads that are not its own."""
    place = toy("hang")

    async def work() -> None:
        host = await place.host()
        rollout = asyncio.create_task(host.roll_out(place.group(0)[0]))
        await until((place.run.path.parents[1] / "hangs").exists)
        (place.run.path.parents[1] / "enough").touch()
        await rollout

    place.work(work)
    names = {path.name for path in (place.run.path.parents[1] / "threads").iterdir()}
    assert names
    assert "MainThread" not in names


def test_rows_that_are_too_long_are_shipped_as_refused(desk: Any) -> None:
    """The driver learns why veRL gets no row, with the rollout; the group goes on."""

    async def work() -> tuple[list[Any], list[Shipped]]:
        host = await desk.host(max_length=50)
        result = await host.roll_out(desk.group(0)[0])
        return host.outputs(result), await host.take(1)

    outputs, (shipped,) = desk.work(work)
    assert outputs == []
    assert shipped.result.samples
    assert "and the policy has 50 positions (rollout train-1-" in shipped.refused


def test_a_graph_that_cant_be_opened_is_an_error_of_ours(toy: Any) -> None:
    place = toy("hello")
    spec = place.spec()
    bad = replace(spec, rollout=replace(spec.rollout, graph_file=str(place.run.path / "none.py")))

    async def work() -> None:
        await asyncio.to_thread(Host.open, bad, place.engine, asyncio.get_running_loop(), is_on_drivers_node=True)

    with pytest.raises(GraphError):
        place.work(work)
    with pytest.raises(TrainerError, match="No graph is open in this process"):
        host_of_process()


class Theirs(RewardError):
    """Of a plugin that the driver does not have; it can't be pickled either."""

    def __init__(self, text: str, lock: Any) -> None:
        super().__init__(text)
        self.lock = lock


def test_errors_unpickle_where_their_class_is_not_known() -> None:
    import threading

    ours = portable(Theirs("no reward", threading.Lock()))
    assert (type(ours), str(ours)) == (RewardError, "no reward")
    other = pickle.loads(pickle.dumps(portable(ZeroDivisionError("division by zero"))))
    assert type(other) is TrainerError
    assert str(other).startswith("A rollout worker raised ZeroDivisionError: division by zero.")
