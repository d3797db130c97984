"""Training state is read back as it was saved, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agenttrain.errors import RunError
from agenttrain.trainer.checkpoint import FORMAT, OPTIMIZER, STATE, WEIGHTS, TrainingState, load, save


def training() -> TrainingState:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    return TrainingState(weights={"w": parameter}, optimizer=optimizer.state_dict(), state={"step": 3, "seed": 7})


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    before = training()
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", before)
    after = load(tmp_path / "c")
    assert torch.equal(after.weights["w"], before.weights["w"].detach())
    assert after.state == {"step": 3, "seed": 7}
    assert torch.equal(after.optimizer["state"][0]["exp_avg"], before.optimizer["state"][0]["exp_avg"])
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(RunError, match="already holds files"):
        save(tmp_path, training())


def test_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    broken = TrainingState(weights=training().weights, optimizer={}, state={"x": object()})
    with pytest.raises(TypeError):
        save(tmp_path / "c", broken)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE])
def test_a_file_that_is_missing_or_no_such_file_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path / "c", training())
    file = tmp_path / "c" / name
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RunError, match="earlier checkpoint"):
        load(tmp_path / "c")
    file.unlink()
    with pytest.raises(RunError, match="earlier checkpoint"):
        load(tmp_path / "c")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", training())
    state = tmp_path / "c" / STATE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(RunError, match="Upgrade agenttrain"):
        load(tmp_path / "c")


def test_a_state_without_a_format_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}", "[]"):
        (tmp_path / STATE).write_text(text)
        with pytest.raises(RunError, match="can't be read"):
            load(tmp_path)
