"""Which conversations a canary answers, and when it is shown to do worse than the incumbent.

The test is sequential: it looks each time the canary's outcomes have grown by a fifth, the first time at `min_outcomes`
of them. A look is Fisher's exact test, one-sided, of the canary's successes against the incumbent's of the same period,
held against that look's part of the false alarm. The parts of all looks, without end, add up to the false alarm, so a
canary that does as well is ever taken back with at most that probability, however long it is tried. Knows no ledger.

Source: Fisher's exact test, which is exact here whatever the traffic does meanwhile, since who answers is drawn by a
hash that knows nothing of the conversation; the false alarm spent over the looks as in Lan and DeMets, Discrete
sequential boundaries for clinical trials (Biometrika 70, 1983), with parts fixed beforehand, which add up by the union
bound.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

GROWTH = 1.2
"""Of the canary's outcomes from one look to the next."""
SPENT = 0.15
"""Of what is left of the false alarm, at each look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCount:
    """Outcomes of one arm, the canary's or the incumbent's."""

    n: int
    n_success: int

    def __str__(self) -> str:
        """Example: "9 of 30 (0.300)"."""
        return f"{self.n_success} of {self.n}" + (f" ({self.n_success / self.n:.3f})" if self.n else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at both arms."""

    number: int
    """From 1."""
    canary: ArmCount
    incumbent: ArmCount
    p: float
    """How likely the canary has so few successes if it does as well."""
    bound: float
    """This look's part of the false alarm."""

    @property
    def is_worse(self) -> bool:
        """Whether the canary is shown to do worse."""
        return self.p <= self.bound

    def __str__(self) -> str:
        """In words, for the ledger."""
        return (
            f"succeeded in {self.canary}, the incumbent in {self.incumbent} of the same time; "
            f"p = {self.p:.2g} at look {self.number}, bound {self.bound:.2g}"
        )


def draws_canary(conversation: str, *, salt: str, share: float) -> bool:
    """Whether a conversation is the canary's: the same in every process, and drawn anew with another salt.

    Args:
        salt: hash of the ledger line that began the canary.
        share: of the conversations, from 0 to 1.

    Example: over many conversations, share 0.1 -> True for one in ten
    """
    digest = hashlib.sha256(f"{salt}\0{conversation}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def look_sizes(n: int, *, min_outcomes: int) -> list[int]:
    """The canary's outcomes at each look that is due when it has `n` of them.

    Example: n 20, min_outcomes 10 -> [10, 12, 15, 18]
    """
    sizes, size = [], min_outcomes
    while size <= n:
        sizes.append(size)
        size = _after(size)
    return sizes


def next_look(n: int, *, min_outcomes: int) -> int:
    """How many outcomes of the canary the next look waits for.

    Example: n 10, min_outcomes 10 -> 12
    """
    sizes = look_sizes(n, min_outcomes=min_outcomes)
    return _after(sizes[-1]) if sizes else min_outcomes


def _after(size: int) -> int:
    return max(size + 1, math.ceil(size * GROWTH))


def bound_of_look(number: int, *, false_alarm: float) -> float:
    """The part of the false alarm that a look may spend; over all numbers from 1 they add up to the whole.

    Example: number 1, false_alarm 0.05 -> 0.0075
    """
    return false_alarm * SPENT * (1 - SPENT) ** (number - 1)


def looked(number: int, canary: ArmCount, incumbent: ArmCount, *, false_alarm: float) -> Look:
    """What one look sees.

    Args:
        number: from 1; each is looked at once, at what was known when the canary had its outcomes of `look_sizes`.
    """
    from scipy.stats import fisher_exact

    table = [[arm.n_success, arm.n - arm.n_success] for arm in (canary, incumbent)]
    p = float(fisher_exact(table, alternative="less").pvalue) if canary.n and incumbent.n else 1.0
    bound = bound_of_look(number, false_alarm=false_alarm)
    return Look(number=number, canary=canary, incumbent=incumbent, p=p, bound=bound)
