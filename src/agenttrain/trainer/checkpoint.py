"""Training state to the files of a folder and back.

Three files: weights, the optimizer's own state, and JSON with a format version. Whether a folder is whole, flushed and
unchanged is seen to by whoever gives it (`agenttrain.checkpoint_folder`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agenttrain.errors import RunError

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.pt", "state.json"


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
    """Write the state's files.

    Args:
        folder: absent or empty.

    Raises:
        RunError: the folder holds something.
        OSError, SafetensorError, RuntimeError: the disk refuses; each library says it in its own way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise RunError(f"{folder} already holds files. A checkpoint is written into an empty folder of its own.")
    text = json.dumps({"format": FORMAT, "state": dict(training.state)}, indent=1)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in training.weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with (folder / OPTIMIZER).open("wb") as file:
        torch.save(dict(training.optimizer), file)
    (folder / STATE).write_text(text, encoding="utf-8")


def load(folder: Path) -> TrainingState:
    """Read the state's files back.

    Raises:
        RunError: one is missing, can't be read, or is of a newer format.
    """
    state = _state(folder)
    try:
        weights = load_file(folder / WEIGHTS)
        optimizer = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and pickle each raise their own kinds on damaged bytes
        raise RunError(f"The checkpoint {folder} is damaged: {error}. Resume from an earlier checkpoint.") from error
    return TrainingState(weights=weights, optimizer=optimizer, state=state)


def _state(folder: Path) -> dict[str, Any]:
    try:
        written = json.loads((folder / STATE).read_text(encoding="utf-8"))
        format, state = written["format"], dict(written["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / STATE} can't be read: {error!r}. Resume from an earlier checkpoint.") from None
    if not isinstance(format, int) or format > FORMAT:
        raise RunError(
            f"The training state in {folder} has format {format}, and this agenttrain reads up to {FORMAT}. Upgrade "
            "agenttrain."
        )
    return state
