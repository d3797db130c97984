"""Weights as files, replaced as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from agenttrain.errors import EngineError

from agenttrain_sglang.weights import Snapshot, push
from agenttrain_sglang.weights.buckets import in_buckets


def test_it_keeps_the_last_weights_only(tmp_path: Path) -> None:
    """In shards, with an index; also where no server is up."""
    snapshot = Snapshot(tmp_path / "new" / "folder")
    assert (snapshot.path, list(snapshot.weights())) == (None, [])
    for number in (1.0, 2.0):
        weights = [("a", torch.full((4,), number)), ("b", torch.full((4,), number))]
        assert push([], weights, f"tag {number}", bucket_mib=16 / 2**20, snapshot=snapshot) == {}
    assert snapshot.tag == "tag 2.0"
    assert {name: tensor.tolist() for name, tensor in snapshot.weights()} == {"a": [2.0] * 4, "b": [2.0] * 4}
    assert snapshot.path is not None
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [snapshot.path.name]
    index = json.loads((snapshot.path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-00000.safetensors", "b": "model-00001.safetensors"}


def test_what_is_not_finished_changes_nothing(tmp_path: Path) -> None:
    """It can be read meanwhile, and afterwards; files of an earlier process go, those of others stay."""
    (tmp_path / "weights-1-000001").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    snapshot = Snapshot(tmp_path)
    push([], [("a", torch.ones(2))], "kept", bucket_mib=1, snapshot=snapshot)
    part = snapshot.begin()
    (bucket,) = in_buckets([("a", torch.zeros(2))], n_bytes=99)
    part.add(bucket)
    assert [tensor.tolist() for _, tensor in snapshot.weights()] == [[1.0, 1.0]]
    part.discard()
    assert snapshot.tag == "kept"
    assert len(list(snapshot.weights())) == 1
    snapshot.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    """With the folder and the next step."""
    part = Snapshot(tmp_path).begin()
    part.discard()
    (bucket,) = in_buckets([("a", torch.zeros(2))], n_bytes=99)
    with pytest.raises(EngineError, match=r"can't be kept in .*weights-.* Make room there"):
        part.add(bucket)


def test_views_of_one_tensor_are_written_as_they_are(tmp_path: Path) -> None:
    """As experts of one layer are."""
    both = torch.arange(8.0).reshape(2, 4)
    snapshot = Snapshot(tmp_path)
    push([], [("a", both[0]), ("b", both[1])], "t", bucket_mib=1, snapshot=snapshot)
    assert [tensor.tolist() for _, tensor in snapshot.weights()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
