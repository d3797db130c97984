"""Which way weights take, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agenttrain.errors import EngineError

from agenttrain_sglang.settings import SglangTable
from agenttrain_sglang.weights import Tags, Trainer, choose

HERE, ELSEWHERE = "http://127.0.0.1:30000", "http://192.0.2.7:30000"
CPU = {"device": "cpu", "dtype": "float32", "tp_size": 1}
CUDA = {"device": "cuda", "dtype": "bfloat16", "tp_size": 4}


@pytest.mark.parametrize(
    ("settings", "address", "name"),
    [
        ({}, HERE, "group"),
        ({}, "http://localhost:30000", "group"),
        ({}, ELSEWHERE, "tensor"),
        ({"shared_folder": "."}, ELSEWHERE, "disk"),
        ({"shared_folder": "."}, HERE, "group"),
        ({"transport": "tensor"}, HERE, "tensor"),
        ({"transport": "disk"}, HERE, "disk"),
        ({"transport": "group"}, ELSEWHERE, "group"),
    ],
)
def test_the_way_follows_from_where_the_server_is(settings: dict[str, Any], address: str, name: str) -> None:
    """A group on one machine; files where a folder is shared, else the body, across two. What is asked for wins."""
    assert choose(SglangTable(**settings), CPU, address=address).name == name


def test_it_is_said_in_one_sentence() -> None:
    """The way, why, the dtype and the buckets."""
    assert choose(SglangTable(), CPU, address=HERE).why == (
        "weights travel by process group (gloo): both sides on this machine, in float32, in buckets of 256 MiB"
    )
    elsewhere = choose(SglangTable(bucket_mib=64), {**CUDA, "dtype": "auto"}, address=ELSEWHERE)
    assert elsewhere.why == (
        "weights travel in the request's body: the server on another machine, as they are, in buckets of 64 MiB"
    )


@pytest.mark.parametrize(
    ("trainer", "facts", "address", "backend"),
    [
        (Trainer(device="cuda", n_gpus=8), CUDA, HERE, "nccl"),
        (Trainer(device="cuda", n_gpus=1), CUDA, ELSEWHERE, "nccl"),
        (Trainer(device="cuda", n_gpus=1), CUDA, HERE, "gloo"),
        (Trainer(device="cpu"), CUDA, HERE, "gloo"),
        (Trainer(device="cuda", n_gpus=8), CPU, HERE, "gloo"),
    ],
)
def test_nccl_is_for_two_sides_with_gpus_of_their_own(
    trainer: Trainer, facts: dict[str, Any], address: str, backend: str
) -> None:
    """Else gloo."""
    settings = SglangTable(transport="group")
    assert choose(settings, facts, address=address, trainer=trainer).backend == backend


def test_only_servers_that_hash_as_we_can_are_asked_for_proof() -> None:
    """On the CPU, one rank, a dtype that is known."""
    assert choose(SglangTable(), CPU, address=HERE).can_prove
    for facts in ({**CPU, "tp_size": 2}, {**CPU, "dtype": "auto"}, CUDA):
        assert not choose(SglangTable(), facts, address=HERE).can_prove


@pytest.mark.parametrize(
    ("settings", "facts", "address", "message"),
    [
        (
            {"transport": "disk"},
            CPU,
            ELSEWHERE,
            "sglang.shared_folder names no folder that both see. What would work: ",
        ),
        ({"transport": "disk", "shared_folder": "/no/such"}, CPU, HERE, "'/no/such' can't be written here"),
        ({"transport": "group"}, {**CPU, "dp_size": 2}, HERE, '2 data-parallel copies.*What would work: "disk"'),
        ({}, {**CPU, "dp_size": 2}, ELSEWHERE, "No way for weights into the server: the server has 2"),
    ],
)
def test_a_way_that_can_not_work_is_refused_by_name(
    settings: dict[str, Any], facts: dict[str, Any], address: str, message: str
) -> None:
    """With what would."""
    with pytest.raises(EngineError, match=message):
        choose(SglangTable(**settings), facts, address=address)


def test_a_folder_that_servers_share_is_named(tmp_path: Path) -> None:
    """In the sentence."""
    settings = SglangTable(transport="disk", shared_folder=str(tmp_path))
    assert f"by files in {tmp_path}:" in choose(settings, CPU, address=ELSEWHERE).why


def test_weights_of_another_run_are_not_taken_for_ours() -> None:
    """Nor those that a server began with, though the number is the same."""
    ours, theirs = Tags(), Tags()
    assert ours.version(ours.of(12)) == 12
    for tag in (theirs.of(12), "default", "12", "agenttrain-spoiled", ours.of(1) + "x"):
        with pytest.raises(EngineError, match="push the weights of now to it"):
            ours.version(tag)
