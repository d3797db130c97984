"""A trainer's saved state becomes a sealed folder, and a folder is read only while its seal holds.

The seal names every file with its size and hash, the step, and the life of the run that wrote it. A folder without a
seal, with a file that is missing, cut short or changed in a single byte, or of a newer format, is refused. Knows
nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.disk import empty_folder, replace_file, replace_folder
from agenttrain.errors import RunError

FORMAT = 1
SEAL = "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a run may go on from."""

    step: int
    life: int
    """Of the run, when it was written: rollouts of that life and later ones may be of its weights."""
    folder: Path


class DamagedCheckpoint(RunError):
    """A folder that is not what was written."""


def write_checkpoint(target: Path, *, step: int, life: int, save: Callable[[Path], None]) -> None:
    """Let `save` fill an empty folder; afterwards it stands at the target, whole, and survives a power cut.

    Raises:
        Exception: whatever `save` raises; then nothing is left, and what stood at the target stands.
    """
    with empty_folder(target.with_name(f".{target.name}.part")) as aside:
        save(aside)
        replace_file(aside / SEAL, json.dumps(_seal(aside, step, life), indent=1).encode())
        replace_folder(aside, target)


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a whole checkpoint's seal says, once every file is as it was written.

    Raises:
        DamagedCheckpoint: naming the file, what was seen and what was written.
        RunError: it is of a newer format.
    """
    seal = _read_seal(folder)
    for name, written in seal["files"].items():
        file = folder / name
        seen = file.stat().st_size if file.is_file() else None
        if seen != written["bytes"]:
            there = "is not there" if seen is None else f"has {seen} bytes"
            raise DamagedCheckpoint(f"{file} {there}, and {written['bytes']} were written.")
        if _hash(file) != written["sha256"]:
            raise DamagedCheckpoint(f"{file} has other content than was written: some of its bytes have changed.")
    return Checkpoint(step=int(seal["step"]), life=int(seal["life"]), folder=folder)


def _seal(folder: Path, step: int, life: int) -> dict[str, Any]:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _hash(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {"format": FORMAT, "step": step, "life": life, "files": files}


def _read_seal(folder: Path) -> dict[str, Any]:
    path = folder / SEAL
    try:
        seal = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(seal["format"], int) and all(key in seal for key in ("step", "life", "files"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} can't be read: {error}.") from None
    if not known:
        raise DamagedCheckpoint(f"{path} holds no seal of a checkpoint.")
    if seal["format"] > FORMAT:
        raise RunError(
            f"The checkpoint {folder} has format {seal['format']}, and this agenttrain reads up to {FORMAT}. Install "
            "the agenttrain that wrote it, or a newer one."
        )
    return dict(seal)


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
