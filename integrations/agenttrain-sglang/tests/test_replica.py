"""A server's place in a run: what ends, hangs or comes late is replaced, and said."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from agenttrain.errors import EngineError

# ── a server that ends ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_servers_calls_are_asked_again_with_the_weights_of_now(odd: Any) -> None:
    """32 calls in flight: all are answered by the next server, under the version of now, and the counts add up."""
    odd.does(token_s=0.05)
    engine = odd.engine()
    engine.update_weights(odd.new_weights(), 3)
    asked = [odd.ask(engine, 20, seed=i, session=f"s{i}") for i in range(32)]
    odd.until(lambda: odd.in_flight(engine, 32))
    odd.end(engine)
    answers = [future.result(60) for future in asked]
    assert [(len(each.token_ids), set(each.weight_versions)) for each in answers] == [(20, {3})] * 32
    stats = engine.stats()
    assert (stats["asked_again"], stats["restarts"], stats["sampled_ids"]) == (32, 1, 640)
    assert stats["server_sampled_ids"] >= stats["sampled_ids"]
    _, news = engine.news()
    assert "takes the place of one that was gone (it was ended by SIGKILL" in news


def test_ids_of_a_dead_server_stay_counted(odd: Any) -> None:
    """Though nobody asked for its counter while it lived."""
    engine = odd.engine()
    odd.ask(engine, 9).result(60)
    odd.end(engine)
    odd.ask(engine, 4).result(60)
    stats = engine.stats()
    assert (stats["sampled_ids"], stats["server_sampled_ids"]) == (13, 13)


def test_weights_that_come_while_no_server_is_up_are_those_of_the_next(odd: Any) -> None:
    """The server dies before the push: what takes its place has the new weights, not those of before."""
    engine = odd.engine()
    engine.update_weights(odd.new_weights(), 1)
    odd.does(start_s=0.5)
    odd.end(engine)
    lost = odd.ask(engine)
    odd.until(lambda: engine.replicas[0].server is None)
    engine.update_weights(odd.new_weights(), 2)
    assert engine.weight_version == 2
    assert set(lost.result(60).weight_versions) == {2}
    assert set(odd.ask(engine).result(60).weight_versions) == {2}


def test_a_server_that_dies_while_weights_are_read_is_replaced(odd: Any) -> None:
    """The push returns when the next server has them."""
    engine = odd.engine()

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in odd.new_weights():
            if engine.replicas[0].restarts == 0 and psutil.pid_exists(odd.pid_of(engine)):
                odd.end(engine)
            yield name, tensor

    engine.update_weights(dying(), 7)
    assert set(odd.ask(engine).result(60).weight_versions) == {7}
    assert engine.stats()["restarts"] == 1


def test_a_connection_that_breaks_costs_no_server(odd: Any) -> None:
    """It may break on the way: the server shows that it lives, and the call is asked again."""
    odd.does(breaks=2)
    engine = odd.engine()
    assert len(odd.ask(engine).result(60).token_ids) == 6
    stats = engine.stats()
    assert (stats["asked_again"], stats["restarts"]) == (2, 0)


def test_a_call_that_ends_every_server_fails_in_the_end(odd: Any) -> None:
    """After four of them, and the others go on."""
    odd.does(token_s=0.05)
    engine = odd.engine(restarts=9)
    asked = odd.ask(engine, 40)
    for _ in range(4):
        odd.until(lambda: odd.in_flight(engine, 1))
        odd.end(engine)
        odd.until(lambda: engine.replicas[0].server is None)
    with pytest.raises(EngineError, match="was sent 4 times, and each time its server died or broke off"):
        asked.result(60)
    odd.does()
    assert len(odd.ask(engine).result(60).token_ids) == 6


def test_when_no_replacement_is_left_all_calls_fail_with_the_cause(odd: Any) -> None:
    odd.does(token_s=0.1)
    engine = odd.engine(restarts=1)
    asked = [odd.ask(engine, 40, seed=i, session=f"s{i}") for i in range(4)]
    for _ in range(2):
        odd.until(lambda: odd.in_flight(engine, 4))
        odd.end(engine)
        odd.until(lambda: engine.replicas[0].server is None)
    for future in asked:
        with pytest.raises(EngineError, match=r"was replaced 1 times already.*sglang\.restarts allows more"):
            future.result(60)
    for fails in (
        engine.stats,
        lambda: odd.ask(engine).result(60),
        lambda: engine.update_weights(odd.new_weights(), 1),
    ):
        with pytest.raises(EngineError, match="was replaced 1 times already"):
            fails()
    assert "is lost for this run" in engine.news()[-1]


def test_a_replacement_that_ends_early_is_replaced_too(odd: Any) -> None:
    """Three times in a row; the words of the last one are told."""
    engine = odd.engine()
    assert odd.ask(engine).result(60)
    odd.does(end="ValueError: the disk is full")
    odd.end(engine)
    with pytest.raises(EngineError, match=r"3 servers in a row ended before .*ValueError: the disk is full"):
        odd.ask(engine).result(60)
    assert engine.replicas[0].restarts == 3


# ── a server that is silent or slow ───────────────────────────────────────────────────────────────────────────────────


def test_a_hung_server_is_replaced(odd: Any) -> None:
    """It answers nothing, and neither its calls nor its health check."""
    odd.does(token_s=0.02)
    engine = odd.engine()
    asked = [odd.ask(engine, 20, seed=i) for i in range(3)]
    odd.until(lambda: odd.in_flight(engine, 3))
    odd.end(engine, number=signal.SIGSTOP)
    assert [len(future.result(60).token_ids) for future in asked] == [20] * 3
    assert "left its health check unanswered for 1 s" in engine.news()[-1]


def test_a_server_that_is_only_slow_is_left_alone(odd: Any) -> None:
    """Its calls take three times as long as its health check may."""
    odd.does(token_s=0.15, health_s=0.5)
    engine = odd.engine()
    assert len(odd.ask(engine, 20).result(60).token_ids) == 20
    assert engine.stats()["restarts"] == 0


def test_a_server_that_hangs_before_a_push_is_replaced_first(odd: Any) -> None:
    """Nobody waits for as long as a bucket of weights may take."""
    engine = odd.engine(update_s=600.0)
    assert odd.ask(engine).result(60)
    odd.end(engine, number=signal.SIGSTOP)
    engine.update_weights(odd.new_weights(), 2)
    assert set(odd.ask(engine).result(60).weight_versions) == {2}
    assert "did not answer within 1 s before weights were sent" in engine.news()[-1]


def test_a_start_that_takes_too_long_is_an_error(odd: Any) -> None:
    odd.does(start_s=60.0)
    engine = odd.engine(start_s=1.0)
    with pytest.raises(EngineError, match=r"did not answer within 1 s.*sglang\.start_s"):
        odd.ask(engine)


def test_a_server_that_ends_at_its_start_is_told_with_its_words(odd: Any) -> None:
    """At once: it is not started again."""
    odd.does(end="ValueError: no such model")
    engine = odd.engine()
    with pytest.raises(EngineError, match=r"ended before it was ready: .*ValueError: no such model"):
        engine.stats()
    assert len(list((engine._folder).glob("*.log"))) == 1


def test_a_port_that_is_taken_meanwhile_is_not_the_end(odd: Any) -> None:
    """Another port is tried, and the stranger at the first one is never taken for a server of ours."""
    odd.does(start_s=1.0)
    engine = odd.engine()
    odd.until(lambda: engine._fleet.replicas[0].address)
    first = engine._fleet.replicas[0].address
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        assert len(odd.ask(engine).result(60).token_ids) == 6
        assert engine.replicas[0].address != first
    assert (engine.stats()["restarts"], len(list(engine._folder.glob("*.log")))) == (0, 2)
