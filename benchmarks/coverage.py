"""How often the intervals of `agenttrain compare` hold the true difference, by simulation.

    python benchmarks/coverage.py [--evaluations 1500] [--resamples 1500]

Tasks are drawn from a population whose true difference is known, evaluated by two policies and compared; 95 of 100
intervals should hold the truth. Prints a row per case: the share that did, the chance error of that share, how many
tasks differed, and how wide the interval was. docs/compare.md tells what came out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agenttrain.promotion.compare import paired_difference

Array = npt.NDArray[np.float64]
Drawn = Callable[[np.random.Generator, int, int], tuple[Array, Array]]
"""(random numbers, tasks, repeats) to the values of both policies, [tasks, repeats] each."""
SIZES, REPEATS = (20, 50, 100, 500), (1, 4)


@dataclass(frozen=True)
class Case:
    name: str
    truth: float
    """The true difference: the mean over the population."""
    drawn: Drawn
    least_span: float = 1.0


@dataclass(frozen=True)
class Covered:
    share: float
    error: float
    """Standard error of the share, by the number of evaluations."""
    n_differ: float
    """Mean number of tasks that differ."""
    width: float


def _chance(log_odds: Array) -> Array:
    return 1 / (1 + np.exp(-log_odds))


def success(name: str, level: float, effect: float) -> Case:
    """Tasks of unequal difficulty (log odds spread by 1.5), at which both policies are good or bad alike (0.7)."""

    def drawn(rng: np.random.Generator, n: int, repeats: int) -> tuple[Array, Array]:
        hard = rng.standard_normal((n, 1))
        own = 0.7 * hard + math.sqrt(1 - 0.7**2) * rng.standard_normal((n, 1))
        base, other = _chance(level + 1.5 * hard), _chance(level + effect + 1.5 * own)
        draws = rng.random((2, n, repeats))
        return (draws[0] < base).astype(float), (draws[1] < other).astype(float)

    grid = np.linspace(-8, 8, 4001)
    weights = np.exp(-(grid**2) / 2)
    truth = np.average(_chance(level + effect + 1.5 * grid) - _chance(level + 1.5 * grid), weights=weights)
    return Case(name, float(truth), drawn)


def cost(name: str, factor: float, spread: float) -> Case:
    """Log-normal costs: each task has its own size, each rollout varies as much, and other costs a factor more."""

    def drawn(rng: np.random.Generator, n: int, repeats: int) -> tuple[Array, Array]:
        size = rng.normal(0, spread, (n, 1))
        base, other = (np.exp(size + rng.normal(0, spread, (n, repeats))) for _ in range(2))
        return base, factor * other

    return Case(name, (factor - 1) * math.exp(spread**2), drawn, least_span=0.0)


CASES = (
    success("success 0.5, equal", 0.0, 0.0),
    success("success 0.5, +0.10", 0.0, 0.6),
    success("success 0.5, +0.30", 0.0, 2.0),
    success("success 0.9, +0.04", 3.0, 0.8),
    success("success 0.98, equal", 6.0, 0.0),
    cost("cost, equal", 1.0, 0.5),
    cost("cost, x 0.7", 0.7, 0.5),
    cost("cost with a long tail, x 0.5", 0.5, 1.0),
)


def coverage(case: Case, n_tasks: int, repeats: int, *, evaluations: int, resamples: int) -> Covered:
    """The share of simulated evaluations whose interval holds the truth."""
    held, differ, widths = 0, 0, 0.0
    ids = [f"{n:04}" for n in range(n_tasks)]
    for seed in range(evaluations):
        base, other = case.drawn(np.random.default_rng(seed), n_tasks, repeats)
        seen = paired_difference(
            dict(zip(ids, base.tolist(), strict=True)),
            dict(zip(ids, other.tolist(), strict=True)),
            least_span=case.least_span,
            n_resamples=resamples,
            seed=seed,
        )
        held += seen.low <= case.truth + 1e-12 and case.truth - 1e-12 <= seen.high
        differ += int(np.count_nonzero(base.mean(axis=1) != other.mean(axis=1)))
        widths += seen.high - seen.low
    share = held / evaluations
    return Covered(
        share=share,
        error=math.sqrt(share * (1 - share) / evaluations),
        n_differ=differ / evaluations,
        width=widths / evaluations,
    )


def rows(evaluations: int, resamples: int) -> Iterator[str]:
    for case in CASES:
        for repeats in REPEATS:
            for n_tasks in SIZES:
                seen = coverage(case, n_tasks, repeats, evaluations=evaluations, resamples=resamples)
                within = "" if 0.93 <= seen.share <= 0.97 else "  outside of 93 to 97"
                yield (
                    f"{case.name:28} {n_tasks:>4} tasks x {repeats}  true {case.truth:+.3f}  "
                    f"held {100 * seen.share:5.1f} % ± {100 * seen.error:.1f}  "
                    f"{seen.n_differ:5.1f} differ  width {seen.width:.3f}{within}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=1500)
    parser.add_argument("--resamples", type=int, default=1500)
    given = parser.parse_args()
    for line in rows(given.evaluations, given.resamples):
        print(line, flush=True)
