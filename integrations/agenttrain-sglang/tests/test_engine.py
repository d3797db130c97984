"""The engine over a real server keeps to what every engine keeps to, and to what SGLang makes hard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.config import Config, resolve
from agenttrain.errors import EngineError
from agenttrain.protocols import Engine, EngineContext, TakesAdapters, TellsNews
from agenttrain.records import Generation, Sampling
from agenttrain.testing import EngineContract

from agenttrain_sglang.engine import SglangEngine
from agenttrain_sglang.plan import plan_of
from agenttrain_sglang.published import weights_of

pytestmark = pytest.mark.sglang

PROMPT = (5, 9, 13, 17)


def config_of(address: str, **table: Any) -> Config:
    return resolve(("the test", {"sglang": {"servers": [address], **table}}))


@pytest.fixture
def engine(server: Any) -> Iterator[SglangEngine]:
    """Over the shared server, with the weights of its folder."""
    engine = SglangEngine(plan_of(EngineContext(config=config_of(server.address), model=str(server.model))))
    yield engine
    engine.close()


def other_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Those of a folder, each a bit larger."""
    return [(name, tensor * 1.05) for name, tensor in weights_of(folder)]


def sampling(**how: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_tokens": 6, "seed": 3, "stop_ids": (), **how})


def answer(engine: Engine, **how: Any) -> Generation:
    return engine.generate(PROMPT, sampling(**how), session="s").result(60)


class TestContract(EngineContract):
    """What `agenttrain.testing` asks of every engine, over HTTP."""

    n_draws = 300

    @pytest.fixture
    def engine(self, server: Any) -> Iterator[SglangEngine]:
        engine = SglangEngine(plan_of(EngineContext(config=config_of(server.address), model=str(server.model))))
        yield engine
        engine.close()

    @pytest.fixture
    def new_weights(self, server: Any) -> Sequence[tuple[str, Any]]:
        return other_weights(server.model)


def test_it_says_what_it_can(engine: SglangEngine) -> None:
    """Seeds, adapters, news: what a trainer and a report ask for."""
    assert isinstance(engine, TakesAdapters)
    assert isinstance(engine, TellsNews)
    assert engine.takes_seeds
    assert not engine.takes_adapters
    (said,) = engine.news()
    assert said.startswith("weights travel ")
    assert engine.news() == []


def test_a_server_of_somebody_else_gets_the_models_own_weights_first(server: Any) -> None:
    """Whatever an earlier run left in it: the base's log probabilities are the same as before."""
    context = EngineContext(config=config_of(server.address), model=str(server.model))
    first = SglangEngine(plan_of(context))
    before = answer(first, temperature=0.0)
    first.update_weights(iter(other_weights(server.model)), 4)
    changed = answer(first, temperature=0.0)
    first.close()
    second = SglangEngine(plan_of(context))
    again = answer(second, temperature=0.0)
    second.close()
    assert set(changed.weight_versions) == {4}
    assert changed.logprobs != before.logprobs
    assert (again.token_ids, set(again.weight_versions)) == (before.token_ids, {0})
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_what_the_server_counts_is_what_was_handed_on(engine: SglangEngine) -> None:
    """Its own counter of generated tokens, where no answer was lost."""
    before = engine.stats()
    asked = [engine.generate(PROMPT, sampling(seed=i, max_tokens=9), session=f"s{i}") for i in range(20)]
    n = sum(len(future.result(60).token_ids) for future in asked)
    after = engine.stats()
    assert after["sampled_ids"] - before["sampled_ids"] == n
    assert after["server_sampled_ids"] - before["server_sampled_ids"] == n


def test_weights_change_under_calls_in_flight(engine: SglangEngine, server: Any) -> None:
    """Such a call goes on: its first ids are of the old version, its last of the new one, and nobody waits for it."""
    room = engine.max_length - len(PROMPT)
    asked = [engine.generate(PROMPT, sampling(max_tokens=min(room, 240), seed=i), session=f"l{i}") for i in range(4)]
    while not any(server_is_busy(engine)):
        assert not all(future.done() for future in asked)
    engine.update_weights(iter(other_weights(server.model)), 1)
    answers = [future.result(60) for future in asked]
    assert all(sorted(each.weight_versions) == list(each.weight_versions) for each in answers)
    assert {version for each in answers for version in each.weight_versions} == {0, 1}


def server_is_busy(engine: SglangEngine) -> list[bool]:
    return [replica.server is not None and replica.server.n_running > 0 for replica in engine.replicas]


def test_more_calls_than_a_server_takes_at_once_wait_here(server: Any) -> None:
    """And are answered all, one after the other."""
    context = EngineContext(config=config_of(server.address, max_running=2), model=str(server.model))
    engine = SglangEngine(plan_of(context))
    asked = [engine.generate(PROMPT, sampling(seed=i), session=f"w{i}") for i in range(12)]
    most = 0
    while not all(future.done() for future in asked):
        most = max(most, *(replica.server.n_running for replica in engine.replicas if replica.server is not None))
    engine.close()
    assert [len(future.result(0).token_ids) for future in asked] == [6] * 12
    assert most <= 2


def test_a_prompt_outside_of_the_vocabulary_never_reaches_the_server(engine: SglangEngine) -> None:
    """It would end the server; the next call is answered as if nothing had been."""
    with pytest.raises(EngineError, match="holds id 999999"):
        engine.generate((5, 999_999), sampling(), session="s")
    assert len(answer(engine).token_ids) == 6
