"""Which waiting calls may begin, and what of their prompts is held already."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from agenttrain.local.kv_cache import BLOCK, KVRows, block_hashes
from agenttrain.local.seating import Call, Seated, alike, seat
from agenttrain.records import Sampling


def rows() -> KVRows:
    return KVRows(
        [((1, 2), (1, 2))], device=torch.device("cpu"), dtype=torch.float32, budget_bytes=1 << 20, max_length=512
    )


def call(prompt: list[int], session: str) -> Call:
    sampling = Sampling(temperature=1.0, max_tokens=4, seed=0, stop_ids=())
    return Call(prompt, sampling, session, Future(), frozenset(), block_hashes(prompt))


def test_a_call_that_begins_like_another_of_its_wave_waits_and_then_copies() -> None:
    place, shared = rows(), list(range(4 * BLOCK))
    one, other = call([*shared, 101], "one"), call([*shared, 102], "other")
    joining, later = seat([one, other], place, most=8, alone=False)
    assert ([each.call for each in joining], later) == ([one], [other])
    joining[0].row.ids = one.to_read
    place.index(joining[0].row, one.hashes)
    joining, later = seat(later, place, most=8, alone=False)
    assert [(each.call, each.start) for each in joining] == [(other, 4 * BLOCK)]
    assert (other.n_cached, later) == (4 * BLOCK, [])


def test_a_call_that_shares_nothing_begins_in_an_empty_row() -> None:
    place, prompt = rows(), list(range(4 * BLOCK))
    joining, _ = seat([call(prompt, "one")], place, most=1, alone=True)
    joining[0].row.ids = prompt
    place.index(joining[0].row, block_hashes(prompt))
    joining, _ = seat([call(prompt, "other")], place, most=1, alone=True)
    assert [each.start for each in joining] == [0]


def test_no_more_rows_are_taken_than_may_be() -> None:
    joining, later = seat([call([i] * 5, str(i)) for i in range(3)], rows(), most=2, alone=False)
    assert ([each.call.session for each in joining], [each.session for each in later]) == (["0", "1"], ["2"])


def test_a_wave_is_split_where_padding_would_cost_more_than_a_pass() -> None:
    joining, _ = seat([call([i + 1] * n, str(i)) for i, n in enumerate((5, 400, 6, 380))], rows(), most=8, alone=False)
    split = alike(joining, most_ids=4096)
    assert [[each.n_missing for each in group] for group in split] == [[5, 6], [380, 400]]
    assert [len(group) for group in alike(joining, most_ids=400)] == [2, 1, 1]
    assert isinstance(split[0][0], Seated)
