"""Does the example get better, whatever the seed, and does a fresh set of tasks agree?

    python benchmarks/improvement.py [--seeds 1 2 3] [--fresh 500]

For each seed, in a folder of its own and by the command line: `agenttrain fit` with its wall time; then the base and
the trained policy on tasks that no run has seen; then `policy/` in plain transformers, whose greedy tokens must be
those of the recorded turns. Prints one JSON object; exits 1 when a run misses what the README promises.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
N_TURNS = 60
"""Recorded turns that plain transformers samples again."""


def agenttrain(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON object that a command prints."""
    command = [sys.executable, "-m", "agenttrain", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def fresh_tasks(folder: Path, n: int) -> Path:
    """Held-out tasks of a seed that nothing else uses."""
    made = [sys.executable, str(EXAMPLE / "tasks.py"), "--seed", "99", "--split", "held_out", "--n", str(n)]
    path = folder / "fresh.jsonl"
    path.write_text(subprocess.run(made, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return path


def equal_turns(run: Path) -> tuple[int, int]:
    """(turns whose greedy tokens plain transformers gives again, turns tried), of a run's last evaluation."""
    import torch
    from transformers import AutoModelForCausalLM

    from agenttrain.capture.store import read_store

    model = AutoModelForCausalLM.from_pretrained(run / "policy", dtype=torch.float32).eval()
    view, equal, tried = read_store(run / "rollouts"), 0, 0
    for rollout in view.rollouts():
        if rollout.phase != "held_out" or tried >= N_TURNS:
            continue
        for turn in view.turns(rollout.id):
            ids = torch.tensor([turn.prompt_ids])
            n = len(turn.response_ids)
            with torch.inference_mode():
                out = model.generate(ids, do_sample=False, max_new_tokens=n, pad_token_id=0)
            equal += tuple(out[0, ids.shape[1] :].tolist()) == turn.response_ids
            tried += 1
    return equal, tried


def run_seed(seed: int, tasks: Path, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    report = agenttrain(folder, "fit", str(EXAMPLE / "graph.py"), "--seed", str(seed))
    wall_s = time.perf_counter() - began
    base, trained = (
        agenttrain(folder, "eval", str(EXAMPLE / "graph.py"), "--run", run, "--tasks", str(tasks))
        for run in ("base", report["run_id"])
    )
    equal, tried = equal_turns(folder / "runs" / report["run_id"])
    return {
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "steps": report["steps"],
        "held_out": report["tasks"]["held_out"],
        "baseline": report["baseline"]["success"],
        "trained": report["trained"]["success"],
        "ci95": report["difference"]["ci95"],
        "drifted": report["tokens"]["drifted"],
        "logprob_gap_max": report["logprob_gap"]["max"],
        "fresh_base": base["success"],
        "fresh_trained": trained["success"],
        "equal_turns": [equal, tried],
        "alarms": [alarm["code"] for alarm in report["alarms"]],
    }


def misses(row: dict[str, Any]) -> list[str]:
    """What a run should have shown and didn't; wall time is told, not judged: machines are noisy."""
    gain, fresh_gain = row["trained"] - row["baseline"], row["fresh_trained"] - row["fresh_base"]
    checks = {
        "at least 16 steps": row["steps"] >= 16,
        "at least 400 held-out tasks": row["held_out"] >= 400,
        "baseline in 0.55 to 0.70": 0.55 <= row["baseline"] <= 0.70,
        "interval above 0.10": row["ci95"][0] > 0.10,
        "no token drifted": row["drifted"] == 0,
        "log probabilities within 1e-3": row["logprob_gap_max"] < 1e-3,
        "fresh tasks agree within 0.08": abs(gain - fresh_gain) < 0.08,
        "plain transformers gives the same greedy tokens": row["equal_turns"][0] == row["equal_turns"][1],
    }
    return [name for name, holds in checks.items() if not holds]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--fresh", type=int, default=500)
    chosen = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        tasks = fresh_tasks(Path(name), chosen.fresh)
        for seed in chosen.seeds:
            row = run_seed(seed, tasks, Path(name))
            rows.append({**row, "misses": misses(row)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"runs": rows}))
    return int(any(row["misses"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
