"""Servers that end, hang, come late or lie: what a run's engine makes of it, over servers that start in no time."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agenttrain.config import resolve
from agenttrain.errors import EngineError
from agenttrain.protocols import EngineContext
from agenttrain.records import Generation, Sampling

from agenttrain_sglang.engine import SglangEngine
from agenttrain_sglang.launch import Launch
from agenttrain_sglang.one_server import Server
from agenttrain_sglang.plan import plan_of
from agenttrain_sglang.published import weights_of
from agenttrain_sglang.server import ServerProcess, free_port

PROMPT = (5, 9, 13, 17)
ODD = Path(__file__).with_name("odd_sglang.py")


class Odd:
    """An environment whose servers are tests/odd_sglang.py, and engines over it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.engines = folder, model, list[SglangEngine]()
        self.others = list[ServerProcess]()
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {ODD} {folder} "$@"\n')
        (folder / "bin" / "python").chmod(0o755)
        mark = {"ready": True, "device": "cpu", "sglang": "0.5.23", "made_by": sys.executable}
        (folder / "agenttrain-sglang.json").write_text(json.dumps(mark))
        self.does()

    def does(self, **how: Any) -> None:
        """What all its servers do from now on."""
        part = self.folder / "how.json.part"
        part.write_text(json.dumps(how))
        part.replace(self.folder / "how.json")

    def engine(self, **table: Any) -> SglangEngine:
        """An engine; closed after the test."""
        settings = {"environment": str(self.folder), "transport": "tensor", "silence_s": 1.0, "start_s": 30.0, **table}
        config = resolve(("the test", {"sglang": settings}))
        self.engines.append(SglangEngine(plan_of(EngineContext(config=config, model=str(self.model)))))
        return self.engines[-1]

    def other(self, port: int | None = None) -> ServerProcess:
        """A server that no engine has started; ended after the test."""
        port = port or free_port()
        command = (str(self.folder / "bin" / "python"), "--model-path", str(self.model), "--port", str(port))
        launch = Launch(command=command, variables=dict(os.environ), port=port, device="cpu", n_gpus=0)
        self.others.append(ServerProcess(launch, log=self.folder / "other.log"))
        until(self.others[-1].listens)
        return self.others[-1]

    def close(self) -> None:
        self.does()
        for engine in self.engines:
            engine.close()
        for process in self.others:
            process.kill()


@pytest.fixture
def odd(tmp_path: Path, small_folder: Path) -> Iterator[Odd]:
    odd = Odd(tmp_path / "odd", small_folder)
    yield odd
    odd.close()


def until(condition: Callable[[], Any], *, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def ask(engine: SglangEngine, n: int = 6, *, seed: int = 1, session: str = "s") -> Future[Generation]:
    sampling = Sampling(temperature=1.0, max_tokens=n, seed=seed, stop_ids=())
    return engine.generate(PROMPT, sampling, session=session)


def server_of(engine: SglangEngine, replica: int = 0) -> Server:
    server = engine.replicas[replica].server
    assert server is not None
    return server


def pid_of(engine: SglangEngine, replica: int = 0) -> int:
    process = server_of(engine, replica).process
    assert isinstance(process, ServerProcess)
    return process.pid


def end_server(engine: SglangEngine, replica: int = 0, number: int = signal.SIGKILL) -> None:
    os.killpg(pid_of(engine, replica), number)


def new_weights(odd: Odd) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor * 1.1) for name, tensor in weights_of(odd.model))


def in_flight(engine: SglangEngine, n: int, replica: int = 0) -> bool:
    server = engine.replicas[replica].server
    return server is not None and server.n_running == n


# ── a server that ends ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_servers_calls_are_asked_again_with_the_weights_of_now(odd: Odd) -> None:
    """32 calls in flight: all are answered by the next server, under the version of now, and the counts add up."""
    odd.does(token_s=0.05)
    engine = odd.engine()
    engine.update_weights(new_weights(odd), 3)
    asked = [ask(engine, 20, seed=i, session=f"s{i}") for i in range(32)]
    until(lambda: in_flight(engine, 32))
    end_server(engine)
    answers = [future.result(60) for future in asked]
    assert [(len(each.token_ids), set(each.weight_versions)) for each in answers] == [(20, {3})] * 32
    stats = engine.stats()
    assert (stats["asked_again"], stats["restarts"], stats["sampled_ids"]) == (32, 1, 640)
    assert stats["server_sampled_ids"] >= stats["sampled_ids"]
    _, news = engine.news()
    assert "takes the place of one that was gone (it was ended by SIGKILL" in news


def test_ids_of_a_dead_server_stay_counted(odd: Odd) -> None:
    """Though nobody asked for its counter while it lived."""
    engine = odd.engine()
    ask(engine, 9).result(60)
    end_server(engine)
    ask(engine, 4).result(60)
    stats = engine.stats()
    assert (stats["sampled_ids"], stats["server_sampled_ids"]) == (13, 13)


def test_weights_that_come_while_no_server_is_up_are_those_of_the_next(odd: Odd) -> None:
    """The server dies before the push: what takes its place has the new weights, not those of before."""
    engine = odd.engine()
    engine.update_weights(new_weights(odd), 1)
    odd.does(start_s=0.5)
    end_server(engine)
    lost = ask(engine)
    until(lambda: engine.replicas[0].server is None)
    engine.update_weights(new_weights(odd), 2)
    assert engine.weight_version == 2
    assert set(lost.result(60).weight_versions) == {2}
    assert set(ask(engine).result(60).weight_versions) == {2}


def test_a_server_that_dies_while_weights_are_read_is_replaced(odd: Odd) -> None:
    """The push returns when the next server has them."""
    engine = odd.engine()

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new_weights(odd):
            if engine.replicas[0].restarts == 0 and psutil.pid_exists(pid_of(engine)):
                end_server(engine)
            yield name, tensor

    engine.update_weights(dying(), 7)
    assert set(ask(engine).result(60).weight_versions) == {7}
    assert engine.stats()["restarts"] == 1


def test_a_call_that_ends_every_server_fails_in_the_end(odd: Odd) -> None:
    """After four of them, and the others go on."""
    odd.does(token_s=0.05)
    engine = odd.engine(restarts=9)
    asked = ask(engine, 40)
    for _ in range(4):
        until(lambda: in_flight(engine, 1))
        end_server(engine)
        until(lambda: engine.replicas[0].server is None)
    with pytest.raises(EngineError, match="was sent 4 times, and each server died on it"):
        asked.result(60)
    odd.does()
    assert len(ask(engine).result(60).token_ids) == 6


def test_when_no_replacement_is_left_all_calls_fail_with_the_cause(odd: Odd) -> None:
    odd.does(token_s=0.1)
    engine = odd.engine(restarts=1)
    asked = [ask(engine, 40, seed=i, session=f"s{i}") for i in range(4)]
    for _ in range(2):
        until(lambda: in_flight(engine, 4))
        end_server(engine)
        until(lambda: engine.replicas[0].server is None)
    for future in asked:
        with pytest.raises(EngineError, match=r"was replaced 1 times already.*sglang\.restarts allows more"):
            future.result(60)
    for fails in (engine.stats, lambda: ask(engine).result(60), lambda: engine.update_weights(new_weights(odd), 1)):
        with pytest.raises(EngineError, match="was replaced 1 times already"):
            fails()
    assert "is lost for this run" in engine.news()[-1]


def test_a_replacement_that_ends_early_is_replaced_too(odd: Odd) -> None:
    """Three times in a row; the words of the last one are told."""
    engine = odd.engine()
    assert ask(engine).result(60)
    odd.does(end="ValueError: the disk is full")
    end_server(engine)
    with pytest.raises(EngineError, match=r"3 servers in a row ended before .*ValueError: the disk is full"):
        ask(engine).result(60)
    assert engine.replicas[0].restarts == 3


# ── a server that is silent or slow ──────────────────────────────────────────────────────────────────────────────────


def test_a_hung_server_is_replaced(odd: Odd) -> None:
    """It answers nothing, and neither its calls nor its health check."""
    odd.does(token_s=0.02)
    engine = odd.engine()
    asked = [ask(engine, 20, seed=i) for i in range(3)]
    until(lambda: in_flight(engine, 3))
    end_server(engine, number=signal.SIGSTOP)
    assert [len(future.result(60).token_ids) for future in asked] == [20] * 3
    assert "left its health check unanswered for 1 s" in engine.news()[-1]


def test_a_server_that_is_only_slow_is_left_alone(odd: Odd) -> None:
    """Its calls take three times as long as its health check may."""
    odd.does(token_s=0.15, health_s=0.5)
    engine = odd.engine()
    assert len(ask(engine, 20).result(60).token_ids) == 20
    assert engine.stats()["restarts"] == 0


def test_a_server_that_hangs_before_a_push_is_replaced_first(odd: Odd) -> None:
    """Nobody waits for as long as a bucket of weights may take."""
    engine = odd.engine(update_s=600.0)
    assert ask(engine).result(60)
    end_server(engine, number=signal.SIGSTOP)
    engine.update_weights(new_weights(odd), 2)
    assert set(ask(engine).result(60).weight_versions) == {2}
    assert "did not answer within 1 s before weights were sent" in engine.news()[-1]


def test_a_start_that_takes_too_long_is_an_error(odd: Odd) -> None:
    odd.does(start_s=60.0)
    engine = odd.engine(start_s=1.0)
    with pytest.raises(EngineError, match=r"did not answer within 1 s.*sglang\.start_s"):
        ask(engine)


def test_a_server_that_ends_at_its_start_is_told_with_its_words(odd: Odd) -> None:
    """At once: it is not started again."""
    odd.does(end="ValueError: no such model")
    engine = odd.engine()
    with pytest.raises(EngineError, match=r"ended before it was ready: .*ValueError: no such model"):
        engine.stats()
    assert len(list((engine._folder).glob("*.log"))) == 1


def test_a_port_that_is_taken_meanwhile_is_not_the_end(odd: Odd) -> None:
    """Another port is tried, and the stranger at the first one is never taken for a server of ours."""
    odd.does(start_s=1.0)
    engine = odd.engine()
    until(lambda: engine._fleet.replicas[0].address)
    first = engine._fleet.replicas[0].address
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        assert len(ask(engine).result(60).token_ids) == 6
        assert engine.replicas[0].address != first
    assert (engine.stats()["restarts"], len(list(engine._folder.glob("*.log")))) == (0, 2)


# ── servers of somebody else ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_given_server_that_comes_back_gets_the_weights_again(odd: Odd) -> None:
    """Its calls wait until then."""
    odd.does(token_s=0.05)
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    engine.update_weights(new_weights(odd), 5)
    asked = ask(engine, 30)
    until(lambda: in_flight(engine, 1))
    process.kill()
    until(lambda: engine.replicas[0].server is None)
    odd.other(process.launch.port)
    assert set(asked.result(60).weight_versions) == {5}


def test_a_given_server_that_never_comes_back_ends_the_run(odd: Odd) -> None:
    process = odd.other()
    engine = odd.engine(servers=[process.address], start_s=2.0)
    assert ask(engine).result(60)
    process.kill()
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        ask(engine).result(60)


@pytest.mark.parametrize("pushed", [False, True])
def test_an_answer_of_a_given_server_that_was_restarted_behind_our_back_never_counts(odd: Odd, pushed: bool) -> None:
    """It has its own weights again: it gets those of now, and the call is asked again."""
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    if pushed:
        engine.update_weights(new_weights(odd), 5)
    assert ask(engine).result(60)
    process.kill()
    odd.other(process.launch.port)
    answer = ask(engine).result(60)
    assert set(answer.weight_versions) == {5 if pushed else 0}
    assert engine.stats()["restarts"] == 1
    assert "'default', and it was given others" in engine.news()[-1]


def test_answers_of_another_runs_weights_are_refused(odd: Odd) -> None:
    """Two runs on one server would spoil each other for ever."""
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    assert ask(engine).result(60)
    thief = odd.engine(servers=[process.address])
    thief.update_weights(new_weights(odd), 1)
    with pytest.raises(EngineError, match="let one run use it at a time"):
        ask(engine).result(60)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_refused_weights_leave_the_version_of_before(odd: Odd) -> None:
    """On every server."""
    engine = odd.engine(replicas=2)
    engine.update_weights(new_weights(odd), 1)
    with pytest.raises(EngineError, match=r"name 'no\.such\.weight'"):
        engine.update_weights(iter([("no.such.weight", torch.ones(2))]), 2)
    assert engine.weight_version == 1
    answers = [ask(engine, session=f"s{i}").result(60) for i in range(4)]
    assert {version for each in answers for version in each.weight_versions} == {1}
    engine.update_weights(new_weights(odd), 2)
    assert set(ask(engine).result(60).weight_versions) == {2}


def test_a_version_that_does_not_move_is_found_by_the_push(odd: Odd) -> None:
    """And by what takes the server's place, as long as that lasts: an error, no hang."""
    engine = odd.engine()
    engine.update_weights(new_weights(odd), 1)
    odd.does(stuck=True)
    with pytest.raises(EngineError, match=r"3 servers in a row ended before they could be asked .* calls them"):
        engine.update_weights(new_weights(odd), 2)


def test_an_answer_from_older_weights_than_a_server_has_taken_never_counts(odd: Odd) -> None:
    """The next answer is checked, not only what the server says of itself."""
    engine = odd.engine()
    engine.update_weights(new_weights(odd), 1)
    engine.update_weights(new_weights(odd), 2)
    odd.does(answer={"meta_info": {"weight_version": engine._published._tags.of(1)}}, token_s=0.05)
    asked = ask(engine, 20)
    until(lambda: engine.replicas[0].restarts == 1)
    odd.does()
    assert set(asked.result(60).weight_versions) == {2}
    assert "answered from version 1 of the weights, and it has taken version 2" in engine.news()[-1]


def test_weights_that_break_off_at_their_source_leave_a_run_that_goes_on(odd: Odd) -> None:
    """What the trainer raises comes back to it; the server gets the weights of before, and no answer is half new."""
    engine = odd.engine()
    engine.update_weights(new_weights(odd), 1)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(new_weights(odd))
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        engine.update_weights(breaking(), 2)
    assert set(ask(engine).result(60).weight_versions) == {1}


# ── calls that can't be answered ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([400, {"error": {"message": "Duplicate request ID"}}], "HTTP 400: Duplicate request ID See its log"),
        ([500, {"detail": "broken"}], "HTTP 500: broken"),
        ([503, {"error": {"message": "the queue is full"}}], "HTTP 503: the queue is full"),
        ([200, "<html>hello</html>"], "answered '<html>hello</html>'"),
        ({"meta_info": {"output_token_logprobs": None}}, "6 ids without log probabilities"),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 5, None]]}}, "1 log probabilities for 6 ids"),
        ({"output_ids": [999] * 6}, "id 999, and the model's vocabulary has 320 ids"),
    ],
)
def test_what_can_not_be_trained_fails_its_call_alone(odd: Odd, answer: Any, words: str) -> None:
    """With the reason; the server stays, and the next call is answered."""
    engine = odd.engine()
    odd.does(answer=answer)
    with pytest.raises(EngineError, match=words):
        ask(engine).result(60)
    odd.does()
    assert len(ask(engine).result(60).token_ids) == 6
    stats = engine.stats()
    assert (stats["restarts"], stats["sampled_ids"], stats["server_sampled_ids"] >= 12) == (0, 6, True)


def test_a_busy_server_is_asked_again(odd: Odd) -> None:
    """As long as a silent one is waited for."""
    engine = odd.engine(silence_s=30.0)
    odd.does(answer=[503, {"error": {"message": "the queue is full"}}])
    asked = ask(engine)
    until(lambda: engine.stats()["busy"] >= 1)
    odd.does()
    assert len(asked.result(60).token_ids) == 6


# ── several servers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_sessions_stick_to_a_server_and_are_shared_out(odd: Odd) -> None:
    odd.does(token_s=0.01)
    engine = odd.engine(replicas=2)
    for _ in range(3):
        for future in [ask(engine, session=f"s{i}") for i in range(4)]:
            future.result(60)
        assert [replica.n_assigned for replica in engine.replicas] == [2, 2]
    for i in range(4):
        engine.release(f"s{i}")
    until(lambda: [replica.n_assigned for replica in engine.replicas] == [0, 0])


def test_sessions_of_a_dead_server_move_to_the_live_one_and_the_dead_one_comes_back(odd: Odd) -> None:
    engine = odd.engine(replicas=2)
    engine.update_weights(new_weights(odd), 1)
    for i in range(4):
        ask(engine, session=f"s{i}").result(60)
    odd.does(start_s=2.0)
    end_server(engine)
    answers = [ask(engine, session=f"s{i}").result(60) for i in range(4)]
    assert engine.replicas[0].server is None
    assert [replica.n_assigned for replica in engine.replicas] == [0, 4]
    until(lambda: engine.replicas[0].server is not None)
    answers += [ask(engine, session=f"new{i}").result(60) for i in range(2)]
    assert [replica.n_assigned for replica in engine.replicas] == [2, 4]
    assert {version for each in answers for version in each.weight_versions} == {1}


def test_a_run_goes_on_with_the_servers_that_are_left(odd: Odd) -> None:
    """And says which one is lost."""
    engine = odd.engine(replicas=2, restarts=0)
    ask(engine).result(60)
    end_server(engine)
    assert [len(ask(engine, session=f"s{i}").result(60).token_ids) for i in range(4)] == [6] * 4
    until(lambda: engine.replicas[0].failure is not None)
    engine.update_weights(new_weights(odd), 1)
    assert set(ask(engine).result(60).weight_versions) == {1}
    assert any("SGLang server 0" in news and "is lost for this run" in news for news in engine.news())


# ── what ends ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_release_ends_a_call_that_waits_for_a_server(odd: Odd) -> None:
    engine = odd.engine()
    ask(engine).result(60)
    odd.does(start_s=5.0)
    end_server(engine)
    waiting, other = ask(engine, session="ended"), ask(engine, session="other")
    until(lambda: engine.replicas[0].server is None)
    engine.release("ended")
    assert (waiting.result(5).stop_reason, waiting.result(5).token_ids) == ("aborted", ())
    assert len(other.result(60).token_ids) == 6
    engine.release("other")
    engine.release("nobody's")
    until(lambda: engine.replicas[0].n_assigned == 1)


@pytest.mark.parametrize("moment", ["starting", "asking", "replacing", "publishing"])
def test_close_ends_everything_at_any_moment(odd: Odd, moment: str) -> None:
    """No process, no thread, no unclosed session; whoever waits gets an answer or an EngineError."""
    before = set(threading.enumerate())
    odd.does(start_s=20.0 if moment == "starting" else 0.0, token_s=0.2)
    engine = odd.engine()
    waits = ThreadPoolExecutor(1)
    if moment == "starting":
        waiting: Any = waits.submit(engine.stats)
        until(lambda: engine._fleet.replicas[0]._process is not None)
    else:
        engine.update_weights(new_weights(odd), 1)
        waiting = ask(engine, 100)
        until(lambda: in_flight(engine, 1))
    process = engine._fleet.replicas[0]._process
    assert isinstance(process, ServerProcess)
    group = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    if moment in ("replacing", "publishing"):
        odd.does(start_s=20.0)
        end_server(engine)
        until(lambda: engine.replicas[0].server is None and engine.replicas[0]._process not in (None, process))
        process = engine.replicas[0]._process
        assert isinstance(process, ServerProcess)
        group += [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    if moment == "publishing":
        waiting = waits.submit(engine.update_weights, new_weights(odd), 2)
        until(lambda: engine.weight_version == 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close()
        engine.close()
        gc.collect()
    error = waiting.exception(5)
    assert error is None or isinstance(error, EngineError)
    waits.shutdown()
    assert not [pid for pid in group if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    until(lambda: not {thread for thread in set(threading.enumerate()) - before if thread.is_alive()})


def test_a_call_after_close_fails(odd: Odd) -> None:
    engine = odd.engine()
    ask(engine).result(60)
    engine.close()
    engine.release("s")
    for asks in (lambda: ask(engine), engine.stats, lambda: engine.update_weights(iter(()), 1)):
        with pytest.raises(EngineError, match="is closed"):
            asks()
