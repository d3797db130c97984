"""Runs on veRL one of whose processes is killed, or that are stopped: what becomes of them, and that counts add up.

The rows of docs/kills.md are made by the same code, `benchmarks/process_kills.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from process_kills import CASES, OF_SGLANG, killed

pytestmark = pytest.mark.verl
SEED = 5


def test_a_killed_rollout_worker_is_replaced(tmp_path: Path) -> None:
    """The run ends well, and what the worker had under way was made again."""
    (case,) = [case for case in CASES if case.name == "worker"]
    kill = killed(case, tmp_path / case.name, SEED)
    assert kill.faults == []
    assert kill.lives == 1
    assert kill.aborted > 0


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in (*CASES, OF_SGLANG) if case.name != "worker"])
def test_a_run_ends_or_goes_on_as_it_should(tmp_path: Path, name: str) -> None:
    """It ends within its time and leaves nothing running; `--resume` brings it to an end that adds up."""
    (case,) = [case for case in (*CASES, OF_SGLANG) if case.name == name]
    assert killed(case, tmp_path / name, SEED).faults == []
