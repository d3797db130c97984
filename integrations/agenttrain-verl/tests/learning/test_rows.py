"""What a row of veRL's says of its rollout."""

from __future__ import annotations

import pytest
from agenttrain.errors import SampleError

from agenttrain_verl.rows import by_rollout, is_padding, row_of

EXTRA = {
    "rollout_id": "train-1-t-0-0",
    "group_id": "train-1-t",
    "task_id": "t",
    "trajectory": 1,
    "min_global_steps": 2,
    "max_global_steps": 3,
    "turns": [(0, 4), (2, 1)],
}


def test_a_row_names_its_rollout_and_its_turns() -> None:
    """From its tag, its extra_fields, its mask and its reward."""
    row = row_of("u_0_1", {"seq_len": 12}, EXTRA, n_trained=5, reward=0.5)
    assert (row.key, row.rollout_id, row.group_id, row.trajectory) == ("u_0_1", "train-1-t-0-0", "train-1-t", 1)
    assert (row.n_ids, row.n_trained, row.reward, row.oldest_version) == (12, 5, 0.5, 2)
    assert row.turns == ((0, 4), (2, 1))


def test_a_row_that_is_nobodys_is_refused() -> None:
    """With its key, and what it holds instead."""
    with pytest.raises(SampleError, match=r"Row u_0_0 of veRL's batch has 3 trained tokens and extra_fields \['x'\]"):
        row_of("u_0_0", {"seq_len": 9}, {"x": 1}, n_trained=3, reward=0.0)
    with pytest.raises(SampleError, match="has 0 trained tokens"):
        row_of("u_0_0", {"seq_len": 9}, EXTRA, n_trained=0, reward=0.0)


def test_synthetic_rows_are_told_by_their_tag() -> None:
    """veRL marks what it adds to even a batch out."""
    assert is_padding({"is_padding": True})
    assert not is_padding({"seq_len": 3})


def test_rows_of_a_rollout_go_by_trajectory() -> None:
    """Whatever the order in which they stand in the batch."""
    rows = [row_of(f"u_0_{t}", {"seq_len": 9}, EXTRA | {"trajectory": t}, n_trained=1, reward=0.0) for t in (2, 0, 1)]
    assert [row.trajectory for row in by_rollout(rows)["train-1-t-0-0"]] == [0, 1, 2]
