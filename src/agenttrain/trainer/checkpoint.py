"""Training state to a folder and back; the folder is whole or not there.

Everything is written into a folder beside the target, flushed to the disk and renamed. A folder that lacks a file,
holds one of another size, or was written by a newer format is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agenttrain.errors import RunError

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.pt", "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What training goes on from."""

    weights: Mapping[str, torch.Tensor]
    """Hugging Face name to tensor, each storage once."""
    optimizer: Mapping[str, Any]
    """The optimizer's own state_dict."""
    state: Mapping[str, Any]
    """JSON: step, weight version, schedule, seed, data cursor."""


def save(folder: Path, training: TrainingState) -> None:
    """Write a checkpoint; afterwards it is whole and survives a power cut.

    Args:
        folder: absent or empty.

    Raises:
        RunError: the folder holds something, or the disk is full or read-only.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} already holds files. A checkpoint is written into an empty folder of its own.")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in training.weights.items()}
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        torch.save(dict(training.optimizer), partial / OPTIMIZER)
        sizes = {name: (partial / name).stat().st_size for name in (WEIGHTS, OPTIMIZER)}
        manifest = {"format": FORMAT, "files": sizes, "state": dict(training.state)}
        (partial / STATE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            _flush(file)
        os.replace(partial, folder)
        _flush(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"The checkpoint {folder} could not be written: {error}. Free space or permissions?") from error


def load(folder: Path) -> TrainingState:
    """Read a checkpoint back.

    Raises:
        RunError: it is half written, damaged, or of a newer format.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    for name, size in manifest["files"].items():
        file = folder / name
        seen = file.stat().st_size if file.is_file() else None
        if seen != size:
            raise RunError(
                f"The checkpoint {folder} is damaged: {name} has {'no' if seen is None else seen} bytes, and {size} "
                "were written. Resume from an earlier checkpoint."
            )
    try:
        weights = load_file(folder / WEIGHTS)
        optimizer = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and pickle each raise their own kinds on damaged bytes
        raise RunError(f"The checkpoint {folder} is damaged: {error}. Resume from an earlier checkpoint.") from error
    return TrainingState(weights=weights, optimizer=optimizer, state=manifest["state"])


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{folder} holds no {STATE}: it is no checkpoint, or its writing was cut short. Resume from another one."
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / STATE} can't be read: {error}. Resume from an earlier checkpoint.") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise RunError(f"{folder / STATE} names no format. Resume from an earlier checkpoint.")
    if manifest["format"] > FORMAT:
        raise RunError(
            f"The checkpoint {folder} has format {manifest['format']}, and this agenttrain reads up to {FORMAT}. "
            "Upgrade agenttrain."
        )
    return manifest


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
