"""Does the reward do the work? The order-desk run again, with the sign of each rollout's advantage drawn by chance.

    python benchmarks/control.py [--seed 1] [--steps 16]

The estimator comes in by a plugin, as a third party's would. The weights must move, and held-out success must end
well below its own baseline: what improves in the real run is then not an accident of the optimizer.
Prints one JSON object; exits 1 when success did not fall by at least 0.2 or the weights did not move.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from agenttrain import hookimpl

EXAMPLE = Path(__file__).parents[1] / "examples" / "order-desk"
LEAST_FALL = 0.2


class FlippedAdvantages:
    """The group's own advantages, each with a sign drawn by chance."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        from agenttrain.trainer.advantage import group_advantages

        return [value * self.draw.choice((-1.0, 1.0)) for value in group_advantages(rewards)]


def plugin(seed: int) -> types.ModuleType:
    """A module with one hook implementation."""

    @hookimpl
    def agenttrain_register_advantages(register: Callable[[str, FlippedAdvantages], None]) -> None:
        register("flipped", FlippedAdvantages(seed))

    module = types.ModuleType("flipped")
    module.agenttrain_register_advantages = agenttrain_register_advantages
    return module


def weight_change(before: Path, after: Path) -> float:
    """Norm of the difference of all weights over the norm of the first."""
    import torch
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32).state_dict()
    last = AutoModelForCausalLM.from_pretrained(after, dtype=torch.float32).state_dict()
    moved = sum(float((last[name] - value).pow(2).sum()) for name, value in first.items())
    return (moved / sum(float(value.pow(2).sum()) for value in first.values())) ** 0.5


def main() -> int:
    from agenttrain.commands.progress import Progress
    from agenttrain.fit import fit
    from agenttrain.prepare import prepare
    from agenttrain.run_folder import new_run

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--steps", type=int)
    chosen = arguments.parse_args()
    flags: dict[str, object] = {"seed": chosen.seed, "trainer": {"advantage": "flipped"}}
    if chosen.steps:
        flags["trainer"] = {"advantage": "flipped", "steps": chosen.steps}
    job = prepare(
        str(EXAMPLE / "graph.py"), cwd=Path.cwd(), flags=flags, extra_plugins={"flipped": plugin(chosen.seed)}
    )
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "control")
        report = fit(job, run, watcher=Progress(job))
        moved = weight_change(Path(report["model"]["base"]), run.policy)
    result = {
        "baseline": report["baseline"]["success"],
        "trained": report["trained"]["success"],
        "difference": report["difference"],
        "weight_change": moved,
        "steps": report["steps"],
    }
    print(json.dumps(result))
    return 0 if moved > 1e-3 and result["trained"] <= result["baseline"] - LEAST_FALL else 1


if __name__ == "__main__":
    sys.exit(main())
