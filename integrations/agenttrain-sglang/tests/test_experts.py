"""Routed experts: each row is of its position, whatever was cached, cut, taken back or asked for in parts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
import torch
from agenttrain.errors import EngineError
from agenttrain.records import Generation, Ids, RoutedExperts, Sampling
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agenttrain_sglang.client import ServerClient, new_rid
from agenttrain_sglang.environment import find_environment
from agenttrain_sglang.experts import RoutedShape, routed_experts_of, routed_shape, shape_of
from agenttrain_sglang.launch import launch_of
from agenttrain_sglang.server import ServerProcess, free_port
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.wire import Sent, generate_body, generation_of, goes_on, going_on, joined

T = TypeVar("T")
N_LAYERS, N_EXPERTS = 3, 8
UNSEEN = 319
"""A stop id that none of the answers here holds."""
SHAPE = RoutedShape(n_hidden=2, layers=(0, 1), n_chosen=2, n_experts=4)

# ── shapes and bytes ─────────────────────────────────────────────────────────────────────────────────────────────────


def config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "x", "num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, **changes}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
    ],
)
def test_which_layers_route(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert shape_of(config(**changes)) == RoutedShape(n_hidden=6, layers=layers, n_chosen=2, n_experts=8)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_number_of_experts_has_several_names(key: str) -> None:
    told = {"num_hidden_layers": 1, "num_experts_per_tok": 2, key: 16}
    assert shape_of({"text_config": told}) == RoutedShape(n_hidden=1, layers=(0,), n_chosen=2, n_experts=16)


def test_a_dense_model_routes_nothing() -> None:
    assert shape_of({"num_hidden_layers": 2}) is None


def test_dense_layers_that_sglang_would_give_experts_are_refused() -> None:
    with pytest.raises(EngineError, match=r"Layers \[1\] of this qwen3_moe are dense .* --engine local"):
        shape_of(config(model_type="qwen3_moe", mlp_only_layers=[1]))


def test_a_tied_head_that_sglang_would_leave_zeros_is_refused() -> None:
    with pytest.raises(EngineError, match=r"The output head of this qwen3_moe is its embeddings .* --engine local"):
        shape_of(config(model_type="qwen3_moe", tie_word_embeddings=True))
    assert shape_of(config(model_type="qwen3_moe", tie_word_embeddings=False)) is not None
    assert shape_of(config(model_type="granitemoe", tie_word_embeddings=True)) is not None


def encoded(rows: list[Any]) -> str:
    return base64.b64encode(np.array(rows, dtype="<i4").tobytes()).decode()


def read(rows: list[Any], *, shape: RoutedShape = SHAPE, start: int = 4, end: int = 6) -> RoutedExperts:
    return routed_experts_of(encoded(rows), shape=shape, start=start, end=end, where="The server")


def test_rows_keep_their_order_and_their_start() -> None:
    experts = read([[[3, 1], [0, 2]], [[1, 3], [2, 0]]])
    assert (experts.start, experts.end, experts.n_layers, experts.n_chosen) == (4, 6, 2, 2)
    assert np.frombuffer(experts.data, "<u2").tolist() == [3, 1, 0, 2, 1, 3, 2, 0]


def test_columns_of_dense_layers_are_dropped() -> None:
    shape = RoutedShape(n_hidden=2, layers=(1,), n_chosen=2, n_experts=4)
    assert np.frombuffer(read([[[0, 0], [3, 2]]], shape=shape, end=5).data, "<u2").tolist() == [3, 2]


def test_no_positions_are_no_rows() -> None:
    assert read([], end=4) == RoutedExperts(start=4, n_layers=2, n_chosen=2, data=b"")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[[3, 1], [0, 2]]], r"4 routed experts for positions 4 to 6, and 2 layers of 2 experts make 8"),
        ([[[3, 1], [0, 2]]] * 3, "12 routed experts for positions 4 to 6"),
        ([[[3, 1], [0, 4]]] * 2, "from 0 to 4, and a layer of the model has 4"),
        ([[[3, 1], [0, -1]]] * 2, "from -1 to 3"),
        ([[[3, 1], [0, 0]]] * 2, "through one expert twice"),
    ],
)
def test_rows_that_don_t_fit_are_refused(rows: list[Any], words: str) -> None:
    with pytest.raises(EngineError, match=f"^The server: .*{words}"):
        read(rows)


@pytest.mark.parametrize("text", ["no base64!", "AAA=", "AAAA"])
def test_what_is_no_base64_of_int32_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="no base64 of int32"):
        routed_experts_of(text, shape=SHAPE, start=0, end=1, where="The server")


# ── against transformers' router ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe of three layers that all route, whose end id comes up often."""
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=N_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=[2, 3, 4, 5, 6],
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def address(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of that model that tells its experts."""
    settings = SglangTable(max_running=8, cache_tokens=8192)
    launch = launch_of(
        settings, find_environment(settings), mixture, port=free_port(), deterministic=True, tells_experts=True
    )
    process = ServerProcess(launch, log=tmp_path_factory.mktemp("mixture-server") / "server.log")
    try:
        ask(process.address, lambda client: until_healthy(client, process))
        yield process.address
    finally:
        process.kill()


async def until_healthy(client: ServerClient, process: ServerProcess) -> None:
    while not await client.is_healthy(10.0):
        assert process.has_ended() is None, process.has_ended()
        await asyncio.sleep(0.2)


def ask(address: str, talk: Callable[[ServerClient], Awaitable[T]]) -> T:
    async def talked() -> T:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await talk(ServerClient(address, session))

    return asyncio.run(talked())


@pytest.fixture(scope="module")
def chosen(mixture: Path) -> Callable[[Ids], torch.Tensor]:
    """[positions, layers, chosen] experts by transformers' router, each row's experts in rising order."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()

    def chosen(ids: Ids) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        return torch.stack([each.topk(2, dim=-1).indices.sort(dim=-1).values for each in logits], dim=1)

    return chosen


class Asked:
    """One turn's calls to a server, read with its experts."""

    def __init__(self, client: ServerClient, shape: RoutedShape) -> None:
        self.client, self.shape = client, shape

    async def __call__(self, prompt: Ids, sampling: Sampling, *, rid: str | None = None) -> Generation:
        rid = rid or new_rid()
        answer = await self.client.generate(generate_body(prompt, sampling, rid=rid, wants_experts=True))
        sent = Sent(
            prompt_ids=prompt,
            sampling=sampling,
            rid=rid,
            address=self.client.address,
            n_vocabulary=320,
            routed=self.shape,
        )
        return generation_of(answer, sent=sent, version_of=lambda _: 0)


def how(*, seed: int = 1, max_tokens: int = 40, stop_ids: Ids = (), experts_from: int = 0) -> Sampling:
    return Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed, stop_ids=stop_ids, experts_from=experts_from)


def agree(experts: RoutedExperts | None, expected: torch.Tensor, *, start: int) -> None:
    """Every position from `start` to the last but one went through the experts that the router chooses."""
    assert experts is not None
    assert (experts.start, experts.end) == (start, len(expected) - 1)
    told = np.frombuffer(experts.data, "<u2").reshape(-1, experts.n_layers, experts.n_chosen)
    assert np.sort(told, axis=-1).tolist() == expected[start:-1].tolist()


PROMPT = tuple(range(10, 90))


@pytest.mark.sglang
def test_over_turns_each_position_is_told_once(
    address: str, mixture: Path, chosen: Callable[[Ids], torch.Tensor]
) -> None:
    """The first turn tells from the beginning, the second, which finds it in the cache, only what is new."""

    async def talk(client: ServerClient) -> tuple[Generation, Ids, Generation]:
        asked = Asked(client, shape(mixture))
        first = await asked(PROMPT, how())
        prompt = PROMPT + first.token_ids + (7, 8, 9)
        return first, prompt, await asked(prompt, how(experts_from=len(PROMPT) + 39))

    first, prompt, second = ask(address, talk)
    agree(first.routed_experts, chosen(PROMPT + first.token_ids), start=0)
    agree(second.routed_experts, chosen(prompt + second.token_ids), start=len(PROMPT) + 39)
    assert second.n_cached_ids == len(PROMPT) + 39


def shape(folder: Path) -> RoutedShape:
    shape = routed_shape(folder)
    assert shape == RoutedShape(n_hidden=N_LAYERS, layers=(0, 1, 2), n_chosen=2, n_experts=N_EXPERTS)
    return shape


@pytest.mark.sglang
def test_positions_that_were_read_before_are_told_too(
    address: str, mixture: Path, chosen: Callable[[Ids], torch.Tensor]
) -> None:
    async def talk(client: ServerClient) -> Generation:
        asked = Asked(client, shape(mixture))
        await asked(PROMPT, how(seed=2))
        return await asked(PROMPT, how(seed=3))

    again = ask(address, talk)
    assert again.n_cached_ids == len(PROMPT) - 1
    agree(again.routed_experts, chosen(PROMPT + again.token_ids), start=0)


@pytest.mark.sglang
def test_one_id_after_a_known_prompt_has_no_rows(address: str, mixture: Path) -> None:
    sampling = how(max_tokens=1, experts_from=len(PROMPT))
    generation = ask(address, lambda client: Asked(client, shape(mixture))(PROMPT, sampling))
    assert generation.routed_experts == RoutedExperts(start=len(PROMPT), n_layers=3, n_chosen=2, data=b"")


@pytest.mark.sglang
def test_an_aborted_call_tells_the_experts_of_what_it_sampled(
    address: str, mixture: Path, chosen: Callable[[Ids], torch.Tensor]
) -> None:

    async def cut(client: ServerClient, after_s: float) -> Generation:
        rid = new_rid()
        call = asyncio.create_task(Asked(client, shape(mixture))(PROMPT, how(max_tokens=900), rid=rid))
        while not call.done():
            await asyncio.sleep(after_s)
            await client.abort(rid)
        return await call

    async def talk(client: ServerClient) -> Generation:
        """Later each time, until the call had begun."""
        for after_s in (0.1, 0.2, 0.4, 0.8, 1.6):
            aborted = await cut(client, after_s)
            if aborted.token_ids:
                break
        return aborted

    aborted = ask(address, talk)
    assert aborted.token_ids
    assert aborted.stop_reason == "aborted"
    agree(aborted.routed_experts, chosen(PROMPT + aborted.token_ids), start=0)


@pytest.mark.sglang
def test_an_answer_in_parts_has_the_experts_of_the_whole(
    address: str, mixture: Path, chosen: Callable[[Ids], torch.Tensor]
) -> None:
    """Its parts end on end ids of the model, which are no stop ids of the turn."""

    async def talk(client: ServerClient) -> tuple[Generation, int]:
        asked, prompt = Asked(client, shape(mixture)), PROMPT
        sampling = how(max_tokens=200, stop_ids=(UNSEEN,), experts_from=20)
        whole = part = await asked(prompt, sampling)
        n_parts = 1
        while goes_on(part, sampling):
            prompt, sampling = going_on(prompt, part, sampling)
            part = await asked(prompt, sampling)
            whole, n_parts = joined(whole, part), n_parts + 1
        return whole, n_parts

    whole, n_parts = ask(address, talk)
    assert n_parts > 1
    agree(whole.routed_experts, chosen(PROMPT + whole.token_ids), start=20)


@pytest.mark.sglang
def test_a_call_that_was_taken_back_and_begun_again_tells_every_position_once(
    address: str, mixture: Path, chosen: Callable[[Ids], torch.Tensor]
) -> None:
    """As under pressure of memory: its place in the cache is lost, and all is read again."""

    async def post(path: str, body: dict[str, Any]) -> None:
        async with aiohttp.ClientSession() as session, session.post(address + path, json=body) as response:
            assert response.status == 200

    async def taken_back(client: ServerClient, after_s: float) -> tuple[Generation, int]:
        sampling, rid = how(max_tokens=400, experts_from=30), new_rid()
        call = asyncio.create_task(client.generate(generate_body(PROMPT, sampling, rid=rid, wants_experts=True)))
        await asyncio.sleep(after_s)
        await post("/pause_generation", {"mode": "retract"})
        await post("/flush_cache", {})
        await post("/continue_generation", {})
        answer = await call
        sent = Sent(
            prompt_ids=PROMPT, sampling=sampling, rid=rid, address=address, n_vocabulary=320, routed=shape(mixture)
        )
        return generation_of(answer, sent=sent, version_of=lambda _: 0), answer["meta_info"]["num_retractions"]

    async def talk(client: ServerClient) -> tuple[Generation, int]:
        """Later each time, until the call had begun."""
        for after_s in (0.1, 0.2, 0.4, 0.8, 1.6):
            answer = await taken_back(client, after_s)
            if answer[1]:
                break
        return answer

    generation, n_retractions = ask(address, talk)
    assert n_retractions == 1
    assert generation.stop_reason == "length"
    agree(generation.routed_experts, chosen(PROMPT + generation.token_ids), start=30)
