"""The weights of now as files: what a server that is started again gets, and what transport "disk" sends.

One folder per push, written bucket by bucket. It counts once its index stands (written last, under its name at once);
`keep` then drops the older ones. Reading gives back the same stream, lazily.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agenttrain.errors import EngineError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agenttrain_sglang.weights.buckets import Bucket
from agenttrain_sglang.weights.tensor import alone

INDEX = "model.safetensors.index.json"


class Snapshot:
    """A folder of ours; what else lies in it is not touched."""

    def __init__(self, folder: str | Path) -> None:
        """Begin empty; what an earlier process left there is removed.

        Args:
            folder: made where it is missing.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._next = 0
        self.path: Path | None = None
        """The folder with the weights of now. None: none were kept yet."""
        self.tag: str | None = None
        """What those weights are called."""
        self._remove_others()

    def begin(self) -> Part:
        """A new folder to be filled; the weights of now stay."""
        self._next += 1
        return Part(self._folder / f"weights-{os.getpid()}-{self._next:06d}")

    def keep(self, part: Part, tag: str) -> None:
        """Make a finished part the weights of now, and remove those before."""
        self.path, self.tag = part.path, tag
        self._remove_others()

    def weights(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of the weights of now, one tensor in memory at a time."""
        if self.path is None:
            return
        for shard in sorted(self.path.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    yield name, file.get_tensor(name)

    def close(self) -> None:
        """Remove all files."""
        self.path = self.tag = None
        self._remove_others()

    def _remove_others(self) -> None:
        for other in self._folder.glob("weights-*"):
            if other != self.path:
                shutil.rmtree(other, ignore_errors=True)


class Part:
    """A folder being filled."""

    def __init__(self, path: Path) -> None:
        """Make the folder."""
        self.path = path
        self.path.mkdir()
        self._shard_by_name: dict[str, str] = {}
        self._n_bytes = 0

    def add(self, bucket: Bucket) -> None:
        """Write a bucket as a shard; with the last one the folder is whole.

        Raises:
            EngineError: there is no room, or no folder any more.
        """
        shard = f"model-{bucket.number:05d}.safetensors"
        tensors = {name: alone(tensor.cpu()) for name, tensor in bucket.tensors}
        self._shard_by_name.update(dict.fromkeys(tensors, shard))
        self._n_bytes += bucket.n_bytes
        try:
            save_file(tensors, self.path / shard, metadata={"format": "pt"})
            if bucket.is_last:
                self._write_index()
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"New weights can't be kept in {self.path}: {error}. Make room there, or name another folder that "
                "servers see: sglang.shared_folder."
            ) from error

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_index(self) -> None:
        index = {"metadata": {"total_size": self._n_bytes}, "weight_map": self._shard_by_name}
        part = self.path / f"{INDEX}.part"
        part.write_text(json.dumps(index))
        part.replace(self.path / INDEX)
