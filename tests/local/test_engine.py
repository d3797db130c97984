"""The embedded engine: exact log probabilities, whoever shares the batch and whatever is cached."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agenttrain.errors import EngineError, ModelError
from agenttrain.local.engine import LocalEngine
from agenttrain.protocols import Engine
from agenttrain.records import Generation, Ids, Sampling
from agenttrain.switching import SWITCH_INTERVAL_S

PLAIN = ("qwen3", "llama", "gpt2", "gemma2")
OTHERS = ("mistral", "gemma3", "mamba")
Folder = Callable[[str], Path]


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LocalEngine]:
    engine = LocalEngine(folder, **options)
    try:
        yield engine
    finally:
        engine.close()


def sampling(
    *, temperature: float = 1.0, max_tokens: int = 12, seed: int = 0, stop_ids: tuple[int, ...] = ()
) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed, stop_ids=stop_ids)


def plain_logprobs(model: Any, prompt: Ids, generation: Generation, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def gap(model: Any, prompt: Ids, generation: Generation, temperature: float = 1.0) -> float:
    expected = plain_logprobs(model, prompt, generation, temperature)
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


def random_ids(rng: random.Random, n: int) -> Ids:
    return tuple(rng.randrange(3, 61) for _ in range(n))


def test_is_an_engine(model_folder: Folder) -> None:
    with opened(model_folder("qwen3")) as engine:
        assert isinstance(engine, Engine)
        assert (engine.name, engine.max_length, engine.weight_version) == ("local", 256, 0)


@pytest.mark.parametrize("architecture", [*PLAIN, *OTHERS])
def test_log_probabilities_are_the_models_over_turns_of_many_sessions(
    architecture: str, model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    """Each turn extends the last; sessions share a beginning, come and go at different lengths."""
    model, rng = plain_model(architecture), random.Random(1)
    with opened(model_folder(architecture)) as engine:
        assert engine.kv_cache == (architecture in PLAIN), engine.kv_cache_reason
        begin = random_ids(rng, 40)
        prompts = [begin + random_ids(rng, rng.randrange(1, 20)) for _ in range(9)]
        for _turn in range(3):
            futures = [
                engine.generate(p, sampling(seed=i, max_tokens=rng.randrange(1, 12), stop_ids=(2,)), session=str(i))
                for i, p in enumerate(prompts)
            ]
            answers = [future.result(timeout=60) for future in futures]
            gaps = [gap(model, p, answer) for p, answer in zip(prompts, answers, strict=True)]
            assert max(gaps) < 1e-5
            prompts = [p + a.token_ids + random_ids(rng, 3) for p, a in zip(prompts, answers, strict=True)]


def test_a_later_turn_reads_only_what_is_new(model_folder: Folder) -> None:
    """Everything but the last sampled id and the new ids was cached."""
    with opened(model_folder("qwen3")) as engine:
        first = engine.generate((5, 6, 7, 8), sampling(max_tokens=6), session="a").result()
        prompt = (5, 6, 7, 8, *first.token_ids, 9, 10)
        second = engine.generate(prompt, sampling(max_tokens=1), session="a").result()
        assert (first.n_cached_ids, second.n_cached_ids) == (0, 9)
        assert engine.stats()["prefilled_ids"] == 4 + 3


def test_a_prompt_that_leaves_the_cached_path_keeps_what_is_common(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    with opened(model_folder("qwen3")) as engine:
        engine.generate((5, 6, 7, 8, 9, 10), sampling(), session="a").result()
        prompt = (5, 6, 7, 8, 9, 10, 50, 51)
        other = engine.generate(prompt, sampling(), session="a").result()
        assert other.n_cached_ids == 6
        assert gap(plain_model("qwen3"), prompt, other) < 1e-5


def test_two_conversations_of_one_session_keep_a_row_each(model_folder: Folder) -> None:
    """Another conversation does not take the row of the first, which is still whole afterwards."""
    main, side = tuple(range(5, 45)), (60, 3, 4)
    with opened(model_folder("qwen3")) as engine:
        engine.generate(main, sampling(max_tokens=1), session="a").result()
        engine.generate(side, sampling(max_tokens=1), session="a").result()
        assert engine.generate((*main, 3), sampling(max_tokens=1), session="a").result().n_cached_ids == 40
        assert engine.generate((*side, 3), sampling(max_tokens=1), session="a").result().n_cached_ids == 3


def test_siblings_copy_what_one_of_them_has_read(model_folder: Folder) -> None:
    """Eight prompts alike that arrive together: 48 ids are read once, and the last one by each."""
    prompt = (*tuple(range(5, 53)), 3)
    with opened(model_folder("qwen3")) as engine:
        futures = [engine.generate(prompt, sampling(seed=i, max_tokens=2), session=str(i)) for i in range(8)]
        answers = [future.result() for future in futures]
        assert sorted(answer.n_cached_ids for answer in answers) == [0] + [48] * 7
        assert engine.stats()["prefilled_ids"] == 49 + 7


def test_parallel_calls_of_one_session_do_not_share_a_row(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    prompts = [(*tuple(range(5, 30)), i) for i in range(30, 36)]
    with opened(model_folder("llama")) as engine:
        futures = [engine.generate(p, sampling(seed=3), session="a") for p in prompts]
        answers = [future.result() for future in futures]
    assert max(gap(plain_model("llama"), p, a) for p, a in zip(prompts, answers, strict=True)) < 1e-5


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_ids_depend_on_the_seed_and_not_on_the_batch(architecture: str, model_folder: Folder) -> None:
    rng = random.Random(2)
    prompts = [random_ids(rng, rng.randrange(2, 30)) for _ in range(8)]
    with opened(model_folder(architecture)) as engine:
        alone = [
            engine.generate(p, sampling(seed=i), session=f"alone {i}").result().token_ids for i, p in enumerate(prompts)
        ]
        futures = [engine.generate(p, sampling(seed=i), session=f"with {i}") for i, p in enumerate(prompts)]
        assert [future.result().token_ids for future in futures] == alone
        assert engine.generate(prompts[0], sampling(seed=99), session="x").result().token_ids != alone[0]


def test_a_turn_that_goes_on_draws_as_if_it_had_not_been_broken_off(model_folder: Folder) -> None:
    """What it has drawn already stands at the prompt's end, and its places are counted."""
    with opened(model_folder("qwen3")) as engine:
        whole = engine.generate((5, 6), sampling(seed=4), session="a").result().token_ids
        rest = replace(sampling(seed=4, max_tokens=7), n_drawn=5)
        assert engine.generate((5, 6, *whole[:5]), rest, session="b").result().token_ids == whole[5:]


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_greedy_is_what_transformers_generates(
    architecture: str, model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    model, prompt = plain_model(architecture), (5, 6, 7, 40, 41)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 5, dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    with opened(model_folder(architecture)) as engine:
        answer = engine.generate(prompt, sampling(temperature=0, max_tokens=20), session="a").result()
    assert answer.token_ids == tuple(expected[0, 5:].tolist())
    assert gap(model, prompt, answer) < 1e-5


def test_log_probabilities_are_at_the_sampling_temperature(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    with opened(model_folder("qwen3")) as engine:
        answer = engine.generate((5, 6), sampling(temperature=0.5), session="a").result()
    assert gap(plain_model("qwen3"), (5, 6), answer, temperature=0.5) < 1e-5


def test_a_stop_id_ends_the_response_and_stands_in_it(model_folder: Folder) -> None:
    with opened(model_folder("qwen3")) as engine:
        free = engine.generate((5, 6), sampling(seed=4), session="a").result()
        assert (len(free.token_ids), free.stop_reason) == (12, "length")
        stop = free.token_ids[3]
        at = free.token_ids.index(stop)
        stopped = engine.generate((5, 6), sampling(seed=4, stop_ids=(stop,)), session="b").result()
        assert stopped.token_ids == free.token_ids[: at + 1]
        assert stopped.stop_reason == "stop"


def test_the_longest_that_fits_is_answered(model_folder: Folder, plain_model: Callable[[str], Any]) -> None:
    """Prompt and response fill every position of a model with learned positions."""
    prompt = tuple(3 + i % 50 for i in range(244))
    with opened(model_folder("gpt2")) as engine:
        futures = [engine.generate(prompt, sampling(seed=i), session=str(i)) for i in range(3)]
        answers = [future.result() for future in futures]
        again = engine.generate((7, 8), sampling(), session="0").result()
    model = plain_model("gpt2")
    assert max(gap(model, prompt, a) for a in answers) < 1e-5
    assert gap(model, (7, 8), again) < 1e-5


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 5, "empty"),
        ((5, 61), 5, "holds id 61, and the model's vocabulary has 61"),
        ((-1,), 5, "holds id -1"),
        (tuple([5] * 250), 7, "250 prompt ids and 7 new ones, and the model takes 256"),
        ((5,), 0, "max_tokens is 0"),
    ],
)
def test_a_call_that_can_not_be_answered_is_refused_at_once(
    prompt: Ids, max_tokens: int, message: str, model_folder: Folder
) -> None:
    with opened(model_folder("qwen3")) as engine, pytest.raises(EngineError, match=message):
        engine.generate(prompt, sampling(max_tokens=max_tokens), session="a")


def test_more_calls_than_the_memory_holds_wait_and_idle_rows_go(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    """Room for about three rows of 64 positions; ten sessions are answered exactly all the same."""
    rng = random.Random(5)
    bytes_per_row = 2 * 2 * 2 * 4 * 4 * 64
    with opened(model_folder("qwen3"), kv_bytes=3 * bytes_per_row) as engine:
        prompts = [random_ids(rng, 20) for _ in range(10)]
        for _turn in range(2):
            futures = [engine.generate(p, sampling(seed=i), session=str(i)) for i, p in enumerate(prompts)]
            answers = [future.result(timeout=60) for future in futures]
            assert max(gap(plain_model("qwen3"), p, a) for p, a in zip(prompts, answers, strict=True)) < 1e-5
            prompts = [p + a.token_ids + random_ids(rng, 2) for p, a in zip(prompts, answers, strict=True)]
        assert engine._passes is not None
        assert len(engine._passes.rows.rows) <= 3
        longer = random_ids(rng, 150)
        answer = engine.generate(longer, sampling(), session="long").result(timeout=60)
        assert gap(plain_model("qwen3"), longer, answer) < 1e-5


def test_release_ends_the_calls_of_its_session_only(model_folder: Folder) -> None:
    with opened(model_folder("qwen3")) as engine:
        long = engine.generate((5, 6), sampling(max_tokens=250), session="a")
        other = engine.generate((5, 6), sampling(max_tokens=30), session="b")
        engine.release("a")
        ended = long.result(timeout=60)
        assert ended.stop_reason == "aborted"
        assert len(ended.token_ids) < 250
        assert other.result(timeout=60).stop_reason == "length"


def test_close_ends_calls_in_flight_and_refuses_new_ones(model_folder: Folder) -> None:
    before = sys.getswitchinterval()
    engine = LocalEngine(model_folder("mamba"))
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    future = engine.generate((5, 6), sampling(max_tokens=250), session="a")
    engine.close()
    engine.close()
    assert future.result(timeout=5).stop_reason == "aborted"
    assert sys.getswitchinterval() == pytest.approx(before)
    with pytest.raises(EngineError, match="closed"):
        engine.generate((5, 6), sampling(), session="a")


def test_new_weights_answer_the_next_call_and_no_old_key_is_used(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    changed = plain_model("qwen3")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    with opened(model_folder("qwen3")) as engine:
        first = engine.generate((5, 6, 7), sampling(), session="a").result()
        engine.update_weights(changed.state_dict().items(), 3)
        prompt = (5, 6, 7, *first.token_ids, 8)
        second = engine.generate(prompt, sampling(), session="a").result()
        assert engine.weight_version == 3
        assert (second.n_cached_ids, set(second.weight_versions)) == (0, {3})
        assert gap(changed, prompt, second) < 1e-5


def test_a_call_in_flight_goes_on_with_new_weights(model_folder: Folder, plain_model: Callable[[str], Any]) -> None:
    """Each id is of the weights that its version names: old before, new after the update."""
    old, new = plain_model("qwen3"), plain_model("qwen3")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    with opened(model_folder("qwen3")) as engine:
        future = engine.generate((5, 6, 7), sampling(max_tokens=250), session="a")
        while engine.stats()["sampled_ids"] < 5:
            threading.Event().wait(0.001)
        engine.update_weights(new.state_dict().items(), 1)
        answer = future.result(timeout=60)
    n_old = answer.weight_versions.count(0)
    assert answer.weight_versions == (0,) * n_old + (1,) * (250 - n_old)
    assert 5 <= n_old < 250
    expected = torch.cat(
        [
            plain_logprobs(old, (5, 6, 7), answer)[:n_old],
            plain_logprobs(new, (5, 6, 7), answer)[n_old:],
        ]
    )
    assert float((expected - torch.tensor(answer.logprobs)).abs().max()) < 2e-5


def test_weights_that_do_not_fit_are_refused_and_none_is_taken(model_folder: Folder) -> None:
    with opened(model_folder("qwen3")) as engine:
        before = engine.generate((5,), sampling(), session="a").result()
        bad = [("model.norm.weight", torch.zeros(16)), ("nonsense", torch.zeros(1))]
        with pytest.raises(EngineError, match="'nonsense'"):
            engine.update_weights(bad, 1)
        with pytest.raises(EngineError, match=r"shape \[3\].*\[16\]"):
            engine.update_weights([("model.norm.weight", torch.zeros(3))], 1)
        assert engine.generate((5,), sampling(), session="b").result() == before


def test_a_failure_of_the_thread_fails_every_call(model_folder: Folder) -> None:
    """Whatever the model's code raises reaches the callers, those in flight and those that come later."""
    with opened(model_folder("qwen3")) as engine:
        engine.generate((5, 6), sampling(), session="a").result()

        def broken(*_args: object) -> None:
            raise ZeroDivisionError("the model broke")

        engine.model.model.layers[0].register_forward_pre_hook(broken)
        future = engine.generate((5, 6), sampling(), session="b")
        with pytest.raises(EngineError, match="the model broke"):
            future.result(timeout=60)
        with pytest.raises(EngineError, match="has failed"):
            engine.generate((5, 6), sampling(), session="c")
        with pytest.raises(EngineError, match="has failed"):
            engine.update_weights([], 1)
        engine.release("b")


def test_calls_from_many_threads_share_passes(model_folder: Folder) -> None:
    answers: list[Generation] = []
    with opened(model_folder("qwen3")) as engine:

        def rollout(i: int) -> None:
            for turn in range(3):
                call = sampling(seed=i, max_tokens=20)
                answers.append(engine.generate((5, 6, 7 + turn), call, session=str(i)).result(timeout=60))
            engine.release(str(i))

        threads = [threading.Thread(target=rollout, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = engine.stats()
    assert len(answers) == 48
    assert stats["sampled_ids"] == 48 * 20
    assert stats["decode_rows"] == 48 * 19
    assert stats["decode_rows"] / stats["decode_steps"] > 2
    assert stats["gpus"] == torch.cuda.is_available()


def test_weights_of_another_folder_replace_the_models(
    model_folder: Folder, plain_model: Callable[[str], Any], tmp_path: Path
) -> None:
    changed = plain_model("llama")
    with torch.no_grad():
        changed.lm_head.weight.mul_(2)
    changed.save_pretrained(tmp_path)
    with opened(model_folder("llama"), weights_from=tmp_path) as engine:
        answer = engine.generate((5, 6), sampling(), session="a").result()
    assert gap(changed, (5, 6), answer) < 1e-5


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no config"):
        LocalEngine(tmp_path)


def test_one_at_a_time_the_order_of_arrival_changes_no_bit(model_folder: Folder) -> None:
    """Equal to the last bit, also after other calls have filled the cache."""
    rng = random.Random(3)
    prompts = [random_ids(rng, rng.randrange(2, 40)) for _ in range(8)]
    answers = []
    for order in (range(8), [5, 2, 7, 0, 1, 6, 3, 4]):
        with opened(model_folder("qwen3"), one_at_a_time=True) as engine:
            futures = {i: engine.generate(prompts[i], sampling(seed=i), session=str(i % 3)) for i in order}
            answers.append([futures[i].result(timeout=60) for i in range(8)])
    assert answers[0] == answers[1]
    assert all(answer.n_cached_ids == 0 for answer in answers[0])
