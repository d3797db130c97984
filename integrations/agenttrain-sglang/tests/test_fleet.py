"""Several servers, and the end of all of it."""

from __future__ import annotations

import gc
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from agenttrain.errors import EngineError

from agenttrain_sglang.server import ServerProcess

HELD_UP = "was up while its server was gone or hung"

# ── several servers ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_sessions_stick_to_a_server_and_are_shared_out(odd: Any) -> None:
    odd.does(token_s=0.01)
    engine = odd.engine(replicas=2)
    for _ in range(3):
        for future in [odd.ask(engine, session=f"s{i}") for i in range(4)]:
            future.result(60)
        assert [replica.n_assigned for replica in engine.replicas] == [2, 2]
    for i in range(4):
        engine.release(f"s{i}")
    odd.until(lambda: [replica.n_assigned for replica in engine.replicas] == [0, 0])


def test_sessions_of_a_dead_server_move_to_the_live_one_and_the_dead_one_comes_back(odd: Any) -> None:
    engine = odd.engine(replicas=2)
    engine.update_weights(odd.new_weights(), 1)
    for i in range(4):
        odd.ask(engine, session=f"s{i}").result(60)
    odd.does(start_s=2.0)
    odd.end(engine)
    answers = [odd.ask(engine, session=f"s{i}").result(60) for i in range(4)]
    assert engine.replicas[0].server is None
    assert [replica.n_assigned for replica in engine.replicas] == [0, 4]
    odd.until(lambda: engine.replicas[0].server is not None)
    answers += [odd.ask(engine, session=f"new{i}").result(60) for i in range(2)]
    assert [replica.n_assigned for replica in engine.replicas] == [2, 4]
    assert {version for each in answers for version in each.weight_versions} == {1}


def test_a_run_goes_on_with_the_servers_that_are_left(odd: Any) -> None:
    """And says which one is lost."""
    engine = odd.engine(replicas=2, restarts=0)
    odd.ask(engine).result(60)
    odd.end(engine)
    assert [len(odd.ask(engine, session=f"s{i}").result(60).token_ids) for i in range(4)] == [6] * 4
    odd.until(lambda: engine.replicas[0].failure is not None)
    engine.update_weights(odd.new_weights(), 1)
    assert set(odd.ask(engine).result(60).weight_versions) == {1}
    assert any("SGLang server 0" in news and "is lost for this run" in news for news in engine.news())


def test_the_first_server_that_can_not_start_ends_the_others_at_once(odd: Any) -> None:
    """Nobody waits for a second one that is slow."""
    odd.does(start_s=600.0)
    engine = odd.engine(replicas=2, start_s=600.0)
    first = engine._fleet.replicas[0]
    odd.until(lambda: first._process is not None and first._process.cpu_s() > 0)
    first._process.kill()
    with pytest.raises(EngineError, match=r"SGLang server 0 .* ended before it was ready"):
        engine.stats()
    assert all(replica._process is None for replica in engine._fleet.replicas)


# ── what ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_release_ends_a_call_that_waits_for_a_server(odd: Any) -> None:
    engine = odd.engine()
    odd.ask(engine).result(60)
    odd.does(start_s=5.0)
    odd.end(engine)
    waiting, other = odd.ask(engine, session="ended"), odd.ask(engine, session="other")
    odd.until(lambda: engine.replicas[0].server is None)
    engine.release("ended")
    with pytest.raises(EngineError, match=HELD_UP):
        waiting.result(5)
    assert len(other.result(60).token_ids) == 6
    engine.release("other")
    engine.release("nobody's")
    odd.until(lambda: engine.replicas[0].n_assigned == 1)


def test_a_rollout_whose_server_died_earlier_blames_the_engine(odd: Any) -> None:
    """Its time is up while the second server works on it: a part of it was not the rollout's.

    That is said twice where two of its calls run in parallel.
    """
    odd.does(token_s=0.05)
    engine = odd.engine()
    asked = odd.ask(engine, 200)
    odd.until(lambda: odd.in_flight(engine, 1))
    odd.end(engine)
    odd.until(lambda: engine.stats()["asked_again"] and odd.in_flight(engine, 1))
    engine.release("s")
    engine.release("s")
    with pytest.raises(EngineError, match=HELD_UP):
        asked.result(10)
    assert odd.ask(engine, 3).result(10).stop_reason == "length"


def test_a_server_that_does_not_hear_of_an_end_is_hung(odd: Any) -> None:
    odd.does(token_s=0.05)
    engine = odd.engine(silence_s=30.0)
    asked = odd.ask(engine, 200)
    odd.until(lambda: odd.in_flight(engine, 1))
    odd.end(engine, number=signal.SIGSTOP)
    engine.release("s")
    with pytest.raises(EngineError, match=HELD_UP):
        asked.result(10)
    odd.end(engine, number=signal.SIGCONT)


@pytest.mark.parametrize("moment", ["starting", "asking", "replacing", "publishing"])
def test_close_ends_everything_at_any_moment(odd: Any, moment: str) -> None:
    """No process, no thread, no unclosed session; whoever waits gets an answer or an EngineError."""
    before = set(threading.enumerate())
    odd.does(start_s=20.0 if moment == "starting" else 0.0, token_s=0.2)
    engine = odd.engine()
    waits = ThreadPoolExecutor(1)
    if moment == "starting":
        waiting: Any = waits.submit(engine.stats)
        odd.until(lambda: engine._fleet.replicas[0]._process is not None)
    else:
        engine.update_weights(odd.new_weights(), 1)
        waiting = odd.ask(engine, 100)
        odd.until(lambda: odd.in_flight(engine, 1))
    process = engine._fleet.replicas[0]._process
    assert isinstance(process, ServerProcess)
    group = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    if moment in ("replacing", "publishing"):
        odd.does(start_s=20.0)
        odd.end(engine)
        odd.until(lambda: engine.replicas[0].server is None and engine.replicas[0]._process not in (None, process))
        process = engine.replicas[0]._process
        assert isinstance(process, ServerProcess)
        group += [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    if moment == "publishing":
        waiting = waits.submit(engine.update_weights, odd.new_weights(), 2)
        odd.until(lambda: engine.weight_version == 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close()
        engine.close()
        gc.collect()
    error = waiting.exception(5)
    assert error is None or isinstance(error, EngineError)
    waits.shutdown()
    assert not [pid for pid in group if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    odd.until(lambda: not {thread for thread in set(threading.enumerate()) - before if thread.is_alive()})


def test_close_while_a_push_looks_for_servers_starts_no_other(odd: Any) -> None:
    """The one that it looks at is hung, and ended by the close: nothing takes its place."""
    engine = odd.engine(silence_s=60.0)
    odd.ask(engine).result(60)
    odd.end(engine, number=signal.SIGSTOP)
    (replica,) = engine.replicas
    with ThreadPoolExecutor(1) as waits:
        pushed = waits.submit(engine.update_weights, odd.new_weights(), 1)
        odd.until(lambda: replica.is_held_still)
        engine.close()
        assert isinstance(pushed.exception(10), EngineError)
    assert (replica.restarts, replica._process) == (0, None)


def test_a_call_after_close_fails(odd: Any) -> None:
    engine = odd.engine()
    odd.ask(engine).result(60)
    engine.close()
    engine.release("s")
    for asks in (lambda: odd.ask(engine), engine.stats, lambda: engine.update_weights(iter(()), 1)):
        with pytest.raises(EngineError, match="is closed"):
            asks()
