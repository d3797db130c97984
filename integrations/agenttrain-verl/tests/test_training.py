"""The order desk on the real veRL trainer and Ray: a whole run as a user makes it, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agenttrain.capture.store import StoreView, read_store
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.verl

GRAPH = Path(__file__).parents[3] / "examples" / "order-desk" / "graph.py"
MARK = "STARTED_BY_TEST_TRAINING"
"""A variable that all processes of a run inherit: the folder that it was started in."""
STEPS = 2
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.tasks_per_step": 8,
    "trainer.group_size": 4,
    "trainer.minibatches": 2,
    "eval.tasks": 16,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A fit that has ended."""

    folder: Path
    report: dict[str, Any]
    printed: str
    """On standard error."""

    @property
    def store(self) -> StoreView:
        return read_store(self.folder / "rollouts")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def fit(cwd: Path, *arguments: str) -> Run:
    """`agenttrain fit … --json` in a process of its own."""
    command = [sys.executable, "-m", "agenttrain", "fit", *arguments, "--json"]
    variables = {**os.environ, "COLUMNS": "200", MARK: str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    return Run(folder=cwd / "runs" / report["run_id"], report=report, printed=done.stderr)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of 32 rollouts."""
    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return fit(tmp_path_factory.mktemp("run"), str(GRAPH), "--trainer", "verl", "--seed", "3", *sets)


def test_the_report_says_who_trained(run: Run) -> None:
    """As with the local trainer, by name."""
    assert (run.report["trainer"], run.report["engine"]) == ("verl", "local")
    assert run.report["seeds"] == "per token"
    assert run.report["steps"] == STEPS


def test_what_was_trained_is_what_was_sampled(run: Run) -> None:
    """Read back from veRL, and held against the stored turns."""
    tokens = run.report["tokens"]
    assert tokens["drifted"] == 0
    assert tokens["trained"] > 0
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert run.report["logprob_gap"]["max"] < 1e-3


def test_every_place_of_the_run_has_its_rollout(run: Run) -> None:
    """32 a step and 16 before and after, none of them twice."""
    phases = [(rollout.phase, rollout.step) for rollout in run.store.rollouts()]
    assert {phase: phases.count(phase) for phase in sorted(set(phases))} == {
        ("baseline", 0): 16,
        ("held_out", 0): 16,
        ("train", 1): 32,
        ("train", 2): 32,
    }


def test_the_rollouts_of_the_first_step_are_those_of_the_local_trainer(run: Run, tmp_path: Path) -> None:
    """The same tasks in the same order, and with a seed for each token the same tokens."""
    few = {**SETTINGS, "trainer.steps": 1, "eval.tasks": 2}
    sets = [part for key, value in few.items() for part in ("--set", f"{key}={value}")]
    local = fit(tmp_path, str(GRAPH), "--seed", "3", *sets)

    def first(of: Run) -> dict[str, list[tuple[int, ...]]]:
        ids = [rollout.id for rollout in of.store.rollouts() if (rollout.phase, rollout.step) == ("train", 1)]
        return {id: [turn.response_ids for turn in of.store.turns(id)] for id in ids}

    assert first(run) == first(local)


def test_verls_own_logger_has_the_same_steps(run: Run) -> None:
    """Its metrics file, and ours."""
    lines = [json.loads(line) for line in (run.folder / "verl" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step["step"] for step in run.steps] == [1, 2]
    for line, step in zip(lines, run.steps, strict=True):
        assert line["data"]["actor/grad_norm"] == pytest.approx(step["grad_norm"])
        assert step["weight_version"] == step["step"]
        assert step["updates"] == 2


def test_verls_own_checkpoint_is_found_by_its_name(run: Run) -> None:
    """After the run has ended, for each checkpoint that is kept."""
    for step in (1, 2):
        assert list(run.folder.glob(f"checkpoints/global_step_{step}/actor/model_world_size_*"))
        assert list(run.folder.glob(f"checkpoints/global_step_{step}/data.pt"))


def test_the_policy_is_the_one_that_was_served(run: Run) -> None:
    """Plain transformers on the exported folder samples greedily what the replicas did after the last step."""
    model = AutoModelForCausalLM.from_pretrained(run.folder / "policy", dtype=torch.float32).eval()
    AutoTokenizer.from_pretrained(run.folder / "policy")
    checked = 0
    for rollout in run.store.rollouts():
        if rollout.phase == "held_out":
            turn = run.store.turns(rollout.id)[0]
            ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
            with torch.no_grad():
                greedy = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].argmax(-1)
            assert tuple(greedy.tolist()) == turn.response_ids
            checked += 1
    assert checked == 16


def test_standard_error_holds_progress_and_nothing_of_upstreams(run: Run) -> None:
    """One line a step, and no warning of Ray's or veRL's."""
    lines = [line for line in run.printed.splitlines() if line.strip()]
    assert sum(line.startswith("step ") for line in lines) == STEPS
    assert not [line for line in lines if "Warning" in line or "WARNING" in line or "ray" in line.lower()], lines


def test_nothing_of_it_is_left_running(run: Run) -> None:
    """No process has the run's environment: Ray's, its actors' and what they started."""
    started_in = str(run.folder.parents[1])
    _, left = psutil.wait_procs([p for p in psutil.process_iter() if mark_of(p) == started_in], timeout=10)
    assert left == []


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None
