"""The smallest difference that a number of tasks can show: by the number alone, or by how much the tasks varied."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agenttrain.errors import TaskError

_Z_95 = 1.959964
_Z_POWER_80 = 0.841621


def smallest_effect(n_tasks: int, success: float = 0.5) -> float:
    """The smallest difference in success that this many held-out tasks can show (95 %, power 80 %), at most 1.

    (1.96 + 0.84) · sqrt(2 p (1 - p) / n): the normal approximation for a difference of two proportions measured once
    on each task. Pairing only makes it smaller, so this is the cautious end.

    Args:
        n_tasks: held-out tasks, at least 1.
        success: p, the success rate about which the difference lies.

    Raises:
        TaskError: no tasks, or a rate outside of [0, 1].

    Example: smallest_effect(100) -> 0.198
    """
    if n_tasks < 1 or not 0 <= success <= 1:
        raise TaskError(
            f"smallest_effect got {n_tasks} tasks and a success rate of {success}. "
            "Give at least 1 task and a rate from 0 to 1."
        )
    return min(1.0, (_Z_95 + _Z_POWER_80) * math.sqrt(2 * success * (1 - success) / n_tasks))


def smallest_effect_seen(differences: Sequence[float]) -> float:
    """The smallest mean difference in success that these tasks can show (95 %, power 80 %), at most 1.

    (t(0.975) + t(0.8)) · s / sqrt(n) with the spread s of what each task differed by, which pairing has made smaller;
    where nothing varies, or there is but one task, `smallest_effect` of their number.

    Args:
        differences: [tasks] other less base, each averaged over its repeats.

    Source: J. M. Bland, "An Introduction to Medical Statistics", chapter 18 (sample size), with Student's t in place
        of the normal distribution.

    Example: 50 tasks of which 10 gain 1 and the others 0 -> 0.163
    """
    from scipy.special import stdtrit

    n = len(differences)
    mean = math.fsum(differences) / n if n else 0.0
    variance = math.fsum((each - mean) ** 2 for each in differences) / (n - 1) if n > 1 else 0.0
    if variance < 1e-12:
        return smallest_effect(n)
    quantiles = float(stdtrit(n - 1, 0.975) + stdtrit(n - 1, 0.8))
    return min(1.0, quantiles * math.sqrt(variance / n))
