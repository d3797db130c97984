"""Rows of keys and values: places, prefixes and eviction."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from agenttrain.local.kv_cache import KVRows, block_hashes, common_prefix


def rows(budget_bytes: int = 1 << 20) -> KVRows:
    return KVRows(
        [((1, 2), (1, 2))],
        device=torch.device("cpu"),
        dtype=torch.float32,
        budget_bytes=budget_bytes,
        max_length=256,
    )


def write(kv: KVRows, slot: int, value: float) -> None:
    kv._buffers[0][slot] = value


def test_common_prefix() -> None:
    assert common_prefix([5, 6, 7], [5, 6, 8, 9]) == 2
    assert common_prefix([5, 6], [5, 6, 8]) == 2
    assert common_prefix([], [1]) == 0


def test_a_hash_stands_for_the_whole_prefix() -> None:
    a, b = list(range(40)), [99, *range(1, 40)]
    assert len(block_hashes(a)) == 2
    assert block_hashes(a)[0] == block_hashes(a[:20])[0]
    assert block_hashes(a)[1] != block_hashes(b)[1]


def test_rows_in_use_come_to_the_front_with_what_they_hold() -> None:
    kv = rows()
    taken = [kv.take(str(i), 10) for i in range(4)]
    for i, row in enumerate(taken):
        assert row is not None
        row.ids = [i] * 10
        write(kv, i, float(i))
    third = taken[3]
    assert third is not None
    third.call = SimpleNamespace(n_held=10)
    kv.gather_front()
    assert (kv.n_front, third.slot) == (1, 0)
    assert [float(kv._buffers[0][row.slot, 0, 9, 0]) for row in taken if row] == [0.0, 1.0, 2.0, 3.0]


def test_a_full_buffer_gives_the_row_that_is_idle_for_longest() -> None:
    kv = rows(budget_bytes=2 * 64 * 4 * 4)
    first, second = kv.take("a", 10), kv.take("b", 10)
    assert first is not None
    kv.touch(first)
    assert kv.take("c", 10) is second
    first.call = SimpleNamespace(n_held=1)
    assert second is not None
    second.call = SimpleNamespace(n_held=1)
    assert kv.take("d", 10) is None


def test_a_released_row_is_taken_before_another_is_made() -> None:
    kv = rows()
    first = kv.take("a", 10)
    kv.free("a")
    assert kv.take("b", 10) is first


def test_longer_rows_keep_what_is_held_and_may_cost_idle_rows() -> None:
    kv = rows(budget_bytes=4 * 64 * 4 * 4)
    taken = [kv.take(str(i), 10) for i in range(4)]
    busy = taken[1]
    assert busy is not None
    busy.call, busy.ids = SimpleNamespace(n_held=3), [1, 2, 3]
    write(kv, busy.slot, 7.0)
    kv.ensure_length(100)
    assert busy in kv.rows
    assert len(kv.rows) == 2
    assert kv.rows[busy.slot] is busy
    assert float(kv._buffers[0][busy.slot, 0, 2, 0]) == 7.0
