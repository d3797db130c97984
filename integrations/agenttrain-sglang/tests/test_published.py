"""What servers hold: weights of now or none that count, on servers of somebody else too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agenttrain.errors import EngineError
from agenttrain.protocols import AdapterWeights

from agenttrain_sglang.published import weights_of
from agenttrain_sglang.weights import ServerSpoiled

# ── servers of somebody else ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_given_server_that_comes_back_gets_the_weights_again(odd: Any) -> None:
    """Its calls wait until then."""
    odd.does(token_s=0.05)
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    engine.update_weights(odd.new_weights(), 5)
    asked = odd.ask(engine, 30)
    odd.until(lambda: odd.in_flight(engine, 1))
    process.kill()
    odd.until(lambda: engine.replicas[0].server is None)
    odd.other(process.launch.port)
    assert set(asked.result(60).weight_versions) == {5}


def test_a_given_server_that_never_comes_back_ends_the_run(odd: Any) -> None:
    process = odd.other()
    engine = odd.engine(servers=[process.address], start_s=2.0)
    assert odd.ask(engine).result(60)
    process.kill()
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        odd.ask(engine).result(60)


@pytest.mark.parametrize("pushed", [False, True])
def test_an_answer_of_a_given_server_that_was_restarted_behind_our_back_never_counts(odd: Any, pushed: bool) -> None:
    """It has its own weights again: it gets those of now, and the call is asked again."""
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    if pushed:
        engine.update_weights(odd.new_weights(), 5)
    assert odd.ask(engine).result(60)
    process.kill()
    odd.other(process.launch.port)
    answer = odd.ask(engine).result(60)
    assert set(answer.weight_versions) == {5 if pushed else 0}
    assert engine.stats()["restarts"] == 1
    assert "'default', and it was given others" in engine.news()[-1]


def test_a_given_server_that_hung_for_a_while_goes_on(odd: Any) -> None:
    """Nobody here may end it: its calls wait until it answers again, and it gets the weights of now first."""
    odd.does(token_s=0.02)
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    engine.update_weights(odd.new_weights(), 5)
    asked = odd.ask(engine, 20)
    odd.until(lambda: odd.in_flight(engine, 1))
    os.killpg(process.pid, signal.SIGSTOP)
    odd.until(lambda: engine.replicas[0].server is None)
    os.killpg(process.pid, signal.SIGCONT)
    assert set(asked.result(60).weight_versions) == {5}
    assert engine.stats()["restarts"] == 1


def test_a_given_server_that_lost_its_adapter_gets_it_again(odd: Any) -> None:
    """It refuses a call that names one it doesn't know: the call is asked again when it does."""
    odd.does(server_info={"enable_lora": True})
    process = odd.other()
    engine = odd.engine(servers=[process.address], trainer={"adapter": "lora", "lora_rank": 2})
    wide = dict(weights_of(odd.model))["model.layers.0.self_attn.q_proj.weight"].shape
    front = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{front}.lora_A.weight": torch.ones(2, wide[1]), f"{front}.lora_B.weight": torch.ones(wide[0], 2)}
    adapter = AdapterWeights(config={"r": 2, "target_modules": ["q_proj"]}, tensors=tensors)
    for version in range(1, 4):
        engine.update_adapter(adapter, version)
    process.kill()
    odd.other(process.launch.port)
    assert set(odd.ask(engine).result(60).weight_versions) == {3}
    assert engine.stats()["restarts"] == 1


def test_answers_of_another_runs_weights_are_refused(odd: Any) -> None:
    """Two runs on one server would spoil each other for ever."""
    process = odd.other()
    engine = odd.engine(servers=[process.address])
    assert odd.ask(engine).result(60)
    thief = odd.engine(servers=[process.address])
    thief.update_weights(odd.new_weights(), 1)
    with pytest.raises(EngineError, match="let one run use it at a time"):
        odd.ask(engine).result(60)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_refused_weights_leave_the_version_of_before(odd: Any) -> None:
    """On every server."""
    engine = odd.engine(replicas=2)
    engine.update_weights(odd.new_weights(), 1)
    with pytest.raises(EngineError, match=r"name 'no\.such\.weight'"):
        engine.update_weights(iter([("no.such.weight", torch.ones(2))]), 2)
    assert engine.weight_version == 1
    answers = [odd.ask(engine, session=f"s{i}").result(60) for i in range(4)]
    assert {version for each in answers for version in each.weight_versions} == {1}
    engine.update_weights(odd.new_weights(), 2)
    assert set(odd.ask(engine).result(60).weight_versions) == {2}


def test_weights_that_nobody_kept_are_not_replaced_by_those_of_the_beginning(odd: Any) -> None:
    """A server that needs those of now again fails, where nothing may be restarted and so nothing is kept."""
    engine = odd.engine(servers=[odd.other().address], restarts=0)
    engine.update_weights(odd.new_weights(), 1)
    with pytest.raises(ServerSpoiled, match="they were not kept"):
        engine._published.restore(engine.replicas[0].server)
    assert set(odd.ask(engine).result(60).weight_versions) == {1}


def test_a_version_that_does_not_move_is_found_by_the_push(odd: Any) -> None:
    """And by what takes the server's place, as long as that lasts: an error, no hang."""
    engine = odd.engine()
    engine.update_weights(odd.new_weights(), 1)
    odd.does(stuck=True)
    with pytest.raises(EngineError, match=r"3 servers in a row ended before they could be asked .* calls them"):
        engine.update_weights(odd.new_weights(), 2)


def test_an_answer_from_older_weights_than_a_server_has_taken_never_counts(odd: Any) -> None:
    """The next answer is checked, not only what the server says of itself."""
    engine = odd.engine()
    engine.update_weights(odd.new_weights(), 1)
    engine.update_weights(odd.new_weights(), 2)
    odd.does(answer={"meta_info": {"weight_version": engine._published._tags.of(1)}}, token_s=0.05)
    asked = odd.ask(engine, 20)
    odd.until(lambda: engine.replicas[0].restarts == 1)
    odd.does()
    assert set(asked.result(60).weight_versions) == {2}
    assert "answered from version 1 of the weights, and it has taken version 2" in engine.news()[-1]


def test_weights_that_break_off_at_their_source_leave_a_run_that_goes_on(odd: Any) -> None:
    """What the trainer raises comes back to it; the server gets the weights of before, and no answer is half new."""
    engine = odd.engine()
    engine.update_weights(odd.new_weights(), 1)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(odd.new_weights())
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        engine.update_weights(breaking(), 2)
    assert set(odd.ask(engine).result(60).weight_versions) == {1}
