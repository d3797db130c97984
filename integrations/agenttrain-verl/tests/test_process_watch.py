"""Processes that nothing replaces, on a real Ray session with a real TransferQueue."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agenttrain.errors import TrainerError

pytestmark = pytest.mark.verl


@pytest.fixture
def session() -> Iterator[Any]:
    """A session with a transfer queue."""
    import ray
    import transfer_queue as tq

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="w", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            tq.init()
            yield ray
        finally:
            tq.close()
            ray.shutdown()


def rank_of(session: Any) -> Any:
    """Stands for a trainer's rank: whoever asks it to work waits. Its class is of no module that Ray would look for."""

    class Rank:
        def is_there(self) -> bool:
            return True

        def work(self) -> None:
            time.sleep(600)

    rank = session.remote(Rank).options(num_cpus=0).remote()
    assert session.get(rank.is_there.remote())
    return rank


def test_a_dead_queue_ends_every_wait(session: Any) -> None:
    """Its clients would wait for ever: calls in this process, and whoever waits for a rank that waits for the queue."""
    import psutil
    import transfer_queue as tq

    from agenttrain_verl.process_watch import ProcessWatch, vital_of

    rank = rank_of(session)
    vital = {**vital_of(None), "the trainer's rank 0": rank}
    assert sorted(vital) == [
        "the trainer's rank 0",
        "the transfer queue's controller",
        *(f"the transfer queue's storage {n}" for n in range(len(vital) - 2)),
    ]
    died: queue.SimpleQueue[TrainerError] = queue.SimpleQueue()
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = ProcessWatch(vital, next_step="Go on.", died=died.put)
    try:
        assert watch.trouble(within_s=2.5) is None
        working = rank.work.remote()
        (controller,) = [p for p in _below() if "TransferQueueController" in " ".join(p.cmdline())]
        controller.kill()
        psutil.wait_procs([controller], timeout=10)
        threading.Thread(target=lambda: ended.put(_raised(lambda: tq.kv_list("train"))), daemon=True).start()
        trouble = died.get(timeout=20)
        assert str(trouble).startswith("The run can't go on without the transfer queue's controller: ")
        assert str(trouble).endswith("Go on.")
        assert watch.trouble() is trouble
        assert ended.get(timeout=20) == "CancelledError"
        with pytest.raises(session.exceptions.RayActorError):
            session.get(working, timeout=20)
    finally:
        watch.close()


def _below() -> list[Any]:
    import psutil

    return psutil.Process().children(recursive=True)


def _raised(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return ""
