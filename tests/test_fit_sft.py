"""Whole runs of `fit --trainer sft`: its plan, a killed one that goes on, and the order desk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
GRAPH = """
import itertools, os, signal
N = itertools.count(1)

def solved(task, state):
    if os.environ.get("KILL_AT") == str(next(N)):
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(map(ord, repr(state["messages"][-1].content))) % 2 == 0

builder.add_node("agent", agent)
builder.set_entry_point("agent")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=solved)
"""
"""Half of all answers are right; dies at the n-th rollout that is scored."""
SFT = ("--trainer", "sft", "--set", "trainer.steps=3", "--set", "run.deterministic=true")
SFT += ("--set", "engine.concurrency=2", "--set", "engine.process=own", "--set", "trainer.learning_rate=1e-3")


def test_the_plan_names_it_and_what_it_would_not_read_is_refused(new_project: Any, command: Any) -> None:
    new_project(GRAPH, decorated="")
    planned = command("fit", "graph.py", *SFT, "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert planned.json["trainer"] == "sft"
    refused = command("fit", "graph.py", *SFT, "--set", "trainer.kl_coefficient=0.1", "--dry-run")
    assert refused.code == 2
    assert "trainer.kl_coefficient is 0.1, and trainer.name 'sft' would not read it" in " ".join(refused.err.split())


@pytest.mark.slow
def test_a_killed_run_goes_on_by_the_base_and_ends_in_equal_weights(new_project: Any, command: Any) -> None:
    """Killed in its third step: the second life samples from the base too, and publishes once."""
    project = new_project(GRAPH, decorated="")
    whole = command("fit", "graph.py", *SFT, "--json")
    assert whole.code == 0, whole.err
    weights = load_file(project.run.policy / "model.safetensors")
    project.run.path.rename(project.folder / "whole")
    line = [sys.executable, "-m", "agenttrain", "fit", "graph.py", *SFT, "--set", "checkpoint.every=1"]
    killed = subprocess.run(line, cwd=project.folder, env=os.environ | {"KILL_AT": "13"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    done = command("fit", "--resume", project.run.id, "--json")
    assert done.code == 0, done.err
    after = load_file(project.run.policy / "model.safetensors")
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert (done.json["lives"], done.json["learned_from"]) == (2, whole.json["learned_from"])
    tokens = done.json["tokens"]
    assert (tokens["drifted"], tokens["sampled"]) == (0, tokens["trained"] + tokens["dropped"])
    turns = [(r.rollout.phase, v) for r in project.store.results() for t in r.turns for v in t.weight_versions]
    assert {phase: {v for p, v in turns if p == phase} for phase in ("baseline", "train", "held_out")} == {
        "baseline": {0},
        "train": {0},
        "held_out": {3},
    }


@pytest.mark.long
def test_the_order_desk_gets_better_by_its_own_successes(tmp_path: Path) -> None:
    """A quarter of the run, and few held-out tasks: enough for an interval above 0."""
    command = [sys.executable, "-m", "agenttrain", "fit", str(EXAMPLE / "graph.py"), "--seed", "1", "--json"]
    command += ["--trainer", "sft", "--set", "trainer.steps=5", "--set", "eval.tasks=200"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["algorithm"] == "sft"
    assert report["difference"]["ci95"][0] > 0
    assert report["tokens"]["drifted"] == 0
    assert report["logprob_gap"]["max"] < 1e-3
    assert set(report["tokens"]["dropped_by_cause"]) == {"not a success"}
