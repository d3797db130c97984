"""agenttrain_verl.engine_server: veRL's server interface over the real local engine, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.errors import EngineError, ModelError, PluginError
from agenttrain.records import Generation, RoutedExperts

from agenttrain_verl.engine_server import EngineServer, sampling_of, token_output
from agenttrain_verl.weight_stream import packed

PROMPT = [5, 9, 13, 17]
LONG = {"temperature": 1.0, "max_tokens": 900, "seed": 3}

Spec = Callable[..., Any]


@asynccontextmanager
async def opened(spec: Any) -> AsyncIterator[EngineServer]:
    server = EngineServer(spec, 0)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


def run(test: Callable[[EngineServer], Awaitable[None]], spec: Any) -> None:
    """A test on a loop of its own, with a server that is closed after it."""

    async def body() -> None:
        async with opened(spec) as server:
            await test(server)

    asyncio.run(asyncio.wait_for(body(), 60))


async def begun(server: EngineServer, n: int = 4, **params: Any) -> list[asyncio.Task[Any]]:
    """Calls that are in the engine, each of a session of its own."""
    before = (await server.stats())["sampled_ids"]
    tasks = [
        asyncio.create_task(server.generate([*PROMPT, i], {**LONG, "session": f"s{i}", **params}, "r"))
        for i in range(n)
    ]
    while (await server.stats())["sampled_ids"] < before + 2 * n:
        await asyncio.sleep(0.005)
    return tasks


async def push(server: EngineServer, weights: list[tuple[str, Any]], version: int | None, *, buckets: int = 2) -> int:
    await server.begin_weights(version)
    for i in range(buckets):
        await server.put_weights([packed(*each) for each in weights[i::buckets]])
    return await server.end_weights()


def doubled(model: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [(name, 2 * tensor) for name, tensor in load_file(model / "model.safetensors").items()]


def test_an_answer_has_all_that_veRL_has_no_field_for(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        output = await server.generate(PROMPT, {"temperature": 1.0, "max_tokens": 6, "seed": 1, "session": "a"}, "r")
        assert len(output.token_ids) == len(output.log_probs) == 6
        assert output.stop_reason == "length"
        assert output.extra_fields == {
            "global_steps": 0,
            "min_global_steps": 0,
            "max_global_steps": 0,
            "weight_versions": [0] * 6,
            "num_cached_tokens": 0,
            "stop_reason": "length",
        }

    run(test, spec())


def test_the_engine_says_what_it_is(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        facts = await server.facts()
        assert (facts.name, facts.max_length, facts.takes_seeds, facts.takes_adapters) == ("local", 1024, True, False)
        assert (await server.stats())["sampled_ids"] == 0
        assert await server.news() == []

    run(test, spec())


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {"max_tokens": 4}, "is empty"),
        ([5, 320], {"max_tokens": 4}, "id 320"),
        ([5, -1], {"max_tokens": 4}, "id -1"),
        ([5] * 1020, {"max_tokens": 8}, "1024 together"),
        ([5], {"max_tokens": 0}, "max_tokens is 0"),
        ([5], {"max_tokens": 4, "top_p": 0.9}, "top_p=0.9"),
        ([5], {"max_tokens": 4, "stop": ["x"]}, "stop="),
    ],
)
def test_a_call_that_can_not_be_answered_fails_alone(
    spec: Spec, prompt: list[int], params: dict[str, Any], words: str
) -> None:
    async def test(server: EngineServer) -> None:
        with pytest.raises(EngineError, match=words):
            await server.generate(prompt, params, "r")
        assert len((await server.generate(PROMPT, {"max_tokens": 3}, "r")).token_ids) == 3

    run(test, spec())


def test_images_are_refused(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        with pytest.raises(EngineError, match="token ids alone"):
            await server.generate(PROMPT, {"max_tokens": 3}, "r", image_data=[object()])

    run(test, spec())


def test_an_abort_ends_every_call_with_what_was_sampled_and_holds_new_ones(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        running = await begun(server)
        await server.abort_all_requests()
        assert all(task.done() for task in running)
        for task in running:
            output = task.result()
            assert output.stop_reason == "aborted"
            assert 2 <= len(output.token_ids) == len(output.extra_fields["weight_versions"]) < 900
        waiting = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 3, "session": "s0"}, "r"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await server.resume_generation()
        assert len((await waiting).token_ids) == 3

    run(test, spec())


def test_a_second_abort_leaves_those_that_wait(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 3}, "r"))
        await asyncio.sleep(0.02)
        await server.abort_all_requests()
        await server.resume_generation()
        assert (await waiting).stop_reason == "length"

    run(test, spec())


def test_an_abort_at_once_after_going_on_leaves_none_in_the_engine(spec: Spec) -> None:
    """Those that waited had no time to begin: they wait again, and end where their rollout has ended meanwhile."""

    async def test(server: EngineServer) -> None:
        await server.abort_all_requests()
        calls = [
            asyncio.create_task(server.generate(PROMPT, {"max_tokens": 3, "session": session}, "r")) for session in "ab"
        ]
        await asyncio.sleep(0.02)
        await server.resume_generation()
        await server.release("a")
        await server.abort_all_requests()
        await asyncio.sleep(0.1)
        assert (await server.stats())["sampled_ids"] == 0
        assert [call.done() for call in calls] == [True, False]
        await server.resume_generation()
        assert [len((await call).token_ids) for call in calls] == [0, 3]

    run(test, spec())


def test_a_replica_that_is_left_alone_rejects(spec: Spec) -> None:
    """Those that wait and those that come, as aborted and with nothing sampled, until it is to go on."""

    async def test(server: EngineServer) -> None:
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 3}, "r"))
        await asyncio.sleep(0.02)
        await server.abort_all_requests(reject_request=True)
        coming = await server.generate(PROMPT, {"max_tokens": 3}, "r")
        for output in (await waiting, coming):
            assert (output.token_ids, output.stop_reason) == ([], "aborted")
        await server.resume_generation()
        assert len((await server.generate(PROMPT, {"max_tokens": 3}, "r")).token_ids) == 3

    run(test, spec())


def test_release_ends_one_session_also_where_it_waits(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        running = await begun(server, 2)
        await server.release("s0")
        assert (await running[0]).stop_reason == "aborted"
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 3, "session": "w"}, "r"))
        await asyncio.sleep(0.02)
        await server.release("w")
        assert (await waiting).token_ids == []

    run(test, spec())


def test_new_weights_in_buckets_answer_the_next_token(spec: Spec) -> None:
    """A call that is under way goes on with them, and says which id is whose."""

    async def test(server: EngineServer) -> None:
        (running,) = await begun(server, 1)
        assert await push(server, doubled(spec.model), 4) == 4
        versions = (await running).extra_fields["weight_versions"]
        assert (min(versions), max(versions)) == (0, 4)
        assert versions == sorted(versions)
        after = await server.generate(PROMPT, {"temperature": 0.0, "max_tokens": 3}, "r")
        assert after.extra_fields["weight_versions"] == [4, 4, 4]

    run(test, spec())


def test_weights_without_a_version_keep_the_one_that_is(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        assert await push(server, doubled(spec.model), 7) == 7
        assert await push(server, doubled(spec.model), None) == 7

    run(test, spec())


def test_weights_that_the_engine_refuses_are_told_and_nothing_changes(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        before = await server.generate(PROMPT, {"temperature": 0.0, "max_tokens": 4}, "r")
        with pytest.raises(EngineError, match="nobody"):
            await push(server, [*doubled(spec.model), ("nobody.weight", torch.zeros(2))], 1)
        after = await server.generate(PROMPT, {"temperature": 0.0, "max_tokens": 4}, "r")
        assert (after.token_ids, after.extra_fields["global_steps"]) == (before.token_ids, 0)
        assert await push(server, doubled(spec.model), 1) == 1

    run(test, spec())


def test_weights_that_break_off_change_nothing(spec: Spec) -> None:
    """Whether the sender says so, or begins anew without a word."""

    async def test(server: EngineServer) -> None:
        weights, greedy = doubled(spec.model), {"temperature": 0.0, "max_tokens": 4}
        before = await server.generate(PROMPT, greedy, "r")
        await server.begin_weights(1)
        await server.put_weights([packed(*weights[0])])
        await server.abandon_weights("the trainer failed")
        with pytest.raises(EngineError, match="begin_weights first"):
            await server.end_weights()
        after = await server.generate(PROMPT, greedy, "r")
        assert (after.token_ids, after.extra_fields["global_steps"]) == (before.token_ids, 0)
        assert after.log_probs == pytest.approx(before.log_probs, abs=1e-5)
        await server.begin_weights(2)
        await server.put_weights([packed(*weights[0])])
        assert await push(server, weights, 3) == 3

    run(test, spec())


def test_an_adapter_for_an_engine_that_takes_none_is_refused(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        await server.begin_weights(1, {"r": 8})
        await server.put_weights([packed("base_model.model.x.lora_A.weight", torch.zeros(8, 4))])
        with pytest.raises(EngineError, match="merge = true"):
            await server.end_weights()

    run(test, spec())


def test_close_ends_calls_and_pushes(spec: Spec) -> None:
    async def test(server: EngineServer) -> None:
        running = await begun(server, 2)
        await server.begin_weights(1)
        await server.close()
        await server.close()
        assert [(await task).stop_reason for task in running] == ["aborted", "aborted"]
        with pytest.raises(EngineError, match="not open"):
            await server.generate(PROMPT, {"max_tokens": 3}, "r")

    run(test, spec())


def test_what_the_engine_finds_wrong_is_told_by_open(spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing-here"):
        asyncio.run(EngineServer(spec(model=str(tmp_path / "nothing-here")), 0).open())
    with pytest.raises(PluginError, match="No engine is named 'other'"):
        asyncio.run(EngineServer(spec(engine="other", graph=ODD), 0).open())


ODD = """
from concurrent.futures import Future
from agenttrain import hookimpl
from langgraph.graph import StateGraph, MessagesState

graph = StateGraph(MessagesState)

class Odd:
    name, max_length, weight_version = "odd", 64, 0
    def generate(self, prompt_ids, sampling, *, session):
        if prompt_ids == (1,):
            raise KeyError("its own")
        future = Future()
        if prompt_ids == (2,):
            future.set_exception(ValueError("also its own"))
        return future
    def release(self, session): ...
    def update_weights(self, weights, version):
        next(iter(weights))
        raise ZeroDivisionError("at the first weight")
    def stats(self): return {}
    def close(self): ...

@hookimpl
def agenttrain_register_engines(register):
    register("odd", lambda context: Odd())
"""


def test_an_engine_that_graph_py_registers_and_that_raises_what_it_likes(spec: Spec) -> None:
    """Its exceptions are told as its own, and end nothing else."""

    async def test(server: EngineServer) -> None:
        with pytest.raises(EngineError, match="The engine 'odd' raised KeyError: 'its own'"):
            await server.generate([1], {"max_tokens": 3}, "r")
        with pytest.raises(EngineError, match="The engine 'odd' raised ValueError: also its own"):
            await server.generate([2], {"max_tokens": 3}, "r")
        with pytest.raises(EngineError, match="raised on new weights: ZeroDivisionError"):
            await push(server, [("w", torch.zeros(1))] * 3, 1, buckets=3)
        assert (await server.facts()).takes_seeds is None

    run(test, spec(engine="odd", graph=ODD))


def test_what_is_not_said_is_left_to_the_engine() -> None:
    sampling = sampling_of({"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}, room=9)
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_ids, sampling.n_drawn) == (1.0, 9, (), 0)
    assert sampling.seed != sampling_of({}, room=9).seed


def test_routed_experts_pass_through() -> None:
    experts = RoutedExperts(start=0, n_layers=1, n_chosen=2, data=bytes(8))
    generation = Generation(
        token_ids=(1,), logprobs=(0.0,), weight_versions=(3,), stop_reason="stop", routed_experts=experts
    )
    assert token_output(generation, weight_version=3).routed_experts is experts
