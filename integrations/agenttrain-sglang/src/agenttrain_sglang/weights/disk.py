"""Weights by files that both sides see under one name: the server is told the folder of a snapshot.

The server keeps that folder as its model's, and falls back to it when a load fails half-way: after a fault here it has
no good weights at all (SGLang 0.5.23, update_weights_from_disk).
"""

from __future__ import annotations

from pathlib import Path

from agenttrain_sglang.weights.buckets import Bucket
from agenttrain_sglang.weights.server_http import Http


class DiskTransport:
    """Names a folder to one server."""

    name = "disk"
    has_sessions = False
    device = "cpu"

    def __init__(self, http: Http) -> None:
        """Keep the server; its time limit holds for the whole load."""
        self.http = http

    def prepare(self) -> None:
        """Nothing is needed."""

    def load_folder(self, folder: Path, *, tag: str) -> None:
        """Let the server read a snapshot's folder.

        Raises:
            Refused, Gone: the server said no, or nothing; it must not be used any more.
        """
        self.http.post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "load_format": "safetensors", "flush_cache": True, "weight_version": tag},
        )

    def load(self, bucket: Bucket, *, tag: str | None) -> None:
        """Nothing travels by itself: the snapshot has the bucket."""

    def drop(self) -> None:
        """Nothing is held."""

    close = drop
