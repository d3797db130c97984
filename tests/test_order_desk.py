"""The example is what its README says: its files are reproducible, its splits apart, and it gets better."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agenttrain.capture.answers import prompt_ids_of
from agenttrain.capture.conversations import hashed
from agenttrain.capture.render import open_renderer
from agenttrain.records import ModelCall

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"


def made(split: str, n: int) -> str:
    command = [sys.executable, "tasks.py", "--split", split, "--seed", "1", "--n", str(n)]
    return subprocess.run(command, cwd=EXAMPLE, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_tasks_are_what_the_script_prints() -> None:
    """tasks.jsonl is the output of the two commands that the example's README gives."""
    assert (EXAMPLE / "tasks.jsonl").read_text() == made("train", 1000) + made("held_out", 500)


def test_splits_share_no_order_and_no_item() -> None:
    """No order id, merged id or item of a held-out task stands in a training task."""
    rows = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
    seen: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for row in rows:
        world = row["context"]
        seen[row["split"]] |= {world["order"], world["item"], world["merged"] or world["order"]}
    assert len(rows) == 1500
    assert not seen["train"] & seen["held_out"]


def test_nothing_is_added_to_the_desks_prompts() -> None:
    """It forces no tool and asks for no form, so its prompts are those that its policy was made with."""
    renderer = open_renderer(str(EXAMPLE / "policy"), family="default")
    messages = ({"role": "system", "content": "You are the desk."}, {"role": "user", "content": "Price of B1?"})
    tool = {"type": "function", "function": {"name": "calc", "description": "Sum.", "parameters": {"properties": {}}}}
    call = ModelCall(messages=messages, tools=(tool,))
    ids, _ = prompt_ids_of(renderer, call, hashed(call), None)
    assert renderer.decode(ids) == (
        "<|im_start|>system\nYou are the desk.\n<tools>\ncalc(): Sum.\n</tools><|im_end|>\n"
        "<|im_start|>user\nPrice of B1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_half_a_run_gets_better(tmp_path: Path) -> None:
    """8 of 16 steps by the command line: a baseline in the middle, an interval above 0, no token drifted."""
    command = [sys.executable, "-m", "agenttrain", "fit", str(EXAMPLE / "graph.py"), "--seed", "1", "--json"]
    command += ["--set", "trainer.steps=8", "--set", "eval.tasks=400"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    assert 0.55 <= report["baseline"]["success"] <= 0.70
    assert report["difference"]["ci95"][0] > 0.05
    assert report["tokens"]["drifted"] == 0
    assert report["logprob_gap"]["max"] < 1e-3
    assert (tmp_path / "runs" / report["run_id"] / "policy" / "model.safetensors").is_file()
