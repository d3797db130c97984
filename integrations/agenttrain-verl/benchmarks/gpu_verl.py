"""veRL with SGLang on the order desk, on a GPU, in one go of at most ten minutes. Not run on a GPU.

    python integrations/agenttrain-verl/benchmarks/gpu_verl.py --environment FOLDER [--steps 8] [--seconds 580]
    python integrations/agenttrain-verl/benchmarks/gpu_verl.py --smoke

Needs no network: the graph and its policy are in the repository, and FOLDER is a SGLang environment for CUDA that is
there already. `--smoke` does the same in one step on the CPU, with the environment of `agenttrain sglang setup`, in a
few minutes: it shows that the script works, and its figures mean nothing.

Parts, each a whole `agenttrain fit --trainer verl` with a time limit of its own, in the order of what they tell:

- servers: `--engine sglang`: veRL trains in bfloat16, SGLang's servers answer from an environment of their own.
- stock: `verl.rollout = "stock"`, veRL's own SGLang; left out where this environment has no SGLang.
- local: the local engine in a replica, which needs no SGLang at all.

Of each is told what the run's report says (difference, tokens, gap of log probabilities, seconds) and by step, and
which of these do not hold: every sampled token is trained, frozen or dropped; none drifted; the mean gap is below 0.05
(1e-3 in the smoke, which is in float32); held-out rollouts were sampled by the last weights; veRL's checkpoint and the
exported policy are there. Prints one JSON object; exits 1 when something does not hold, or a part did not end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from agenttrain.capture.store import read_store

DESK = Path(__file__).parents[3] / "examples" / "order-desk"
LIMITS_S = {"servers": 300.0, "stock": 240.0, "local": 180.0}
"""Of each part, in the order in which they run."""
LARGEST_GAP = {"bfloat16": 0.05, "float32": 1e-3}
"""Mean over the trained tokens."""
SMOKE_TAKES = 2.0
"""Times that: two CPU cores may have other things to do."""
ENDS_IN_S = 15.0
"""For a run that was told to end; its Ray is ended by its guard."""
SIZES = {"tasks_per_step": 16, "group_size": 8, "minibatches": 2}
SMALL = {"tasks_per_step": 3, "group_size": 4, "minibatches": 2}


def settings_of(part: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Keys of the configuration, as `--set` takes them."""
    sizes = SMALL if chosen.smoke else SIZES
    settings: dict[str, Any] = {f"trainer.{key}": value for key, value in sizes.items()}
    settings |= {"trainer.steps": chosen.steps, "eval.tasks": 4 if chosen.smoke else 200}
    settings |= {"verl.device": "cpu" if chosen.smoke else "cuda", "verl.ranks_per_node": 1}
    if part == "servers":
        settings |= {"engine.name": "sglang", "sglang.device": "cpu" if chosen.smoke else "cuda"}
        if chosen.environment is not None:
            settings["sglang.environment"] = str(chosen.environment)
        if not chosen.smoke:  # the trainer has the same GPU
            settings |= {"sglang.dtype": "bfloat16", "sglang.arguments": ["--mem-fraction-static", "0.4"]}
    if part == "stock":
        settings["verl.rollout"] = "stock"
        settings["verl.overrides.actor_rollout_ref.rollout.gpu_memory_utilization"] = 0.4
        settings["verl.overrides.actor_rollout_ref.model.override_config.attn_implementation"] = "sdpa"
    return settings


def command_of(settings: Mapping[str, Any]) -> list[str]:
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    fit = [sys.executable, "-m", "agenttrain", "fit", str(DESK / "graph.py"), "--trainer", "verl", "--seed", "1"]
    return [*fit, "--json", *sets]


def found_by(part: str, chosen: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any]:
    """What a part's run came to, from a process that is ended when its time is up."""
    if reason := missing(part, chosen):
        return {"left_out": reason}
    if limit_s < 30:
        return {"error": "no time was left"}
    folder.mkdir()
    began = time.perf_counter()
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command_of(settings_of(part, chosen)), cwd=folder, stdout=subprocess.PIPE, stderr=errors
        )
        output, error = ended(process, limit_s)
    found: dict[str, Any] = {"part_s": time.perf_counter() - began}
    if error is not None or process.returncode:
        why = error or f"ended with {process.returncode}"
        return {**found, "error": f"{why}: {(folder / 'stderr').read_text(errors='replace')[-2000:]}"}
    report = json.loads(output)
    run = folder / "runs" / report["run_id"]
    return found | told(report, run) | {"does_not_hold": broken(report, run, chosen)}


def missing(part: str, chosen: argparse.Namespace) -> str | None:
    """Why a part can't be run here."""
    if part != "stock":
        return None
    if chosen.smoke:
        return "veRL's own SGLang runs on GPUs alone"
    return None if importlib.util.find_spec("sglang") else "this environment has no SGLang (docs/stock.md)"


def ended(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, str | None]:
    """Its output, and what had to be done to end it."""
    try:
        return process.communicate(timeout=limit_s)[0], None
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=ENDS_IN_S)[0], f"took longer than {limit_s:.0f} s"
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"took longer than {limit_s:.0f} s, and was killed"


def told(report: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Of the report, what is looked at here."""
    keys = ("engine", "steps", "difference", "tokens", "logprob_gap", "wall_s", "seeds")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_a_step = ("wall_s", "rollout_s", "train_s", "sync_s", "tokens_per_s", "reward", "grad_norm")
    return {
        **{key: report.get(key) for key in keys},
        "by_step": {key: [row.get(key) for row in steps] for key in of_a_step},
    }


def broken(report: Mapping[str, Any], run: Path, chosen: argparse.Namespace) -> list[str]:
    """What ought to hold, and does not."""
    tokens, gap = report["tokens"], report["logprob_gap"]["mean"]
    largest = LARGEST_GAP["float32" if chosen.smoke else "bfloat16"]
    kept = tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    step = report["steps"]
    holds = {
        "every sampled token is accounted for": tokens["sampled"] == kept and tokens["trained"] > 0,
        "no token drifted": tokens["drifted"] == 0,
        f"the mean gap is below {largest}": gap < largest,
        "all steps were made": step == chosen.steps,
        "held-out rollouts are of the last weights": held_out_versions(run) == {step},
        "veRL's checkpoint is there": any(run.glob("checkpoints/global_step_*/actor/model_world_size_*")),
        "the policy is exported": (run / "policy" / "model.safetensors").is_file(),
    }
    return [what for what, does in holds.items() if not does]


def held_out_versions(run: Path) -> set[int]:
    store = read_store(run / "rollouts")
    held_out = [rollout.id for rollout in store.rollouts() if rollout.phase == "held_out"]
    return {version for id in held_out for turn in store.turns(id) for version in turn.weight_versions}


def is_whole(found: Mapping[str, Any]) -> bool:
    return "error" not in found and not found.get("does_not_hold")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--environment", type=Path, help="SGLang's virtual environment")
    options.add_argument("--steps", type=int, help="of each run; 8, or 1 in the smoke")
    options.add_argument("--seconds", type=float, default=580.0, help="for all parts together; twice that in the smoke")
    options.add_argument("--smoke", action="store_true", help="one step on the CPU")
    options.add_argument("--only", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    chosen = options.parse_args(arguments)
    chosen.steps = chosen.steps or (1 if chosen.smoke else 8)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    longer = SMOKE_TAKES if chosen.smoke else 1.0
    end = time.monotonic() + longer * chosen.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        found = {
            part: found_by(part, chosen, Path(name) / part, min(longer * limit_s, end - time.monotonic() - ENDS_IN_S))
            for part, limit_s in LIMITS_S.items()
            if part in chosen.only
        }
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(json.dumps({"smoke": chosen.smoke, "gpu": gpu, **found}))
    return int(not all(map(is_whole, found.values())))


if __name__ == "__main__":
    sys.exit(main())
