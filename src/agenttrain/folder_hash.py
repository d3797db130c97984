"""The folder of a policy becomes one hash, equal exactly when weights, tokenizer and template are the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

NOT_POLICY = ("README.md", "fixed_set.json")
"""Files beside a policy that say something about it: a model card, and what it is expected to answer."""


def policy_hash(folder: Path) -> str:
    """SHA-256, hexadecimal, over names and contents of the files of a folder and its adapter/.

    Raises:
        OSError: a file can't be read.
    """
    return hash_of_files(file_hashes(folder))


def file_hashes(folder: Path) -> dict[str, str]:
    """Name of each file that a policy is made of, such as "adapter/adapter_config.json", to the SHA-256 of its content.

    Raises:
        OSError: a file can't be read.
    """
    hashes = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_POLICY):
        with file.open("rb") as content:
            hashes[file.relative_to(folder).as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
    return hashes


def hash_of_files(hashes: Mapping[str, str]) -> str:
    """`policy_hash` of the folder that `file_hashes` gave this of."""
    lines = "".join(f"{name}\0{content}\n" for name, content in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
