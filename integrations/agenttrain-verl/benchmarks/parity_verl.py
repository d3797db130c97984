"""The same rollouts through the local trainer and through veRL's: are advantages, losses and gradients the same?

    python integrations/agenttrain-verl/benchmarks/parity_verl.py [--without-real]

For each algorithm one step with two mini-batches and two epochs: made-up rollouts of 1 to 3 trajectories with context
and frozen spans in the middle, whose recorded log probabilities are so far from the model's that ratios are clipped;
and real ones of the order desk. Prints a line for each on standard error and one JSON object; exits 1 when a relative
difference is above 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from agenttrain.config import Config, resolve
from agenttrain.local.adapter import open_learnable
from agenttrain.local.learner import Learner, PassResult
from agenttrain.plugins import Plugins
from agenttrain.records import RolloutResult
from agenttrain.trainer.algorithms import chosen, with_algorithm
from agenttrain.trainer.batches import Lesson, MicroBatch, lessons
from parity_samples import made_up, real
from verl_in_process import InProcess

from agenttrain_verl.plan import plan_of

LARGEST = 1e-5
LEARNING_RATE = 5e-5
"""AdamW makes steps of this size from gradients of any: a higher one makes rounding of the first update visible in the
last, and takes tokens so far from the reference that veRL holds their k3 at 10 (core_algos.py at 0.9.1)."""
ROOT = Path(__file__).parents[3]
ORDER_DESK = ROOT / "examples" / "order-desk"
GSPO = {"algorithm": "gspo", "clip_low": 0.02, "clip_high": 0.03}
"""With bounds in which some ratios stay: at gspo's own nearly all are clipped after these updates."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "rloo": {"algorithm": "rloo"},
    "gspo": GSPO,
    "grpo, one mini-batch": {"algorithm": "grpo", "minibatches": 1},
    "dr_grpo, uneven mini-batches": {"algorithm": "dr_grpo", "minibatches": 3},
    "grpo, rollout-mean": {"algorithm": "grpo", "loss": "rollout-mean"},
    "grpo, importance cap": {"algorithm": "grpo", "importance_cap": 1.2},
    "gspo, importance cap": {**GSPO, "importance_cap": 1.2},
    "grpo, k3 in the loss": {"algorithm": "grpo", "kl_coefficient": 0.5},
    "dr_grpo, k3, uneven": {"algorithm": "dr_grpo", "minibatches": 3, "kl_coefficient": 0.5},
}
REAL = ("grpo", "dr_grpo", "rloo", "gspo")
"""Cases that the order desk's rollouts go through."""


@dataclass(kw_only=True)
class Step:
    """What one trainer made of the rollouts."""

    advantages: dict[tuple[str, int], list[float]]
    losses: list[float] = field(default_factory=list)
    """[updates]"""
    norms: list[float] = field(default_factory=list)
    """[updates]"""
    figures: Mapping[str, float] = field(default_factory=dict)


class Noting(Learner):
    """The local trainer's, and what each of its updates gave."""

    noted: list[tuple[float, float]]

    def _update(self, part: Sequence[MicroBatch], step: int) -> tuple[list[PassResult], float]:
        done, norm = super()._update(part, step)
        self.noted.append((sum(each.loss for each in done), norm))
        return done, norm


def config_of(trainer: Mapping[str, Any]) -> Config:
    tables = {
        "trainer": {
            "name": "verl",
            "minibatches": 2,
            "epochs": 2,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
            "final_learning_rate": 1.0,
            "group_size": 4,
            "tasks_per_step": 5,
            **trainer,
        },
        "sampling": {"temperature": 0.9},
        "limits": {"tokens": 640},
    }
    return with_algorithm(resolve(("the benchmark", tables), plugin_tables=("verl",)))


def taught(results: Sequence[RolloutResult], config: Config) -> tuple[Lesson, ...]:
    estimate = Plugins.load(only=None).advantage(chosen(config.trainer).advantage)
    return lessons(results, estimate).kept


def local_step(results: Sequence[RolloutResult], config: Config, model: Path, *, step: int) -> Step:
    learnable = open_learnable(model, device=torch.device("cpu"), config=config)
    learner = Noting(learnable, config)
    learner.noted = []
    try:
        kept = learner.measured(taught(results, config))
        done = learner.train(kept, step=step, learning_rate=config.trainer.learning_rate, weight_version=0)
    finally:
        learner.close()
    return Step(
        advantages={
            (lesson.rollout_id, sample.extra_fields["trajectory"]): [
                a for a, mask in zip(row, sample.response_mask, strict=True) if mask
            ]
            for lesson in kept
            for sample, row in zip(lesson.samples, lesson.token_advantages, strict=True)
        },
        losses=[loss for loss, _ in learner.noted],
        norms=[norm for _, norm in learner.noted],
        figures={
            "logprob_gap_mean": done.gap_mean,
            "logprob_gap_max": done.gap_max,
            "nll": done.nll,
            "clip_fraction": done.clip_fraction,
            "updates": done.n_updates,
            "loss": done.loss,
            "grad_norm": done.grad_norm,
        },
    )


def verl_step(
    results: Sequence[RolloutResult],
    config: Config,
    model: Path,
    *,
    step: int,
    trainer_class: type[InProcess] = InProcess,
) -> Step:
    from agenttrain_verl.step_figures import step_metrics

    estimate = Plugins.load(only=None).advantage(chosen(config.trainer).advantage)
    plan = plan_of(config, model, n_tasks=config.trainer.tasks_per_step)
    own = taught(results, config)
    kept = [lesson.result for lesson in own]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(plan, estimate, Path(folder))
        trainer.rollout_order, trainer.lessons = [result.rollout.id for result in kept], own
        metrics = trainer.train(list(reversed(kept)), step=step)  # rows come in any order
    calls = trainer.actor_rollout_wg.updates
    return Step(
        advantages=trainer.advantages(),
        losses=[loss for call in calls for loss in call["loss"]],
        norms=[norm for call in calls for norm in call["grad_norm"]],
        figures=step_metrics(metrics),
    )


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest, relative to the largest number of ours: some losses come near 0."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    scale = max(map(abs, ours))
    return max(abs(a - b) / scale for a, b in zip(ours, theirs, strict=True))


def compared(local: Step, verl: Step) -> dict[str, float]:
    """Relative differences of advantages, losses and gradients; of the other figures, in nats."""
    assert local.advantages.keys() == verl.advantages.keys()
    flat = [[a for place in sorted(local.advantages) for a in side.advantages[place]] for side in (local, verl)]
    found = {
        "advantages": difference(*flat),
        "loss": difference(local.losses, verl.losses),
        "gradient": difference(local.norms, verl.norms),
    }
    return found | {name: abs(local.figures[name] - verl.figures[name]) for name in ("logprob_gap_mean", "nll")}


def row(results: Sequence[RolloutResult], trainer: Mapping[str, Any]) -> dict[str, float]:
    """One line of the table."""
    config, model = config_of(trainer), ORDER_DESK / "policy"
    with contextlib.redirect_stdout(sys.stderr):  # veRL prints
        local, verl = (step(results, config, model, step=1) for step in (local_step, verl_step))
    found = compared(local, verl)
    return found | {"clipped": local.figures["clip_fraction"], "updates": len(verl.losses)}


def real_ones(folder: Path) -> list[RolloutResult]:
    flags = {"trainer": {"name": "local"}}
    results = real(ORDER_DESK / "graph.py", folder, n_tasks=6, n_siblings=8, flags=flags)
    print(f"{len(results)} rollouts of the order desk, {sum(len(r.samples) for r in results)} rows", file=sys.stderr)
    return results


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--without-real", action="store_true")
    options.add_argument("--only", nargs="+", help="rows of the table, by the beginning of their names")
    asked = options.parse_args()
    hard = made_up(ORDER_DESK / "policy", temperature=0.9)
    rows: list[tuple[str, Sequence[RolloutResult], Mapping[str, Any]]] = [
        (f"{name}; made up", hard, trainer) for name, trainer in CASES.items()
    ]
    if not asked.without_real:
        with tempfile.TemporaryDirectory() as folder:
            desk = real_ones(Path(folder))
        sizes = {"group_size": 8, "tasks_per_step": 6}
        rows += [(f"{name}; order desk", desk, {**CASES[name], **sizes}) for name in REAL]
    found: dict[str, dict[str, float]] = {}
    for name, results, trainer in rows:
        if asked.only is None or name.startswith(tuple(asked.only)):
            found[name] = row(results, trainer)
            print(f"| {name} | " + " | ".join(f"{v:.2g}" for v in found[name].values()) + " |", file=sys.stderr)
    print(json.dumps(found))
    return int(any(max(each[n] for n in ("advantages", "loss", "gradient")) > LARGEST for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
