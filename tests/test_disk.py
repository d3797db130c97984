"""A file is replaced whole, and a disk that refuses is told from a fault of whoever wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agenttrain.disk import disk_trouble, replace_file, replace_folder


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_can_not_be_replaced_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / "aside" / "sub").mkdir(parents=True)
        (tmp_path / "aside" / "sub" / name).write_text(name)
        replace_folder(tmp_path / "aside", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there" / "sub").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_trouble_with_the_disk_is_known_whoever_met_it(tmp_path: Path) -> None:
    """Python, safetensors and torch each raise a kind of their own, here on a folder that is not there."""
    file, tensor = tmp_path / "nowhere" / "file", {"a": torch.zeros(2)}
    for write in (lambda: file.write_text("x"), lambda: save_file(tensor, file), lambda: replace_file(file, b"x")):
        with pytest.raises(Exception, match="No such file") as met:
            write()
        assert disk_trouble(met.value) == "No such file or directory"
    behind = RuntimeError("unexpected pos")
    behind.__context__ = met.value
    assert disk_trouble(behind) == "No such file or directory"


def test_other_faults_are_no_trouble_with_the_disk() -> None:
    ring = ValueError("a")
    ring.__cause__ = KeyError("b")
    ring.__cause__.__cause__ = ring
    for error in (ValueError("no tensor"), RuntimeError("shape mismatch"), ring):
        assert disk_trouble(error) is None
