"""Bodies that a server gets, and which of its answers become a Generation: exactly those that say all of each id."""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from agenttrain.errors import CaptureError, EngineError
from agenttrain.records import Generation, RoutedExperts, Sampling
from hypothesis import given
from hypothesis import strategies as st

from agenttrain_sglang.experts import RoutedShape
from agenttrain_sglang.wire import Sent, generate_body, generation_of, goes_on, going_on, joined

Answer = dict[str, Any]
SAMPLING = Sampling(temperature=1.0, max_tokens=8, seed=4611686018427387909, stop_ids=(45,))
SENT = Sent(
    prompt_ids=(10, 20, 30, 40), sampling=SAMPLING, rid="0" * 32, address="http://127.0.0.1:30000", n_vocabulary=320
)
SHAPE = RoutedShape(n_hidden=2, layers=(0, 1), n_chosen=2, n_experts=8)


def answer() -> Answer:
    """What SGLang 0.5.23 said to four prompt ids, cut to what has a meaning here."""
    return {
        "output_ids": [161, 8, 45],
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": 45},
            "prompt_tokens": 4,
            "weight_version": "default",
            "num_retractions": 0,
            "output_token_logprobs": [
                [-7.758244514465332, 161, None],
                [-1.9741154909133911, 8, None],
                [-2.5, 45, None],
            ],
            "completion_tokens": 3,
            "cached_tokens": 3,
            "weight_versions": [{"version": "default", "start": 0, "end": 3}],
        },
    }


def changed(**meta: Any) -> Answer:
    """The answer with other values in meta_info; None takes the key out."""
    changed = answer()
    changed["meta_info"] = {key: value for key, value in {**changed["meta_info"], **meta}.items() if value is not None}
    return changed


def version_of(name: str) -> int:
    if name == "default":
        return 0
    if not name.isdecimal():
        raise EngineError(f"Nobody pushed weights named {name!r}.")
    return int(name)


def read(answer: Answer, sent: Sent = SENT) -> Generation:
    return generation_of(json.loads(json.dumps(answer)), sent=sent, version_of=version_of)


def test_the_body_of_a_sampled_call() -> None:
    """The seed goes whole, and whatever would bend the distribution goes as "off"."""
    assert generate_body((10, 20), SAMPLING, rid="r") == {
        "rid": "r",
        "input_ids": [10, 20],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "temperature": 1.0,
            "max_new_tokens": 8,
            "min_new_tokens": 0,
            "sampling_seed": 4611686018427387909,
            "stop_token_ids": [45],
            "ignore_eos": False,
            "stop": [],
            "n": 1,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
        },
    }


def test_without_stop_ids_the_models_own_end_ids_end_nothing() -> None:
    params = generate_body((1,), Sampling(temperature=0.0, max_tokens=2, seed=1, stop_ids=()), rid="r")
    assert params["sampling_params"]["ignore_eos"] is True
    assert params["sampling_params"]["top_k"] == 1


def test_the_body_names_the_adapter_and_the_first_position_of_experts() -> None:
    sampling = Sampling(temperature=1.0, max_tokens=2, seed=1, stop_ids=(), experts_from=17)
    body = generate_body((1,), sampling, rid="r", adapter="a-3", wants_experts=True)
    assert (body["lora_path"], body["return_routed_experts"], body["routed_experts_start_len"]) == ("a-3", True, 17)


def test_an_answer_becomes_a_generation() -> None:
    assert read(answer()) == Generation(
        token_ids=(161, 8, 45),
        logprobs=(-7.758244514465332, -1.9741154909133911, -2.5),
        weight_versions=(0, 0, 0),
        stop_reason="stop",
        n_cached_ids=3,
    )


def test_each_id_gets_the_version_of_the_span_that_it_lies_in() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    assert read(changed(weight_versions=spans)).weight_versions == (7, 8, 8)


def test_without_spans_the_version_of_the_call_is_that_of_each_id() -> None:
    """As SGLang 0.5.12 tells it."""
    assert read(changed(weight_versions=None, weight_version="4")).weight_versions == (4, 4, 4)


def test_a_call_with_an_adapter_has_the_adapters_version() -> None:
    assert generation_of(answer(), sent=SENT, version_of=lambda _: 9).weight_versions == (9, 9, 9)


def test_no_more_prompt_ids_are_cached_than_there_are() -> None:
    """A call that was taken back reads its own answer from the cache too."""
    assert read(changed(cached_tokens=60)).n_cached_ids == 4


@pytest.mark.parametrize(
    ("finish", "max_tokens", "stop_reason"),
    [
        ({"type": "length", "length": 3}, 3, "length"),
        ({"type": "stop", "matched": 45}, 3, "stop"),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, 8, "aborted"),
        ({"type": "abort", "message": "Abort in waiting queue"}, 8, "aborted"),
    ],
)
def test_how_an_answer_ended(finish: Answer, max_tokens: int, stop_reason: str) -> None:
    generation = read(changed(finish_reason=finish), with_sampling(max_tokens=max_tokens))
    assert (generation.stop_reason, len(generation.token_ids)) == (stop_reason, 3)


def test_an_end_id_that_is_no_stop_id_goes_on() -> None:
    sent = with_sampling(stop_ids=(99,))
    generation = read(answer(), sent)
    assert generation.stop_reason == "stop"
    assert goes_on(generation, sent.sampling)
    assert not goes_on(read(answer()), SAMPLING)


def test_an_end_id_that_is_no_stop_id_in_the_last_place_is_a_cut() -> None:
    sent = with_sampling(stop_ids=(99,), max_tokens=3)
    generation = read(answer(), sent)
    assert generation.stop_reason == "length"
    assert not goes_on(generation, sent.sampling)


def test_an_empty_answer_is_handed_on_as_a_cut() -> None:
    empty = changed(output_token_logprobs=[], weight_versions=[{"version": "default", "start": 0, "end": 0}])
    empty["output_ids"] = []
    for finish in ({"type": "length", "length": 0}, {"type": "stop", "matched": 45}):
        empty["meta_info"]["finish_reason"] = finish
        generation = read(empty)
        assert (generation.token_ids, generation.stop_reason) == ((), "length")
        assert not goes_on(generation, SAMPLING)


def test_a_call_aborted_in_the_queue_has_no_ids_and_no_count_of_its_prompt() -> None:
    queued = {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": 0}],
            "output_token_logprobs": [],
            "completion_tokens": 0,
        },
    }
    assert read(queued) == Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")


def with_sampling(**changes: Any) -> Sent:
    given = {"temperature": 1.0, "max_tokens": 8, "seed": 1, "stop_ids": (45,), "experts_from": 0, **changes}
    return Sent(
        prompt_ids=SENT.prompt_ids,
        sampling=Sampling(**given),
        rid=SENT.rid,
        address=SENT.address,
        n_vocabulary=SENT.n_vocabulary,
        routed=SENT.routed,
    )


def other_ids(*ids: Any) -> Answer:
    changed = answer()
    changed["output_ids"] = list(ids)
    for entry, i in zip(changed["meta_info"]["output_token_logprobs"], ids, strict=True):
        entry[1] = i
    return changed


def other_logprob(logprob: Any) -> Answer:
    changed = answer()
    changed["meta_info"]["output_token_logprobs"][1][0] = logprob
    return changed


@pytest.mark.parametrize(
    ("bad", "seen"),
    [
        ({"object": "error"}, r"an answer of \['object'\]"),
        (changed(id="1" * 32), "the answer of request '1111"),
        (changed(prompt_tokens=5), "an answer to 5 prompt ids, and 4 were sent"),
        (changed(prompt_tokens=None), "an answer to None prompt ids, and 4 were sent"),
        (changed(output_token_logprobs=None), "3 ids without log probabilities"),
        (changed(output_token_logprobs=[[-1.0, 161, None]]), "1 log probabilities for 3 ids"),
        (changed(output_token_logprobs=answer()["meta_info"]["output_token_logprobs"] * 2), r"6 log prob.* for 3 ids"),
        (changed(output_token_logprobs=[[-1.0, 161], [-1.0, 9], [-1.0, 45]]), r"of id 9 at place 1, .* sampled id 8"),
        (changed(output_token_logprobs=[[-1.0, 161], -1.0, [-1.0, 45]]), "of id None at place 1"),
        (other_logprob(None), "log probability None at place 1"),
        (other_logprob(float("nan")), "log probability nan at place 1"),
        (other_logprob(float("-inf")), "log probability -inf at place 1"),
        (other_logprob(0.5), r"log probability 0\.5 at place 1"),
        (other_ids(161, 320, 45), "id 320, and the model's vocabulary has 320 ids"),
        (other_ids(161, -1, 45), "id -1, and"),
        (other_ids(161, 8.0, 45), r"id 8\.0, and"),
        (other_ids(45, 8, 45), "2 ids after stop id 45"),
        (changed(weight_versions=None, weight_version=None), "an answer without weight_version"),
        (
            changed(weight_versions=[{"version": "3", "start": 0, "end": 2}]),
            "'end': 2.* that don't cover its 3 ids",
        ),
        (changed(weight_versions=[{"version": "3", "start": 1, "end": 3}]), "'start': 1.* that don't cover"),
        (
            changed(weight_versions=[{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 1, "end": 3}]),
            "'start': 1.* that don't cover",
        ),
        (changed(finish_reason=None), "finish_reason None"),
        (changed(finish_reason={"type": "bored"}), "type 'bored'"),
        (changed(finish_reason={"type": "stop", "matched": "NaN happened"}), "an id that it put in itself"),
        (changed(finish_reason={"type": "abort", "message": "no memory", "status_code": 500}), "status 500: no memory"),
    ],
)
def test_what_must_not_be_trained_is_refused_and_named(bad: Answer, seen: str) -> None:
    with pytest.raises(
        EngineError, match=f"^The server at http://127.0.0.1:30000 answered request 0{{32}} with .*{seen}"
    ):
        read(bad)


def test_more_ids_than_were_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match="3 ids, and 2 were asked for"):
        read(answer(), with_sampling(max_tokens=2))


def encoded(rows: list[list[list[int]]]) -> str:
    flat = [number for row in rows for layer in row for number in layer]
    return base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()


def routed(**changes: Any) -> Sent:
    plain = with_sampling(**changes)
    return Sent(
        prompt_ids=plain.prompt_ids,
        sampling=plain.sampling,
        rid=plain.rid,
        address=plain.address,
        n_vocabulary=320,
        routed=SHAPE,
    )


def test_experts_have_a_row_for_each_position_but_the_last_from_the_asked_one_on() -> None:
    """Four prompt ids and three sampled ones, asked for from position 4: rows of positions 4 and 5."""
    told = changed(routed_experts=encoded([[[6, 2], [5, 0]], [[2, 6], [0, 5]]]))
    generation = read(told, routed(experts_from=4))
    data = struct.pack("<8H", 6, 2, 5, 0, 2, 6, 0, 5)
    assert generation.routed_experts == RoutedExperts(start=4, n_layers=2, n_chosen=2, data=data)


def test_an_aborted_call_may_have_lost_its_experts_and_no_other_may() -> None:
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    assert read(changed(finish_reason=abort), routed()).routed_experts is None
    with pytest.raises(EngineError, match="no routed experts: start it with --enable-return-routed-experts"):
        read(answer(), routed())


def test_going_on_asks_for_what_is_left() -> None:
    """The prompt grows by what was sampled, the room shrinks by it, the seed stays."""
    first = Generation(token_ids=(5, 2), logprobs=(-1.0, -2.0), weight_versions=(0, 0), stop_reason="stop")
    prompt, sampling = going_on((1, 2, 3), first, SAMPLING)
    assert prompt == (1, 2, 3, 5, 2)
    assert sampling == Sampling(temperature=1.0, max_tokens=6, seed=SAMPLING.seed, stop_ids=(45,))


def test_going_on_asks_for_experts_where_the_known_ones_end() -> None:
    experts = RoutedExperts(start=1, n_layers=1, n_chosen=1, data=bytes(2 * 3))
    first = Generation(
        token_ids=(5, 2), logprobs=(-1.0, -2.0), weight_versions=(0, 0), stop_reason="stop", routed_experts=experts
    )
    assert going_on((1, 2, 3), first, SAMPLING)[1].experts_from == 4


def part(ids: tuple[int, ...], version: int, *, start: int, stop_reason: Any = "stop", cached: int = 0) -> Generation:
    """An answer whose experts begin at `start` and end before its last id."""
    data = struct.pack(f"<{max(len(ids), 1)}H", *range(max(len(ids), 1)))
    return Generation(
        token_ids=ids,
        logprobs=tuple(-float(i) for i in ids),
        weight_versions=(version,) * len(ids),
        stop_reason=stop_reason,
        n_cached_ids=cached,
        routed_experts=RoutedExperts(start=start, n_layers=1, n_chosen=1, data=data),
    )


def test_two_parts_become_one_answer() -> None:
    """Each id keeps its log probability and version; the cache is the first's, the end the second's."""
    whole = joined(part((5, 2), 3, start=2, cached=2), part((7, 45), 4, start=4, stop_reason="length", cached=4))
    assert whole == Generation(
        token_ids=(5, 2, 7, 45),
        logprobs=(-5.0, -2.0, -7.0, -45.0),
        weight_versions=(3, 3, 4, 4),
        stop_reason="length",
        n_cached_ids=2,
        routed_experts=RoutedExperts(start=2, n_layers=1, n_chosen=1, data=struct.pack("<4H", 0, 1, 0, 1)),
    )


def test_a_second_part_without_ids_changes_nothing_but_the_end() -> None:
    nothing = Generation(token_ids=(), logprobs=(), weight_versions=(), stop_reason="aborted")
    first = part((5, 2), 3, start=2)
    whole = joined(first, nothing)
    assert (whole.token_ids, whole.stop_reason, whole.routed_experts) == ((5, 2), "aborted", first.routed_experts)


def test_experts_are_unknown_as_a_whole_where_those_of_one_part_are() -> None:
    lost = Generation(token_ids=(7,), logprobs=(-1.0,), weight_versions=(0,), stop_reason="aborted")
    assert joined(part((5, 2), 3, start=2), lost).routed_experts is None


def test_experts_that_leave_a_gap_are_refused() -> None:
    with pytest.raises(EngineError, match=r"to position 4 .* followed by those from 5"):
        joined(part((5, 2), 3, start=2), part((7,), 3, start=5))


Path_ = tuple[str, ...]
PLACES: list[Path_] = [("output_ids",), ("meta_info",), *(("meta_info", key) for key in answer()["meta_info"])]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def put(answer: Answer, place: Path_, value: Any) -> Answer:
    answer = copy.deepcopy(answer)
    table = answer
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    return answer


@given(place=st.sampled_from(PLACES), value=JSON, read=st.just(read))
def test_whatever_a_server_says_is_a_whole_generation_or_an_engine_error(
    place: Path_, value: Any, read: Callable[[Answer], Generation]
) -> None:
    """No answer raises anything else, and none becomes a Generation whose ids lack a log probability or a version."""
    try:
        generation = read(put(answer(), place, value))
    except EngineError:
        return
    except CaptureError as error:
        raise AssertionError from error
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.weight_versions)
    assert all(0 <= i < 320 for i in generation.token_ids)
    assert all(logprob <= 1e-3 for logprob in generation.logprobs)
