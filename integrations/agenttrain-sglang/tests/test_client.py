"""A real server asked through the client: its numbers are the model's, its ends the turn's, its refusals are told."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
import pytest
import torch
from agenttrain.errors import ConfigError, EngineError
from agenttrain.records import Generation, Ids, Sampling
from transformers import AutoModelForCausalLM

from agenttrain_sglang.client import (
    ServerClient,
    ServerRefused,
    check_prompt,
    check_version,
    checked_address,
    new_rid,
    said,
)
from agenttrain_sglang.versions import TESTED
from agenttrain_sglang.wire import Sent, generate_body, generation_of, goes_on, going_on, joined

T = TypeVar("T")
UNSEEN = 319
"""An id that none of the answers here holds."""


class Running(Protocol):
    """What the shared server tells of itself."""

    @property
    def address(self) -> str: ...

    @property
    def model(self) -> Path: ...


@pytest.fixture
def original(server: Running) -> Running:
    """The shared server with the weights of its folder, whatever a test before gave it."""
    body = json.dumps({"model_path": str(server.model), "weight_version": "default", "flush_cache": True}).encode()
    request = urllib.request.Request(
        f"{server.address}/update_weights_from_disk", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["success"]
    return server


def ask(address: str, talk: Callable[[ServerClient], Awaitable[T]]) -> T:
    async def talked() -> T:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await talk(ServerClient(address, session))

    return asyncio.run(talked())


async def sampled(client: ServerClient, prompt: Ids, sampling: Sampling, *, rid: str | None = None) -> Generation:
    rid = rid or new_rid()
    answer = await client.generate(generate_body(prompt, sampling, rid=rid))
    sent = Sent(prompt_ids=prompt, sampling=sampling, rid=rid, address=client.address, n_vocabulary=320)
    return generation_of(answer, sent=sent, version_of=lambda _: 0)


def how(*, temperature: float = 1.0, max_tokens: int = 24, seed: int = 2**62 + 7, stop_ids: Ids = ()) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed, stop_ids=stop_ids)


def prompt_of(n: int, seed: int) -> Ids:
    return tuple(random.Random(seed).choices(range(3, 300), k=n))


def test_a_supported_version_is_let_through_and_another_is_named() -> None:
    check_version(TESTED, "http://h:1")
    check_version("0.5.12", "http://h:1")
    check_version("0.5.23.post1+g1234", "http://h:1")
    with pytest.raises(EngineError, match=r"http://h:1 is SGLang 0\.4\.9, and .*>=0\.5\.12.* is supported"):
        check_version("0.4.9", "http://h:1")
    with pytest.raises(EngineError, match="http://h:1 says no version"):
        check_version(None, "http://h:1")


def test_an_address_is_checked_before_anything_is_asked() -> None:
    assert checked_address("http://10.0.0.7:30000/") == "http://10.0.0.7:30000"
    for wrong in ("10.0.0.7:30000", "ftp://h:1", "http://", ""):
        with pytest.raises(ConfigError, match=r"no address of a server\. Write one such as"):
            checked_address(wrong)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"error": {"message": "no room"}}, "no room"),
        ({"object": "error", "message": "no"}, "no"),
        ({"detail": "Not Found"}, "Not Found"),
        ("plain", '"plain"'),
    ],
)
def test_the_words_of_a_refusal_are_found(content: object, words: str) -> None:
    assert said(json.dumps(content).encode()) in (words, words.strip('"'))


def test_ids_of_requests_have_one_length_and_differ() -> None:
    rids = {new_rid() for _ in range(100)}
    assert len(rids) == 100
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ((), 1, "is empty. Give at least one id"),
        ((1,), 0, "max_tokens is 0"),
        ((1, 2, 3), 8, "3 prompt ids and 8 new ones, and the server takes 10 together"),
        ((1, 320), 1, "holds id 320, and the model's vocabulary has 320 ids"),
        ((1, -1), 1, "holds id -1"),
    ],
)
def test_a_prompt_that_a_server_must_not_get_is_refused(prompt: Ids, max_tokens: int, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check_prompt(prompt, how(max_tokens=max_tokens), session="s", n_vocabulary=320, max_length=10)


def test_a_prompt_that_fits_is_let_through() -> None:
    check_prompt((0, 319), how(max_tokens=8), session="s", n_vocabulary=320, max_length=10)


@pytest.mark.sglang
def test_a_server_tells_what_it_is(server: Running) -> None:
    facts = ask(server.address, lambda client: client.facts())
    assert facts.version == TESTED
    assert facts.dtype == "float32"
    assert facts.takes_seeds
    assert facts.caches_prefixes
    assert ask(server.address, lambda client: client.is_healthy(20.0))


@pytest.mark.sglang
def test_what_fits_into_max_length_is_sampled_to_its_end(server: Running) -> None:
    """A prompt one shorter than max_length has room for one id; one as long as max_length is refused."""
    length = ask(server.address, lambda client: client.facts()).max_length

    async def talk(client: ServerClient) -> tuple[Generation, Generation]:
        with pytest.raises(ServerRefused) as refused:
            await sampled(client, prompt_of(length, 1), how(max_tokens=1))
        assert refused.value.status == 400
        assert str(length) in refused.value.message
        return (
            await sampled(client, prompt_of(length - 1, 1), how(max_tokens=1)),
            await sampled(client, prompt_of(length - 9, 1), how(max_tokens=9)),
        )

    one, nine = ask(server.address, talk)
    assert (len(one.token_ids), len(nine.token_ids)) == (1, 9)


@pytest.mark.sglang
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_log_probabilities_are_the_models(original: Running, temperature: float) -> None:
    """At the temperature that sampled (at 1 for greedy), against transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(original.model, dtype=torch.float32).eval()
    prompts = [prompt_of(20 + 37 * i, i) for i in range(4)]

    async def talk(client: ServerClient) -> list[Generation]:
        calls = (sampled(client, each, how(temperature=temperature, seed=i)) for i, each in enumerate(prompts))
        return list(await asyncio.gather(*calls))

    for prompt, generation in zip(prompts, ask(original.address, talk), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generation.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        expected = [logprobs[place, i].item() for place, i in enumerate(generation.token_ids)]
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(generation.token_ids) == 24
        if temperature == 0:
            assert generation.token_ids == tuple(logits.argmax(dim=-1).tolist())


@pytest.mark.sglang
def test_equal_seeds_give_equal_ids_whoever_is_asked_beside_them(server: Running) -> None:
    prompt = prompt_of(40, 5)

    async def talk(client: ServerClient) -> tuple[Generation, list[Generation]]:
        alone = await sampled(client, prompt, how(seed=2**62))
        others = await asyncio.gather(*(sampled(client, prompt, how(seed=2**62 + (i << 33))) for i in range(8)))
        return alone, list(others)

    alone, others = ask(server.address, talk)
    assert others[0].token_ids == alone.token_ids
    assert len({other.token_ids for other in others}) == 8, "the high half of a seed counts too"


@pytest.mark.sglang
def test_a_prompt_that_was_read_before_is_found_in_the_cache(server: Running) -> None:
    prompt = prompt_of(60, 6)

    async def talk(client: ServerClient) -> Generation:
        first = await sampled(client, prompt, how())
        return await sampled(client, prompt + first.token_ids + (9, 8), how())

    assert ask(server.address, talk).n_cached_ids == 60 + 24 - 1


@pytest.mark.sglang
def test_a_stop_id_ends_the_answer_and_is_its_last(original: Running) -> None:
    prompt = prompt_of(30, 7)

    async def talk(client: ServerClient) -> tuple[Generation, Generation]:
        free = await sampled(client, prompt, how())
        stop = next(i for i in free.token_ids[3:] if i not in free.token_ids[:3])
        return free, await sampled(client, prompt, how(stop_ids=(UNSEEN, stop)))

    free, stopped = ask(original.address, talk)
    n = len(stopped.token_ids)
    assert (stopped.stop_reason, stopped.token_ids) == ("stop", free.token_ids[:n])
    assert n < len(free.token_ids)


@pytest.mark.sglang
def test_the_models_own_end_id_ends_no_turn_that_has_other_stop_ids(original: Running) -> None:
    """Asked again with what was sampled, the answer is what it would have been without an end id."""
    end_id = json.loads((original.model / "config.json").read_text())["eos_token_id"]
    prompt = prompt_of(30, 8)

    async def whole_of(client: ServerClient, seed: int) -> tuple[Generation, int]:
        sampling = how(seed=seed, max_tokens=200, stop_ids=(UNSEEN,))
        asked, whole = prompt, await sampled(client, prompt, sampling)
        last, n_parts = whole, 1
        while goes_on(last, sampling):
            asked, sampling = going_on(asked, last, sampling)
            last = await sampled(client, asked, sampling)
            whole, n_parts = joined(whole, last), n_parts + 1
        return whole, n_parts

    async def talk(client: ServerClient) -> tuple[list[tuple[Generation, int]], list[Generation]]:
        parts = await asyncio.gather(*(whole_of(client, seed) for seed in range(4)))
        unbroken = await asyncio.gather(*(sampled(client, prompt, how(seed=s, max_tokens=200)) for s in range(4)))
        return list(parts), list(unbroken)

    parts, unbroken = ask(original.address, talk)
    assert sum(n_parts for _, n_parts in parts) > len(parts), "no answer met the model's own end id"
    for (whole, n_parts), expected in zip(parts, unbroken, strict=True):
        n = len(whole.token_ids)
        assert whole.token_ids == expected.token_ids[:n]
        assert whole.logprobs == pytest.approx(expected.logprobs[:n], abs=1e-4)
        assert n_parts == 1 + sum(i == end_id for i in whole.token_ids[:-1])
        assert whole.stop_reason == ("stop" if whole.token_ids[-1] == UNSEEN else "length")


@pytest.mark.sglang
def test_an_aborted_call_keeps_what_was_sampled_and_its_neighbour_goes_on(server: Running) -> None:
    """The neighbour's id differs in its last character alone."""

    async def cut(client: ServerClient, after_s: float) -> tuple[Generation, Generation]:
        rid, long = new_rid()[:-1], how(max_tokens=800)
        calls = [asyncio.create_task(sampled(client, prompt_of(20, i), long, rid=f"{rid}{i}")) for i in range(2)]
        while not calls[0].done():
            await asyncio.sleep(after_s)
            await client.abort(f"{rid}0")
        return await calls[0], await calls[1]

    async def talk(client: ServerClient) -> tuple[Generation, Generation]:
        """Later each time, until the call had begun."""
        for after_s in (0.1, 0.2, 0.4, 0.8, 1.6):
            answers = await cut(client, after_s)
            if answers[0].token_ids:
                break
        return answers

    aborted, neighbour = ask(server.address, talk)
    assert aborted.stop_reason == "aborted"
    assert 0 < len(aborted.token_ids) < 800
    assert (neighbour.stop_reason, len(neighbour.token_ids)) == ("length", 800)


@pytest.mark.sglang
def test_an_id_that_is_in_use_is_refused(server: Running) -> None:
    rid = new_rid()

    async def talk(client: ServerClient) -> list[Generation | BaseException]:
        calls = (sampled(client, prompt_of(20, i), how(max_tokens=200), rid=rid) for i in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = ask(server.address, talk)
    [refused] = [each for each in answers if isinstance(each, ServerRefused)]
    [answered] = [each for each in answers if isinstance(each, Generation)]
    assert (refused.status, len(answered.token_ids)) == (400, 200)
    assert rid in refused.message


@pytest.mark.sglang
def test_an_unknown_adapter_is_refused_by_name(server: Running) -> None:
    async def talk(client: ServerClient) -> None:
        await client.generate(generate_body((5, 6), how(), rid=new_rid(), adapter="nobody"))

    with pytest.raises(ServerRefused, match=r"^400: .*nobody"):
        ask(server.address, talk)


@pytest.mark.sglang
def test_the_servers_own_count_is_what_it_sampled(server: Running) -> None:
    async def talk(client: ServerClient) -> tuple[float | None, float | None, int]:
        before = await client.sampled_tokens()
        calls = [sampled(client, prompt_of(20, i), replace(how(), max_tokens=5 + i)) for i in range(4)]
        generations = await asyncio.gather(*calls)
        return before, await client.sampled_tokens(), sum(len(each.token_ids) for each in generations)

    before, after, n = ask(server.address, talk)
    assert before is not None
    assert after == before + n
