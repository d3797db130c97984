"""Modes, algorithms and what else a run can be made of: each a tiny run of the order desk on the real veRL trainer.

What a first step of a mode or algorithm comes to is held against the local trainer, which has the same rollouts then.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from agenttrain.records import Turn
from transformers import AutoModelForCausalLM

from agenttrain_verl.exporting import joined, read_shards

sys.path.insert(0, str(Path(__file__).parent))

from test_training import GRAPH, Run, fit

pytestmark = pytest.mark.long

TINY: dict[str, Any] = {
    "trainer.steps": 1,
    "trainer.tasks_per_step": 6,
    "trainer.group_size": 4,
    "trainer.warmup_steps": 0,
    "trainer.final_learning_rate": 1.0,
    "eval.tasks": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}
TEMPERATURE = 0.9
"""Of the order desk's training rollouts."""


def arguments(settings: Mapping[str, Any], *, graph: Path = GRAPH, trainer: str = "verl") -> list[str]:
    sets = [part for key, value in {**TINY, **settings}.items() for part in ("--set", f"{key}={value}")]
    return [str(graph), "--trainer", trainer, "--seed", "1", *sets]


def check(run: Run, *, max_staleness: int = 0) -> None:
    """What every run keeps to."""
    tokens, gap = run.report["tokens"], run.report["logprob_gap"]
    assert tokens["drifted"] == 0
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert gap["max"] < 1e-3
    assert [step["step"] for step in run.steps] == list(range(1, len(run.steps) + 1))
    for step in run.steps:
        assert step["weight_version"] == step["step"]
        assert step["staleness_max"] <= max_staleness
        assert step["rollouts"] == TINY["trainer.tasks_per_step"] * TINY["trainer.group_size"]
        assert step["updates"] == 2
        assert all(math.isfinite(step[name]) for name in ("loss", "grad_norm", "reward", "learning_rate"))
    check_rollouts(run)


def check_rollouts(run: Run) -> None:
    """Evaluations at weights that stood, and no rollout that is not accounted for."""
    store = run.store
    assert not list(store.unfinished())
    for rollout in store.rollouts():
        if rollout.phase != "train":
            seen = {version for turn in store.turns(rollout.id) for version in turn.weight_versions}
            assert seen == {0 if rollout.phase == "baseline" else len(run.steps)}
    ends = [r for r in store.rollouts() if r.phase == "train" and r.status not in ("aborted", "environment_failure")]
    places = Counter((r.step, r.task_id, r.sibling) for r in ends)
    assert len(places) == sum(step["rollouts"] for step in run.steps)


# ── one step, held against the local trainer ─────────────────────────────────────────────────────────────────────────

SAME = ("loss", "grad_norm", "reward", "nll", "rollouts_trained", "tokens_trained", "learning_rate", "updates")


def same_as_local(settings: Mapping[str, Any], where: Path, *, graph: Path = GRAPH) -> None:
    """A step on veRL comes to what it comes to on the local trainer."""
    (there, here) = (where / "verl", where / "local")
    there.mkdir()
    here.mkdir()
    verl = fit(there, *arguments(settings, graph=graph))
    local = fit(here, *arguments({k: v for k, v in settings.items() if "verl" not in k}, graph=graph, trainer="local"))
    check(verl)
    found, expected = ({name: run.steps[0][name] for name in SAME} for run in (verl, local))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "gspo"])
def test_an_algorithm_is_the_local_trainers(algorithm: str, tmp_path: Path) -> None:
    """Loss and gradient of the same rollouts."""
    same_as_local({"trainer.algorithm": algorithm}, tmp_path)


def test_two_ranks_come_to_what_one_comes_to(tmp_path: Path) -> None:
    """FSDP2 over gloo, with an engine each."""
    same_as_local({"verl.ranks_per_node": 2}, tmp_path)


ESTIMATOR = '''

from agenttrain import hookimpl


def half(rewards):
    """Half of what is above the mean."""
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / 2 for reward in rewards]


@hookimpl
def agenttrain_register_advantages(register):
    register("half", half)
'''


def test_a_plugins_estimator_is_asked(tmp_path: Path) -> None:
    """One that graph.py registers."""
    desk = tmp_path / "desk"
    shutil.copytree(GRAPH.parent, desk, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (desk / "graph.py").write_text(GRAPH.read_text() + ESTIMATOR)
    same_as_local({"trainer.advantage": "half"}, tmp_path, graph=desk / "graph.py")


# ── a critic, an adapter ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_critic_learns(tmp_path: Path) -> None:
    """PPO: its first step is the critic's alone where that is asked for."""
    run = fit(
        tmp_path,
        *arguments({"trainer.algorithm": "ppo", "trainer.steps": 2, "trainer.critic_warmup_steps": 0}),
    )
    check(run)
    for step in run.steps:
        assert math.isfinite(step["value_loss"])
        assert step["value_explained"] <= 1
    assert run.steps[1]["value_loss"] < run.steps[0]["value_loss"]
    assert list(run.folder.glob("checkpoints/global_step_2/critic/model_world_size_*"))


def test_an_adapter_is_trained_against_a_reference(tmp_path: Path) -> None:
    """LoRA with a distance to the base, weights that correct for the engine, a wider clip above; killed and resumed."""
    settings = {
        "trainer.steps": 2,
        "trainer.adapter": "lora",
        "trainer.lora_rank": 4,
        "trainer.kl_coefficient": 0.01,
        "trainer.clip_high": 0.28,
        "trainer.importance_cap": 2.0,
        "trainer.learning_rate": 5e-3,
    }
    folder = killed_after(1, tmp_path, arguments(settings))
    run = fit(tmp_path, "--resume", folder.name)
    check(run)
    first, second = run.steps
    assert (first["life"], second["life"]) == (0, 1)
    assert first["kl_mean"] == pytest.approx(0, abs=1e-7)
    assert second["kl_mean"] > 1e-6
    assert second["importance_mean"] == pytest.approx(1, abs=1e-3)
    assert run.report["model"]["trained_parameters"] == 38_912
    assert run.report["model"]["adapter"]["rank"] == 4
    assert (run.folder / "policy" / "adapter" / "adapter_model.safetensors").is_file()
    assert moved(run) > 0


def moved(run: Run) -> float:
    """How far the exported weights are from the base's."""
    (base, now) = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (GRAPH.parent / "policy", run.folder / "policy")
    )
    return max(float((now[name] - base[name]).abs().max()) for name in base)


# ── asynchronous modes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_rollouts_go_on_over_a_push_of_weights(tmp_path: Path) -> None:
    """Colocated: they are broken off while an update is made; each token keeps the weights that sampled it."""
    settings = {"verl.mode": "colocate_async", "trainer.steps": 3, "verl.correction": "token"}
    run = fit(tmp_path, *arguments({**settings, "trainer.importance_cap": 2.0, "trainer.clip_high": 0.28}))
    check(run, max_staleness=1)
    assert [step["staleness_max"] for step in run.steps] == [0, 1, 1]
    assert all(step["importance_mean"] != 1 for step in run.steps[1:])
    mixed = list(mixed_turns(run))
    assert mixed
    models = [weights_of(run, version) for version in range(3)]
    for turn in mixed[:8]:
        by_version = [logprobs(model, turn) for model in models]
        expected = [by_version[version][at] for at, version in enumerate(turn.weight_versions)]
        assert turn.response_logprobs == pytest.approx(expected, abs=1e-4)


def mixed_turns(run: Run) -> Iterator[Turn]:
    """Those whose tokens come from more than one version of the weights."""
    store = run.store
    for rollout in store.rollouts():
        yield from (turn for turn in store.turns(rollout.id) if len(set(turn.weight_versions)) > 1)


def weights_of(run: Run, version: int) -> Any:
    """The policy as it was at a version."""
    model = AutoModelForCausalLM.from_pretrained(GRAPH.parent / "policy", dtype=torch.float32).eval()
    if version:
        model.load_state_dict(joined(read_shards(run.folder / "checkpoints" / f"global_step_{version}" / "actor")))
    return model


def logprobs(model: Any, turn: Turn) -> list[float]:
    """[T] of the response's ids."""
    ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1] / TEMPERATURE
    at = logits.log_softmax(-1).gather(1, torch.tensor(turn.response_ids)[:, None])
    return [float(value) for value in at[:, 0]]


def test_a_killed_run_of_separate_replicas_goes_on(tmp_path: Path) -> None:
    """Two steps ahead, with weights over whole rollouts; what was under way is made again, and trained once."""
    settings = {
        "verl.mode": "separate_async",
        "verl.max_staleness": 2,
        "trainer.steps": 4,
        "verl.correction": "sequence",
        "trainer.importance_cap": 2.0,
    }
    folder = killed_after(2, tmp_path, arguments(settings))
    run = fit(tmp_path, "--resume", folder.name)
    check(run, max_staleness=2)
    assert run.steps[0]["staleness_max"] == 0
    assert run.steps[3]["staleness_max"] >= 1
    assert [step["life"] for step in run.steps] == [0, 0, 1, 1]
    assert run.steps[2]["staleness_max"] >= 1  # what the first life had begun for it was gone on with


def killed_after(n_steps: int, cwd: Path, settings: list[str]) -> Path:
    """The folder of a run whose process was killed once so many checkpoints stood."""
    command, printed = [sys.executable, "-m", "agenttrain", "fit", *settings], cwd / "printed"
    with printed.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, env=dict(os.environ), stderr=file)
        try:
            while process.poll() is None and not list(cwd.glob(f"runs/*/checkpoints/step-{n_steps:05d}")):
                time.sleep(0.02)
            assert process.poll() is None, printed.read_text()[-4000:]
        finally:
            process.kill()
            process.wait()
    (folder,) = (cwd / "runs").iterdir()
    return folder
