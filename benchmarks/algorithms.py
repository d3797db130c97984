"""What does each algorithm reach on the order desk in a few steps?

    python benchmarks/algorithms.py [--only ppo gspo] [--steps 10] [--seed 1] [--parity PYTHON]

Each is a whole `fit` by the command's own code: 20 tasks × 8 rollouts a step, 200 held-out tasks before and after.
Results stand in docs/algorithms.json, and docs/algorithms.md shows them; what a call doesn't run keeps its last result.
`--parity` names a Python that has veRL (see benchmarks/parity.py), whose figures are taken again then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "order-desk"
RESULTS, PAGE = ROOT / "docs" / "algorithms.json", ROOT / "docs" / "algorithms.md"

TOLD = ("clip_fraction", "kl_mean", "importance_mean", "importance_capped", "value_explained", "value_loss")
"""Figures of each step that are kept where every step has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of training."""

    title: str
    settings: Mapping[str, Any]
    """Keys of `trainer`."""
    parity: Sequence[str] = field(default=())
    """Which figures of benchmarks/parity.py are of it."""


CASES = {
    "grpo": Case(title="GRPO", settings={}, parity=("grpo", "clipped loss")),
    "dr_grpo": Case(title="Dr. GRPO", settings={"algorithm": "dr_grpo"}, parity=("dr_grpo",)),
    "rloo": Case(title="RLOO", settings={"algorithm": "rloo"}, parity=("rloo",)),
    "gspo": Case(title="GSPO", settings={"algorithm": "gspo"}, parity=("gspo",)),
    "ppo": Case(title="PPO", settings={"algorithm": "ppo"}, parity=("gae", "value loss")),
    "grpo_k3": Case(title="GRPO, k3 in the loss", settings={"kl_coefficient": 0.02}, parity=("k3",)),
    "rloo_k1": Case(
        title="RLOO, k1 in the reward",
        settings={"algorithm": "rloo", "kl_coefficient": 0.05, "kl": "k1"},
        parity=("k1",),
    ),
    "grpo_tis": Case(title="GRPO, truncated importance", settings={"importance_cap": 2.0}, parity=("importance",)),
    "grpo_2_epochs": Case(title="GRPO, two epochs a step", settings={"epochs": 2}),
    "grpo_lora": Case(title="GRPO, LoRA", settings={"adapter": "lora", "learning_rate": 4e-3}),
}


def trained(case: Case, *, steps: int, seed: int) -> dict[str, Any]:
    """One run: what it reached, and its reward step by step."""
    from agenttrain.commands.progress import Progress
    from agenttrain.fit import fit
    from agenttrain.prepare import prepare
    from agenttrain.run_folder import new_run

    trainer = {"steps": steps, **case.settings}
    flags = {"seed": seed, "trainer": trainer, "eval": {"tasks": 200}}
    job = prepare(str(EXAMPLE / "graph.py"), cwd=Path.cwd(), flags=flags)
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "algorithms")
        report = fit(job, run, watcher=Progress(job))
        rows = run.metrics()
    settings = job.config.trainer
    return {
        "settings": {**case.settings, "learning_rate": settings.learning_rate},
        "reward": [round(row["reward"], 3) for row in rows],
        **{name: [round(row[name], 4) for row in rows] for name in TOLD if all(name in row for row in rows)},
        "before": report["baseline"]["success"],
        "after": report["trained"]["success"],
        "ci95": report["difference"]["ci95"],
        "seconds": round(report["wall_s"]["total"], 1),
        "seed": seed,
    }


def page(results: Mapping[str, Any]) -> str:
    """docs/algorithms.md."""
    runs, parity = results["runs"], results["parity"]
    known = [(CASES[name], runs[name]) for name in CASES if name in runs]
    width = max(len(run["reward"]) for _, run in known)
    lines = [
        "# Algorithms",
        "",
        "What `trainer.algorithm` and its companions do on the order desk (a policy of 0.87 M parameters, two CPU",
        "cores). Each row is one whole run with one seed: 20 tasks × 8 rollouts a step, 200 held-out tasks, greedy,",
        "before and after. Runs this short tell that an algorithm learns; they are no ranking: one interval is wider",
        "than most differences between rows. What each one is made of, with its source and an example worked by hand,",
        "stands in `agenttrain/trainer/algorithms.py`.",
        "",
        results.get("note", ""),
        "",
        "| | set over the example | largest difference from veRL 0.9.1 | reward, first to last step | success "
        "| 95 % interval of the difference | seconds |",
        "|---|---|---|---|---|---|---|",
        *(_row(case, run, parity) for case, run in known),
        "",
        *_critic(runs),
        "## Reward of each step",
        "",
        "| | " + " | ".join(str(n + 1) for n in range(width)) + " |",
        "|---|" + "---|" * width,
        *(_curve(case.title, run["reward"], width) for case, run in known),
        "",
        "## Held against veRL",
        "",
        "Largest difference of any number, on random batches in float64, between a function of this package and its",
        "counterpart in `verl.trainer.ppo.core_algos` 0.9.1. Where veRL divides by another standard deviation (n - 1",
        "instead of n) or adds 1e-6 to it, its result is put on the same footing first; benchmarks/parity.py says how.",
        "",
        "| what | cases | largest difference |",
        "|---|---|---|",
        *(f"| {name} | {each['cases']} | {each['difference']:.1e} |" for name, each in parity.items()),
    ]
    return "\n".join(line for n, line in enumerate(lines) if line or lines[n - 1]) + "\n"


def _critic(runs: Mapping[str, Any]) -> list[str]:
    told = runs.get("ppo", {}).get("value_explained")
    if not told:
        return []
    return [f"PPO's critic explained {told[-1]:.2f} of its returns' variance in the last step (0: the mean alone).", ""]


def _curve(title: str, rewards: Sequence[float], width: int) -> str:
    cells = [f"{reward:.2f}" for reward in rewards] + [""] * (width - len(rewards))
    return f"| {title} | " + " | ".join(cells) + " |"


def _row(case: Case, run: Mapping[str, Any], parity: Mapping[str, Any]) -> str:
    largest = [parity[name]["difference"] for name in case.parity if name in parity]
    low, high = run["ci95"]
    cells = [
        case.title,
        ", ".join(f"{key} = {value}" for key, value in run["settings"].items()),
        f"{max(largest):.1e}" if largest else "",
        f"{run['reward'][0]:.2f} → {run['reward'][-1]:.2f}",
        f"{run['before']:.3f} → {run['after']:.3f}",
        f"{low:+.3f} to {high:+.3f}",
        f"{run['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--parity", metavar="PYTHON", help="a Python with veRL")
    arguments.add_argument("--note", default="", help="a line for the page: where and how it was run")
    chosen = arguments.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}, "parity": {}}
    results["note"] = chosen.note
    if chosen.parity:
        command = [chosen.parity, str(Path(__file__).with_name("parity.py"))]
        results["parity"] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for name in chosen.only:
        results["runs"][name] = trained(CASES[name], steps=chosen.steps, seed=chosen.seed)
        print(json.dumps({name: results["runs"][name]}), file=sys.stderr)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    print(json.dumps({name: results["runs"][name]["after"] for name in chosen.only}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
