"""What `agenttrain export` writes, in the real server: same greedy tokens and log probabilities on the fixed set."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agenttrain.export.exporting import Wanted, export_policy
from agenttrain.export.policy_source import find_policy
from agenttrain.plugins import Plugins
from agenttrain.promotion.fixed_set import read_fixed_set
from agenttrain.testing import toy_project

from agenttrain_sglang.server import ServerProcess

pytestmark = pytest.mark.sglang
SERVER = {"sglang": {"max_running": 32, "cache_tokens": 16384}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter: its policy can be exported in both forms."""
    project = toy_project(tmp_path_factory.mktemp("export"), n_tasks=12)
    return project.fit(trainer={"adapter": "lora", "lora_rank": 4, "learning_rate": 0.1}).folder.path


def wanted(**how: Any) -> Wanted:
    return Wanted(plugins=Plugins.load(only=None), flags=SERVER, **how)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_an_exported_policy_answers_as_it_was_measured(trained: Path, tmp_path: Path, form: Any) -> None:
    """An adapter beside its base too, as it is loaded where it is trained."""
    source = find_policy(str(trained), runs=tmp_path)
    done = export_policy(source, tmp_path / "out", wanted=wanted(form=form, engine="sglang"))
    assert done.faults == ()
    by_transformers, by_sglang = done.fixed.agreements
    assert (by_transformers["by"], by_sglang["by"]) == ("transformers", "sglang")
    assert (by_sglang["n_turns"], by_sglang["n_same_turns"], by_sglang["n_near_ties"]) == (4, 4, 0)
    assert by_sglang["max_gap"] < 1e-4


@pytest.mark.long
def test_the_line_of_the_card_serves_an_adapter(
    trained: Path, tmp_path: Path, launch_small: Callable[..., Any], until_healthy: Callable[..., None]
) -> None:
    """A server that nobody of ours pushes anything to reads the folder by itself; the base alone answers otherwise."""
    folder = tmp_path / "out"
    source = find_policy(str(trained), runs=tmp_path)
    assert not export_policy(source, folder, wanted=wanted(form="adapter")).faults
    card = (folder / "README.md").read_text()
    assert f"--model-path {source.base} --dtype float32 --enable-lora --lora-paths policy=FOLDER" in card
    launch = launch_small(Path(source.base))
    more = ("--enable-lora", "--lora-paths", f"policy={folder}", "--lora-backend", "torch_native")
    process = ServerProcess(replace(launch, command=(*launch.command, *more)), log=tmp_path / "server.log")
    try:
        until_healthy(process)
        turns = read_fixed_set(folder).turns
        with_it = [asked(process.address, turn.prompt_ids, len(turn.response_ids), "policy") for turn in turns]
        without = [asked(process.address, turn.prompt_ids, len(turn.response_ids), None) for turn in turns]
    finally:
        process.kill()
    assert [ids for ids, _ in with_it] == [turn.response_ids for turn in turns]
    gaps = [
        abs(a - b)
        for turn, (_, seen) in zip(turns, with_it, strict=True)
        for a, b in zip(turn.logprobs, seen, strict=True)
    ]
    assert max(gaps) < 1e-4
    assert [ids for ids, _ in without] != [turn.response_ids for turn in turns]


def asked(address: str, prompt_ids: Any, n: int, adapter: str | None) -> tuple[tuple[int, ...], list[float]]:
    """Greedy ids and their log probabilities."""
    sampling = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "lora_path": adapter}
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    return tuple(told["output_ids"]), [entry[0] for entry in told["meta_info"]["output_token_logprobs"]]
