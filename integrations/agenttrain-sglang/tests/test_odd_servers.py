"""What servers do that none should, over real connections: each is ServerGone, ServerRefused or an EngineError."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from agenttrain.errors import EngineError
from agenttrain.records import Generation, Sampling
from aiohttp import web

from agenttrain_sglang.client import ServerClient, ServerFacts, ServerGone, ServerRefused
from agenttrain_sglang.wire import Sent, generate_body, generation_of

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAMPLING = Sampling(temperature=1.0, max_tokens=4, seed=1, stop_ids=())
RID = "f" * 32
GOOD: dict[str, Any] = {
    "output_ids": [161, 8],
    "meta_info": {
        "id": RID,
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 2,
        "weight_version": "default",
        "output_token_logprobs": [[-7.75, 161, None], [-1.97, 8, None]],
        "cached_tokens": 0,
    },
}


async def call(client: ServerClient) -> Generation:
    answer = await client.generate(generate_body((5, 6), SAMPLING, rid=RID))
    sent = Sent(prompt_ids=(5, 6), sampling=SAMPLING, rid=RID, address="http://odd", n_vocabulary=320)
    return generation_of(answer, sent=sent, version_of=lambda _: 3)


def asked(answer: Answer, talk: Callable[[ServerClient], Awaitable[Any]] = call) -> Any:
    """What a client gets from a server that answers everything so."""

    async def talked() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                return await talk(ServerClient(f"http://127.0.0.1:{port}", session))
        finally:
            await runner.cleanup()

    return asyncio.run(talked())


def says(content: Any, *, status: int = 200) -> Answer:
    """Answers with JSON, or with text as HTML."""

    async def answer(_: web.Request) -> web.Response:
        if isinstance(content, str):
            return web.Response(text=content, status=status, content_type="text/html")
        return web.Response(text=json.dumps(content), status=status, content_type="application/json")

    return answer


def test_a_server_that_answers_well_is_understood() -> None:
    """The ground that all others here stand on."""
    generation = asked(says(GOOD))
    assert (generation.token_ids, generation.logprobs, generation.weight_versions) == ((161, 8), (-7.75, -1.97), (3, 3))


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (500, {"detail": "Internal Server Error"}, "Internal Server Error"),
        (503, {"error": {"message": "The request queue is full."}}, "The request queue is full."),
        (400, {"object": "error", "message": "Duplicate request ID"}, "Duplicate request ID"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (502, "<html><h1>Bad Gateway</h1></html>", "<html><h1>Bad Gateway</h1></html>"),
        (302, "moved", "moved"),
    ],
)
def test_a_refusal_keeps_its_status_and_words(status: int, content: Any, message: str) -> None:
    with pytest.raises(ServerRefused) as refused:
        asked(says(content, status=status))
    assert (refused.value.status, refused.value.message) == (status, message)


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(ServerRefused) as refused:
        asked(says("x" * 9000, status=500))
    assert refused.value.message == "x" * 300


@pytest.mark.parametrize("content", ["<html>Welcome</html>", [1, 2], "", "null"])
def test_an_answer_that_is_no_json_table_is_no_sglang_server(content: Any) -> None:
    with pytest.raises(EngineError, match=r"/generate answered .* Check the address\."):
        asked(says(content))


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Half of the answer, then the end of the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(json.dumps(GOOD).encode()[:100])
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs_up(request: web.Request) -> web.StreamResponse:
    """Reads the call and ends the connection."""
    await request.read()
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("answer", [breaks_off, hangs_up])
def test_a_connection_that_breaks_is_a_server_that_is_gone(answer: Answer) -> None:
    with pytest.raises(ServerGone, match=r"^http://127\.0\.0\.1:\d+/generate: \w+"):
        asked(answer)


def test_nothing_listening_is_a_server_that_is_gone() -> None:
    async def talked(port: int) -> None:
        async with aiohttp.ClientSession() as session:
            await call(ServerClient(f"http://127.0.0.1:{port}", session))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ServerGone, match="/generate: Client"):
            asyncio.run(talked(taken.getsockname()[1]))


def test_a_call_that_is_cancelled_ends_its_connection() -> None:
    """The server sees it, and can stop sampling."""
    seen: list[str] = []

    async def waits(request: web.Request) -> web.StreamResponse:
        seen.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")
        raise AssertionError

    async def talk(client: ServerClient) -> None:
        task = asyncio.create_task(call(client))
        while not seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asked(waits, talk)
    assert seen == ["began", "ended"]


def test_a_hung_server_is_not_healthy() -> None:
    assert asked(never, lambda client: client.is_healthy(0.2)) is False


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (500, False)])
def test_health_is_status_200(status: int, healthy: bool) -> None:
    assert asked(says("", status=status), lambda client: client.is_healthy(5.0)) is healthy


def test_a_server_without_metrics_has_no_count() -> None:
    assert asked(says({"detail": "Not Found"}, status=404), lambda client: client.sampled_tokens()) is None
    with pytest.raises(ServerRefused, match="500"):
        asked(says("", status=500), lambda client: client.sampled_tokens())


def test_the_count_is_the_sum_over_the_servers_models() -> None:
    text = (
        "# HELP sglang:generation_tokens_total Number of generation tokens processed.\n"
        "# TYPE sglang:generation_tokens_total counter\n"
        'sglang:generation_tokens_total{model_name="a",is_streaming="false"} 10.0\n'
        'sglang:generation_tokens_total{model_name="a",is_streaming="true"} 4.0\n'
        "# TYPE sglang:generation_tokens_histogram histogram\n"
        'sglang:generation_tokens_histogram_sum{model_name="a"} 10.0\n'
    )
    assert asked(says(text), lambda client: client.sampled_tokens()) == 14.0


def test_headers_are_passed_on_and_the_body_arrives_whole() -> None:
    """A prompt of more than a MiB too."""
    seen: dict[str, Any] = {}

    async def keeps(request: web.Request) -> web.Response:
        seen.update(traceparent=request.headers.get("traceparent"), type=request.content_type)
        seen["n"] = len(json.loads(b"".join([part async for part in request.content.iter_any()]))["input_ids"])
        return web.json_response(GOOD)

    async def talk(client: ServerClient) -> None:
        body = generate_body((123456,) * 200_000, SAMPLING, rid=RID)
        await client.generate(body, headers={"traceparent": "00-1-2-01"})

    asked(keeps, talk)
    assert seen == {"traceparent": "00-1-2-01", "type": "application/json", "n": 200_000}


def without(key: str) -> dict[str, Any]:
    return {**GOOD, "meta_info": {name: value for name, value in GOOD["meta_info"].items() if name != key}}


def having(key: str, value: Any) -> dict[str, Any]:
    return {**GOOD, "meta_info": {**GOOD["meta_info"], key: value}}


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (without("output_token_logprobs"), "2 ids without log probabilities"),
        (having("output_token_logprobs", [[-7.75, 161, None]]), "1 log probabilities for 2 ids"),
        (having("output_token_logprobs", [[-7.75, 161, None], [-1.97, 9, None]]), "of id 9 at place 1"),
        (having("output_token_logprobs", [[-7.75, 161, None], [float("nan"), 8, None]]), "log probability nan"),
        (having("output_token_logprobs", [[-7.75, 161, None], [float("-inf"), 8, None]]), "log probability -inf"),
        (without("weight_version"), "an answer without weight_version"),
        (having("id", "0" * 32), "the answer of request '0"),
        ({**GOOD, "output_ids": [161, 8, 9]}, "2 log probabilities for 3 ids"),
        ({"error": "no"}, "an answer of"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_engine_error(content: dict[str, Any], seen: str) -> None:
    with pytest.raises(EngineError, match=seen):
        asked(says(content))


def tells(server: dict[str, Any], model: dict[str, Any]) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(server if request.path == "/server_info" else model)

    return answer


def facts_from(answer: Answer) -> ServerFacts:
    facts: ServerFacts = asked(answer, lambda client: client.facts())
    return facts


SERVER = {
    "version": "0.5.23",
    "dtype": "float32",
    "device": "cpu",
    "tp_size": 1,
    "max_req_input_len": 2042,
    "enable_lora": None,
    "enable_deterministic_inference": True,
}
MODEL = {"model_path": "/m", "model_type": "qwen3"}


def test_facts_are_what_the_server_says() -> None:
    assert facts_from(tells(SERVER, MODEL)) == ServerFacts(
        version="0.5.23",
        model_path="/m",
        model_type="qwen3",
        dtype="float32",
        device="cpu",
        tensor_parallel=1,
        data_parallel=1,
        max_length=2042,
        caches_prefixes=True,
        takes_adapters=False,
        tells_experts=False,
        takes_seeds=True,
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says({"detail": "Not Found"}, status=404), "is no SGLang server that is ready: it answered 404: Not Found"),
        (says("<html>Welcome</html>"), "/server_info answered '<html>Welcome</html>'"),
        (tells({"hello": 1}, MODEL), "says no version"),
        (tells({**SERVER, "version": "0.4.9"}, MODEL), r"is SGLang 0\.4\.9"),
        (tells({"version": "0.5.23"}, MODEL), "does not say what a SGLang server says"),
        (tells({**SERVER, "max_req_input_len": "many"}, MODEL), "does not say what a SGLang server says"),
        (tells(SERVER, {}), "KeyError: 'model_path'"),
    ],
)
def test_an_address_that_is_no_supported_server_is_named(answer: Answer, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        facts_from(answer)
