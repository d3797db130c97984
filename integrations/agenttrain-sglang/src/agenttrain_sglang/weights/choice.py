"""Which way weights take into a server, from what both sides say of themselves, in a sentence that users read."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from agenttrain.errors import EngineError

from agenttrain_sglang import sglang_0_5_12
from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights.disk import DiskTransport
from agenttrain_sglang.weights.group import GroupTransport, address_seen_from
from agenttrain_sglang.weights.push import Link, Transport
from agenttrain_sglang.weights.server_http import Gone, Http
from agenttrain_sglang.weights.shapes import shapes_of
from agenttrain_sglang.weights.tensor import TensorTransport

Name = Literal["group", "tensor", "disk"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the trainer's side says of itself."""

    device: str = "cpu"
    """"cpu" or "cuda"."""
    n_gpus: int = field(default_factory=torch.cuda.device_count)
    """That this side sees: one alone is the server's too where it is on this machine, and NCCL makes no group of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way that weights take."""

    name: Name
    backend: Literal["gloo", "nccl"]
    """Of a process group."""
    dtype: Any
    """torch dtype they travel in. None: each its own, where the server doesn't say what it wants."""
    n_ranks: int
    """The server's tensor-parallel size."""
    is_0_5_12: bool = False
    """The server is of that version."""
    can_prove: bool
    """The server's checksums can be computed on this side too (`proof`)."""
    why: str
    """One sentence for users."""


def choose(
    settings: SglangTable,
    facts: Mapping[str, Any],
    *,
    address: str,
    trainer: Trainer | None = None,
) -> Choice:
    """Choose a way, or refuse the one that was asked for.

    Args:
        facts: /server_info and /model_info of the server: version, device, dtype, tp_size, dp_size.
        address: the server's.
        trainer: this side. None: on the CPU.

    Raises:
        EngineError: settings.transport can't work here; it says what would.
    """
    trainer = trainer or Trainer()
    is_here = is_this_machine(address)
    obstacles = _obstacles(settings, facts, is_here=is_here)
    name = _name(settings, obstacles, is_here=is_here)
    backend = _backend(trainer, facts, is_here=is_here)
    dtype = DTYPES.get(str(facts.get("dtype")).removeprefix("torch."))
    n_ranks = int(facts.get("tp_size") or 1)
    return Choice(
        name=name,
        backend=backend,
        dtype=dtype,
        n_ranks=n_ranks,
        is_0_5_12=facts.get("version") == sglang_0_5_12.VERSION,
        can_prove=facts.get("device") == "cpu" and n_ranks == 1 and dtype is not None,
        why=_sentence(name, backend, dtype, settings, is_here=is_here),
    )


def open_link(choice: Choice, *, address: str, timeout_s: float, model_folder: str | Path | None = None) -> Link:
    """A link to one incarnation of a server.

    Args:
        timeout_s: for each bucket, or for all of them by file.
        model_folder: where the server's model lies, as seen from here. None, or unreadable: names and shapes are not
            checked before they travel.
    """
    http = Http(address, timeout_s=timeout_s)
    transport: Transport
    if choice.name == "group":
        transport = GroupTransport(http, n_ranks=choice.n_ranks, backend=choice.backend)
    elif choice.name == "tensor":
        transport = TensorTransport(http, n_ranks=choice.n_ranks)
    else:
        transport = DiskTransport(http)
    shapes = shapes_of(model_folder) if model_folder is not None else None
    return Link(http, transport, is_0_5_12=choice.is_0_5_12, shapes=shapes, can_prove=choice.can_prove)


def is_this_machine(address: str) -> bool:
    """Whether a server's address is one of this machine's own."""
    host = Http(address, timeout_s=1.0).host
    try:
        seen = address_seen_from(host)
        return seen in {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (Gone, OSError):
        return False


def _obstacles(settings: SglangTable, facts: Mapping[str, Any], *, is_here: bool) -> dict[Name, str]:
    """Way to what keeps it from working; those that work are not listed."""
    obstacles: dict[Name, str] = {}
    if int(facts.get("dp_size") or 1) > 1:
        data_parallel = f"the server has {facts['dp_size']} data-parallel copies, which take weights from files only"
        obstacles |= {"group": data_parallel, "tensor": data_parallel}
    folder = settings.shared_folder
    if folder is None and not is_here:
        obstacles["disk"] = "the server is on another machine, and sglang.shared_folder names no folder that both see"
    elif folder is not None and not _is_writable(Path(folder)):
        obstacles["disk"] = f"sglang.shared_folder = {folder!r} can't be written here"
    return obstacles


def _name(settings: SglangTable, obstacles: Mapping[Name, str], *, is_here: bool) -> Name:
    order: tuple[Name, ...] = ("group", "tensor", "disk") if is_here else ("disk", "tensor", "group")
    possible = [name for name in order if name not in obstacles]
    asked = settings.transport
    if asked == "auto":
        if possible:
            return possible[0]
        raise EngineError(f"No way for weights into the server: {'; '.join(obstacles.values())}.")
    if asked in obstacles:
        would = " or ".join(f'"{name}"' for name in possible) or "none"
        raise EngineError(f'sglang.transport = "{asked}" can\'t work: {obstacles[asked]}. What would work: {would}.')
    return asked


def _backend(trainer: Trainer, facts: Mapping[str, Any], *, is_here: bool) -> Literal["gloo", "nccl"]:
    both = trainer.device == "cuda" and str(facts.get("device", "cuda")).startswith("cuda")
    return "nccl" if both and (trainer.n_gpus > 1 or not is_here) else "gloo"


def _sentence(name: Name, backend: str, dtype: Any, settings: SglangTable, *, is_here: bool) -> str:
    where = "both sides on this machine" if is_here else "the server on another machine"
    way = {
        "group": f"by process group ({backend})",
        "tensor": "in the request's body",
        "disk": f"by files in {settings.shared_folder}" if settings.shared_folder else "by files",
    }[name]
    kind = "as they are" if dtype is None else f"in {str(dtype).removeprefix('torch.')}"
    return f"weights travel {way}: {where}, {kind}, in buckets of {settings.bucket_mib} MiB"


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
