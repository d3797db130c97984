"""A checkpoint is whole or not there, and a changed byte is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.checkpoint_folder import FORMAT, SEAL, DamagedCheckpoint, read_checkpoint, write_checkpoint
from agenttrain.errors import RunError

CONTENT = {"weights.bin": bytes(range(256)) * 64, "sub/state.json": b"{}"}


def save(folder: Path) -> None:
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def written(folder: Path) -> Path:
    write_checkpoint(folder / "step-3", step=3, life=1, save=save)
    return folder / "step-3"


def test_what_was_written_is_there_with_its_seal(tmp_path: Path) -> None:
    """Nothing else is left, and writing it again replaces it."""
    for _ in range(2):
        checkpoint = read_checkpoint(written(tmp_path))
        assert (checkpoint.step, checkpoint.life, checkpoint.folder) == (3, 1, tmp_path / "step-3")
        assert {name: (checkpoint.folder / name).read_bytes() for name in CONTENT} == CONTENT
        assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_a_save_that_fails_leaves_what_stood_there(tmp_path: Path) -> None:
    before = read_checkpoint(written(tmp_path))

    def fails(folder: Path) -> None:
        save(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path / "step-3", step=4, life=2, save=fails)
    assert read_checkpoint(tmp_path / "step-3") == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(CONTENT)), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_single_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: float, bit: int
) -> None:
    folder = written(tmp_path_factory.mktemp("run"))
    content = bytearray((folder / name).read_bytes())
    content[int(at * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"{name} has other content than was written"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "weights.bin").unlink(), "weights.bin is not there, and 16384 were written"),
        (lambda folder: (folder / "weights.bin").write_bytes(b"x"), "weights.bin has 1 bytes, and 16384 were written"),
        (lambda folder: (folder / SEAL).unlink(), f"{SEAL} can't be read"),
        (lambda folder: (folder / SEAL).write_text("{"), f"{SEAL} can't be read"),
        (lambda folder: (folder / SEAL).write_text("{}"), f"{SEAL} can't be read"),
        (lambda folder: (folder / SEAL).write_text('{"format": 1}'), f"{SEAL} holds no seal of a checkpoint"),
    ],
)
def test_a_folder_that_is_not_whole_is_told(tmp_path: Path, damage: Callable[[Path], object], told: str) -> None:
    folder = written(tmp_path)
    damage(folder)
    with pytest.raises(DamagedCheckpoint, match=told):
        read_checkpoint(folder)


def test_a_newer_format_is_refused_and_is_no_damage(tmp_path: Path) -> None:
    """An older agenttrain must not go on from an older checkpoint and undo what a newer one did."""
    folder = written(tmp_path)
    seal = json.loads((folder / SEAL).read_text())
    (folder / SEAL).write_text(json.dumps(seal | {"format": FORMAT + 1}))
    with pytest.raises(RunError, match=f"has format {FORMAT + 1}, and this agenttrain reads up to {FORMAT}") as told:
        read_checkpoint(folder)
    assert not isinstance(told.value, DamagedCheckpoint)
