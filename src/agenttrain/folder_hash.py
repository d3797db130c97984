"""The folder of a policy becomes one hash, equal exactly when weights, tokenizer and template are the same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

NOT_POLICY = ("README.md", "fixed_set.json")
"""Files beside a policy that say something about it: a model card, and what it is expected to answer."""


def policy_hash(folder: Path) -> str:
    """SHA-256, hexadecimal, over names and bytes of the files of a folder and its adapter/.

    Raises:
        OSError: a file can't be read.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_POLICY):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
