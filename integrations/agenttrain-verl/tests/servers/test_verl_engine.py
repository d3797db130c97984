"""agenttrain_verl.verl_engine: the contract of engines, over veRL's client, its router and a real EngineServer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from agenttrain.errors import EngineError
from agenttrain.protocols import Engine
from agenttrain.records import Ids, RoutedExperts, Sampling
from agenttrain.testing.engine_contract import EngineContract
from verl.workers.rollout.replica import TokenOutput

from agenttrain_verl.engine_server import EngineServer
from agenttrain_verl.verl_engine import VerlEngine, experts_of, generation_of, own_params, stock_params

PROMPT = (5, 9, 13, 17)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Runs on a thread of its own, as a worker's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def server(spec: Any, loop: asyncio.AbstractEventLoop) -> Iterator[EngineServer]:
    server = EngineServer(spec(), 0)
    on(loop, server.open())
    yield server
    on(loop, server.close())


def on(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(60)


class TestVerlEngine(EngineContract):
    """The whole contract but for new weights, which the trainer sends to the servers."""

    @pytest.fixture
    def engine(
        self, server: EngineServer, client_of: Callable[..., Any], loop: asyncio.AbstractEventLoop
    ) -> Iterator[Engine]:
        engine = VerlEngine(client_of(a=server), loop, name="local", max_length=1024, takes_seeds=True)
        yield engine
        engine.close()

    def test_new_weights_answer_the_next_call(self, engine: Engine, prompt: Ids, new_weights: Any) -> None:
        """They come from veRL's trainer: through here nobody may publish any."""
        with pytest.raises(EngineError, match="from its trainer"):
            engine.update_weights(iter(new_weights), 1)

    def test_what_was_sampled_until_release_is_the_answer(self, engine: Engine, server: EngineServer) -> None:
        future = engine.generate(PROMPT, sampling(max_tokens=900), session="s")
        while engine.stats()["calls"] == 0 and not _has_sampled(server, engine):
            pass
        engine.release("s")
        answer = future.result(20)
        assert answer.stop_reason == "aborted"
        assert 0 < len(answer.token_ids) == len(answer.logprobs) < 900
        assert engine.stats()["aborted"] == 1

    def test_the_newest_version_that_was_seen_is_told(
        self, engine: Engine, server: EngineServer, loop: asyncio.AbstractEventLoop
    ) -> None:
        async def pushed() -> None:
            await server.begin_weights(6)
            await server.end_weights()

        on(loop, pushed())
        assert engine.weight_version == 0
        assert set(engine.generate(PROMPT, sampling(), session="s").result(20).weight_versions) == {6}
        assert engine.weight_version == 6


def _has_sampled(server: EngineServer, engine: Any) -> bool:
    return bool(on(engine._loop, server.stats())["sampled_ids"])


def sampling(**how: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_tokens": 4, "seed": 1, "stop_ids": ()} | how)


def output(**fields: Any) -> TokenOutput:
    known = {"token_ids": [1, 2], "log_probs": [-0.5, -1.0], "stop_reason": "stop"}
    return TokenOutput(**{**known, "extra_fields": {"weight_versions": [3, 4], "num_cached_tokens": 2}} | fields)


def test_a_loop_that_is_closed_is_an_engine_error(client_of: Callable[..., Any]) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    engine = VerlEngine(client_of(), loop, name="local", max_length=64)
    with pytest.raises(EngineError, match="loop"):
        engine.generate(PROMPT, sampling(), session="s").result(5)


def test_a_stock_server_s_call_ends_at_once(client_of: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
    """It can't be told of a rollout's end: nothing is waited for."""

    class Stock:
        async def generate(self, **kwargs: Any) -> TokenOutput:
            await asyncio.sleep(3600)
            raise AssertionError

    engine = VerlEngine(client_of(a=Stock()), loop, name="sglang", max_length=64, stock=True)
    future = engine.generate(PROMPT, sampling(), session="s")
    engine.release("s")
    assert (future.result(5).stop_reason, future.result().token_ids) == ("aborted", ())


def test_a_record_of_veRL_becomes_ours() -> None:
    generation = generation_of(output(), prompt_ids=PROMPT, sampling=sampling())
    assert (generation.token_ids, generation.logprobs, generation.weight_versions) == ((1, 2), (-0.5, -1.0), (3, 4))
    assert (generation.stop_reason, generation.n_cached_ids) == ("stop", 2)
    assert generation_of(output(stop_reason="abort"), prompt_ids=PROMPT, sampling=sampling()).stop_reason == "aborted"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"log_probs": None}, "2 ids with 0 log probabilities"),
        ({"log_probs": [-0.5]}, "2 ids with 1 log probabilities"),
        ({"extra_fields": {"weight_versions": [3]}}, "1 weight versions"),
        ({"stop_reason": "completed"}, "with 'completed'"),
        ({"stop_reason": None}, "with None"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        generation_of(output(**fields), prompt_ids=PROMPT, sampling=sampling())


def test_more_ids_than_were_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match="2 ids where 1 were asked for"):
        generation_of(output(), prompt_ids=PROMPT, sampling=sampling(max_tokens=1))


def test_a_stock_server_s_experts_are_cut_to_what_was_asked_for() -> None:
    """[positions, layers, chosen] of the whole sequence; a row for the last id too, or not."""
    rows = np.arange(12).reshape(6, 1, 2)
    for told in (rows, rows[:5]):
        experts = experts_of(told, n_read=5, start=3)
        assert experts == RoutedExperts(start=3, n_layers=1, n_chosen=2, data=bytes([6, 0, 7, 0, 8, 0, 9, 0]))
    assert experts_of(None, n_read=5, start=0) is None
    with pytest.raises(EngineError, match=r"shape \[4, 1, 2\]"):
        experts_of(rows[:4], n_read=5, start=0)
    with pytest.raises(EngineError, match="0 to 70000"):
        experts_of(np.array([[[0, 70000]]]), n_read=1, start=0)


def test_what_servers_are_asked() -> None:
    how = sampling(stop_ids=(2,), experts_from=7)
    assert own_params(how, session="r") == {
        "temperature": 1.0,
        "max_tokens": 4,
        "stop_token_ids": [2],
        "seed": 1,
        "experts_from": 7,
        "session": "r",
    }
    assert stock_params(how) == {
        "temperature": 1.0,
        "max_new_tokens": 4,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
