"""Memory that grows is seen, and a process knows when it must end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agenttrain.alarms import memory_alarms
from agenttrain.memory import (
    GROWING_STEPS,
    GROWTH_BYTES,
    MIB,
    SETTLING_STEPS,
    Growth,
    MemoryWatch,
    _of_group,
    available_bytes,
    resident_bytes,
    whole_bytes,
)


def test_what_is_allocated_is_held() -> None:
    """By this process, and the machine has less left."""
    before = resident_bytes()
    block = bytearray(b"x") * (64 * MIB)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before > 60 * MIB
    assert len(block) == 64 * MIB
    assert (available_bytes() or 0) > 0


def test_growth_in_every_step_is_told_per_rollout() -> None:
    """Once there are enough steps; one in which memory did not grow ends it."""
    watch, kept, told = MemoryWatch(), [], []
    for _ in range(SETTLING_STEPS + GROWING_STEPS):
        kept.append(bytearray(b"x") * (GROWTH_BYTES // 2))
        told.append(watch.after_step(8))
    *before, growth = told
    assert before == [None] * len(before)
    assert growth is not None
    assert growth.mib == pytest.approx(GROWING_STEPS * GROWTH_BYTES / 2 / MIB, rel=0.2)
    assert growth.mib_per_rollout == pytest.approx(growth.mib / (8 * GROWING_STEPS))
    assert growth.steps_left > 1
    kept.clear()
    assert watch.after_step(8) is None


def test_memory_that_settles_says_nothing() -> None:
    """Buffers that find their size grow in each of some steps, and less from one to the next."""
    watch, kept = MemoryWatch(), []
    for mib in (*[64] * SETTLING_STEPS, 96, 48, 12, 6):
        kept.append(bytearray(b"x") * (mib * MIB))
        assert watch.after_step(8) is None


def test_steady_memory_says_nothing() -> None:
    watch = MemoryWatch()
    assert [watch.after_step(8) for _ in range(9)] == [None] * 9
    assert watch.trouble() is None


def test_a_process_at_its_limit_must_end() -> None:
    """The reason names both figures, and stays."""
    watch = MemoryWatch(limit_bytes=MIB)
    trouble = watch.trouble()
    assert trouble is not None
    assert trouble.startswith("memory is nearly used up: this process holds ")
    assert trouble.endswith(" MiB, and run.memory_mib is 1")
    assert watch.trouble() == trouble


@pytest.mark.parametrize(
    ("limit", "expected"), [("1000\n", 1000 - 700 + 300), ("max\n", None), (None, None)]
)  # fmt: skip
def test_a_containers_limit_counts_cache_as_left(tmp_path: Path, limit: str | None, expected: int | None) -> None:
    """The kernel gives it back before it kills; a group without a limit says nothing."""
    limit_file, used, statistics = (tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit is not None:
        limit_file.write_text(limit)
    used.write_text("700\n")
    statistics.write_text("anon 1\ninactive_file 300\n")
    assert _of_group(limit_file, used, statistics, "inactive_file") == expected


def test_the_whole_is_the_machines_or_its_containers() -> None:
    """Never more than the kernel tells of the machine, and what may still be used is a part of it."""
    (line,) = [each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemTotal:")]
    assert (available_bytes() or 0) < whole_bytes() <= int(line.split()[1]) * 1024


def test_growth_is_loud_when_memory_will_not_last() -> None:
    growth = Growth(mib=128.0, mib_per_rollout=1.0, steps_left=10.0)
    (note,) = memory_alarms(growth, 5, steps_to_go=9)
    (loud,) = memory_alarms(growth, 5, steps_to_go=11)
    assert (note.code, note.severity, loud.severity) == ("memory_grows", "note", "loud")
    assert note.message == (
        "Memory grows: 128 MiB over the last steps, 1.00 MiB a rollout. Does the graph keep what it should let go?"
    )
    assert loud.message == f"{note.message} At this rate it lasts for 10 of the 11 steps to go."
    assert memory_alarms(None, 5, steps_to_go=9) == []
    assert memory_alarms(growth, 5, steps_to_go=0) == []
    assert memory_alarms(replace(growth, steps_left=91.0), 5, steps_to_go=9) == []
