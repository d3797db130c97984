"""agenttrain_verl.turn_client and verl_engine: over real EngineServers and veRL's own router, without Ray.

Only the way between them is ours here: a handle that calls instead of sending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from agenttrain.errors import EngineError
from agenttrain.records import RoutedExperts
from ray.exceptions import ActorDiedError
from safetensors.torch import load_file
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from agenttrain_verl import turn_client
from agenttrain_verl.engine_server import EngineServer
from agenttrain_verl.turn_client import joined
from agenttrain_verl.weight_stream import packed

PROMPT = [5, 9, 13, 17]
LONG = {"temperature": 1.0, "max_tokens": 40, "seed": 11}


class Stock:
    """What veRL's SGLang server tells, of calls whose answers are known."""

    def __init__(self, *outputs: TokenOutput) -> None:
        self._outputs = list(outputs)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **kwargs: Any) -> TokenOutput:
        self.asked.append(kwargs)
        return self._outputs.pop(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


async def opened(spec: Any) -> EngineServer:
    server = EngineServer(spec(), 0)
    await server.open()
    return server


async def sampled(server: EngineServer, n: int) -> None:
    before = (await server.stats())["sampled_ids"]
    while (await server.stats())["sampled_ids"] < before + n:
        await asyncio.sleep(0.002)


def test_a_turn_that_was_broken_off_is_the_turn_that_was_not(spec: Any, client_of: Any) -> None:
    """Same ids, same log probabilities, the whole budget: seeds go on from where the turn was broken off."""

    async def body() -> None:
        server = await opened(spec)
        client = client_of(a=server)
        params = {**LONG, "max_tokens": 400}
        whole = await client.generate("r", prompt_ids=PROMPT, sampling_params=params)
        broken = asyncio.create_task(client.generate("r", prompt_ids=PROMPT, sampling_params=params))
        for _ in range(3):
            await sampled(server, 20)
            await server.abort_all_requests()
            await server.resume_generation()
        output = await broken
        assert output.token_ids == whole.token_ids
        assert output.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
        assert (output.stop_reason, len(output.token_ids)) == ("length", 400)
        assert params == {**LONG, "max_tokens": 400}
        await server.close()

    run(body)


def test_each_id_keeps_the_version_of_the_weights_that_sampled_it(spec: Any, client_of: Any) -> None:
    async def body() -> None:
        server = await opened(spec)
        client = client_of(a=server)
        turn = asyncio.create_task(client.generate("r", prompt_ids=PROMPT, sampling_params={**LONG, "max_tokens": 300}))
        await sampled(server, 20)
        await server.abort_all_requests()
        await server.begin_weights(5)
        weights = load_file(spec.model / "model.safetensors")
        await server.put_weights([packed(name, 2 * tensor) for name, tensor in weights.items()])
        await server.end_weights()
        await server.resume_generation()
        output = await turn
        versions = output.extra_fields["weight_versions"]
        assert len(versions) == len(output.token_ids) == 300
        assert versions == sorted(versions)
        assert set(versions) == {0, 5}
        told = {name: output.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")}
        assert told == {"global_steps": 5, "min_global_steps": 0, "max_global_steps": 5}
        await server.close()

    run(body)


def test_turns_of_one_rollout_go_to_one_server(spec: Any, client_of: Any) -> None:
    async def body() -> None:
        servers = {"a": await opened(spec), "b": await opened(spec)}
        client = client_of(**servers)
        await asyncio.gather(
            *(client.generate("r", prompt_ids=PROMPT, sampling_params=LONG) for _ in range(6)),
        )
        counts = sorted([(await server.stats())["sampled_ids"] for server in servers.values()])
        assert counts == [0, 240]
        for server in servers.values():
            await server.close()

    run(body)


def test_a_replica_that_is_left_alone_is_asked_again_until_it_goes_on(spec: Any, client_of: Any) -> None:
    async def body() -> None:
        server = await opened(spec)
        client = client_of(a=server)
        await server.abort_all_requests(reject_request=True)
        turn = asyncio.create_task(client.generate("r", prompt_ids=PROMPT, sampling_params=LONG))
        await asyncio.sleep(0.1)
        assert not turn.done()
        await server.resume_generation()
        assert len((await turn).token_ids) == 40
        await server.close()

    run(body)


def test_without_a_server_it_waits_for_one(spec: Any, client_of: Any, handle_of: Any) -> None:
    """As while veRL's trainer has taken all replicas out of its router."""

    async def body() -> None:
        server = await opened(spec)
        router = GlobalRequestLoadBalancer({})
        client = client_of()
        client._load_balancer = handle_of(router)
        turn = asyncio.create_task(client.generate("r", prompt_ids=PROMPT, sampling_params=LONG))
        await asyncio.sleep(0.1)
        assert not turn.done()
        router.add_servers({"a": handle_of(server)})
        assert len((await turn).token_ids) == 40
        await server.close()

    run(body)


def test_end_gives_what_was_sampled(spec: Any, client_of: Any) -> None:
    """And keeps the turn from going on, while another rollout's does."""

    async def body() -> None:
        server = await opened(spec)
        client = client_of(a=server)
        params = {**LONG, "max_tokens": 900}
        ended = asyncio.create_task(
            client.generate("ends", prompt_ids=PROMPT, sampling_params=params | {"session": "ends"})
        )
        other = asyncio.create_task(client.generate("goes on", prompt_ids=PROMPT, sampling_params=params))
        await sampled(server, 20)
        await client.end("ends")
        output = await ended
        assert output.stop_reason == "aborted"
        assert 0 < len(output.token_ids) == len(output.extra_fields["weight_versions"]) < 900
        assert len((await other).token_ids) == 900
        await server.close()

    run(body)


def test_what_a_server_refuses_is_an_engine_error_in_its_own_words(spec: Any, client_of: Any) -> None:
    async def body() -> None:
        server = await opened(spec)
        with pytest.raises(EngineError, match="holds id 999"):
            await client_of(a=server).generate("r", prompt_ids=[999], sampling_params=LONG)
        await server.close()

    run(body)


def test_a_dead_server_is_an_engine_error_once_nobody_ended_the_run(
    client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_client, "DEAD_FOR_S", 0.2)

    class Dead:
        async def generate(self, **kwargs: Any) -> TokenOutput:
            raise ActorDiedError()

    async def body() -> None:
        with pytest.raises(EngineError, match="has died"):
            await client_of(a=Dead()).generate("r", prompt_ids=PROMPT, sampling_params=LONG)

    run(body)


def test_a_turn_of_a_dead_server_ends_with_its_rollout(client_of: Any) -> None:
    """As aborted: it is made again when the run goes on."""

    class Dead:
        async def generate(self, **kwargs: Any) -> TokenOutput:
            raise ActorDiedError()

        async def release(self, session: str) -> None: ...

    async def body() -> None:
        client = client_of(a=Dead())
        turn = asyncio.ensure_future(client.generate("r", prompt_ids=PROMPT, sampling_params=LONG))
        await asyncio.sleep(0.2)
        assert not turn.done()
        await client.end("r")
        assert (await turn).stop_reason == "aborted"

    run(body)


# ── a stock server ───────────────────────────────────────────────────────────────────────────────────────────────────


def stock_output(ids: list[int], reason: str, version: int | None, *, rows: Any = None) -> TokenOutput:
    return TokenOutput(
        token_ids=ids,
        log_probs=[-0.5] * len(ids),
        stop_reason=reason,
        routed_experts=rows,
        extra_fields={"global_steps": version},
    )


def test_a_stock_server_s_one_version_is_each_token_s(client_of: Any) -> None:
    async def body() -> None:
        stock = Stock(stock_output([1, 2], "abort", 3), stock_output([4], "stop", 4))
        params = {"temperature": 1.0, "max_new_tokens": 8, "logprobs": True}
        output = await client_of(a=stock).generate("r", prompt_ids=[7], sampling_params=params)
        assert output.token_ids == [1, 2, 4]
        assert output.extra_fields["weight_versions"] == [3, 3, 4]
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 4)
        assert output.stop_reason == "stop"
        second = stock.asked[1]
        assert second["prompt_ids"] == [7, 1, 2]
        assert second["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 6, "logprobs": True}

    run(body)


def test_before_the_first_push_the_version_is_0(client_of: Any) -> None:
    async def body() -> None:
        output = await client_of(a=Stock(stock_output([1], "length", None))).generate(
            "r", prompt_ids=[7], sampling_params={"max_new_tokens": 1}
        )
        assert output.extra_fields["weight_versions"] == [0]

    run(body)


def test_an_abort_at_the_last_id_of_the_budget_is_its_length(client_of: Any) -> None:
    async def body() -> None:
        stock = Stock(stock_output([1, 2], "abort", 3))
        output = await client_of(a=stock).generate("r", prompt_ids=[7], sampling_params={"max_new_tokens": 2})
        assert (output.stop_reason, output.extra_fields["stop_reason"]) == ("length", "length")

    run(body)


def test_a_stock_server_s_experts_of_earlier_ids_stay_as_they_were(client_of: Any) -> None:
    """It tells those of the whole sequence again, from newer weights."""

    async def body() -> None:
        first, second = np.full((3, 1, 2), 1), np.full((5, 1, 2), 2)
        stock = Stock(stock_output([1, 2], "abort", 3, rows=first), stock_output([4, 5], "stop", 4, rows=second))
        output = await client_of(a=stock).generate("r", prompt_ids=[7, 8], sampling_params={"max_new_tokens": 8})
        assert output.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2]

    run(body)


def ours(ids: list[int], start: int, n_rows: int) -> TokenOutput:
    experts = RoutedExperts(start=start, n_layers=1, n_chosen=1, data=bytes(2 * n_rows))
    return TokenOutput(
        token_ids=ids,
        log_probs=[0.0] * len(ids),
        routed_experts=experts,
        extra_fields={"weight_versions": [0] * len(ids)},
    )


def test_experts_of_an_engine_of_ours_follow_each_other() -> None:
    whole = joined([ours([1, 2], 0, 4), ours([], 4, 2), ours([3], 4, 1)]).routed_experts
    assert (whole.start, whole.end) == (0, 5)
    with pytest.raises(EngineError, match="up to 3 are followed by those from 6"):
        joined([ours([1, 2], 0, 4), ours([3], 6, 1)])


def test_a_part_that_told_no_experts_leaves_none() -> None:
    silent = ours([3], 4, 1).model_copy(update={"routed_experts": None})
    assert joined([ours([1, 2], 0, 4), silent]).routed_experts is None


def test_nothing_sampled_is_an_aborted_turn() -> None:
    output = joined([])
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([], [], "aborted")
