"""What a user writes of one verifier: what it is in the reward, what it weighs, and what its failure does.

Nothing here asks a verifier or adds anything up; `reward.layers` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from agenttrain.errors import ConfigError

VerifierFn = Callable[..., Any]
PartKind = Literal["safety", "format", "outcome", "process", "cost"]
"""safety and format are gates; outcome decides success; process and cost are terms beside it."""
OnError = Literal["fail", "leave_out"]
GATES: tuple[PartKind, ...] = ("safety", "format")
"""A gate adds nothing to the score. Closed, it decides it."""
SUCCESS_SUFFIX = ".success"
"""An outcome that decides success itself leaves a second part under its name and this, of weight 0 and score 0 or 1."""
TERMS: tuple[PartKind, ...] = ("process", "cost")
"""Added to the score, and never asked about success."""


@dataclass(frozen=True, slots=True)
class Part:
    """One verifier in a reward.

    Raises:
        ConfigError: a function that can't be called, an unknown kind, numbers that can't be, or a gate with what a gate
            has not.

    Example:
        verifiers={
            "no_secret": Part(no_secret, kind="safety", closed=-1.0),
            "tests": Part(tests_pass),
            "turns": Part(turns_used(limit=8), -0.1, kind="cost", low=0.0, high=1.0),
        }
    """

    function: VerifierFn
    """Gives a bool, a number or {"score": …}; a LangSmith evaluator is taken as it is."""
    weight: float = 1.0
    """Of the score in the sum. A gate has none."""
    _: KW_ONLY
    kind: PartKind = "outcome"
    low: float | None = None
    """A score below it counts as this much. None: no bound."""
    high: float | None = None
    """A score above it counts as this much. None: no bound."""
    on_error: OnError = "fail"
    """fail: a verifier that raises, hangs or gives no number is an environment failure, and the rollout has no reward.
    leave_out: this part alone adds nothing, and an outcome with a weight is no full marks; not for gates."""
    closed: float = 0.0
    """What a rollout is worth when this gate is closed, or what the other parts add up to where that is less."""

    def __post_init__(self) -> None:
        if not callable(self.function) and not hasattr(self.function, "evaluate_run"):
            raise ConfigError(
                f"Part(…) got {self.function!r}, which can't be called. Give a verifier: Part(function, weight)."
            )
        _check_choice("kind", self.kind, get_args(PartKind))
        _check_choice("on_error", self.on_error, get_args(OnError))
        for name in ("weight", "low", "high", "closed"):
            self._check_number(name)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(
                f"{self} has low={self.low:g} above high={self.high:g}. Its score must lie between them: swap the two."
            )
        if self.is_gate:
            self._check_gate()
        elif self.closed != 0.0:
            raise ConfigError(
                f"{self} has closed={self.closed:g}, and only a gate closes. Add kind='safety' or kind='format', or "
                "leave closed= out."
            )

    @property
    def is_gate(self) -> bool:
        return self.kind in GATES

    def __str__(self) -> str:
        """How messages name it. Example: "Part(tests_pass, kind='outcome')"."""
        return f"Part({getattr(self.function, '__name__', type(self.function).__name__)}, kind={self.kind!r})"

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("low", "high"):
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self} has {name}={value!r}, and a finite number is expected.")

    def _check_gate(self) -> None:
        """A gate is open at a score of 1, and closed below: nothing else of a part has a meaning for it."""
        if self.on_error == "leave_out":
            raise ConfigError(
                f"{self} has on_error='leave_out'. A gate that is left out when it fails lets everything through. "
                "Leave on_error= out: the rollout is an environment failure then, and is not trained."
            )
        if self.weight != 1.0:
            raise ConfigError(
                f"{self} has weight={self.weight:g}. A gate adds nothing to the score: say what a closed one gives, "
                "closed=…, and leave the weight out."
            )
        if self.low is not None or self.high is not None:
            raise ConfigError(
                f"{self} has bounds. A gate is open at a score of 1 and closed below it: leave low= and high= out."
            )


def part_of(name: str, given: Any) -> Part:
    """What `verifiers=` holds under a name, as a Part.

    Args:
        given: a function, (function, weight), or a Part.

    Raises:
        ConfigError: something else, or a name that is kept.
    """
    match given:
        case _ if name.endswith(SUCCESS_SUFFIX):
            raise ConfigError(
                f"The verifier {name!r} of @trainable has a name that ends in {SUCCESS_SUFFIX!r}, kept for what a "
                f"verifier decides itself. Call it {name.removesuffix(SUCCESS_SUFFIX)!r}, or by another name."
            )
        case (function, int() | float() as weight) if _can_be_asked(function) and math.isfinite(weight):
            return Part(function, float(weight))
        case Part():
            return given
        case function if _can_be_asked(function):
            return Part(function)
    raise ConfigError(
        f"The verifier {name!r} of @trainable is {given!r}, and a function with a finite weight is expected: "
        f"verifiers={{{name!r}: (function, 1.0)}}, or Part(function, 1.0, kind=…)."
    )


def _can_be_asked(function: Any) -> bool:
    return callable(function) or hasattr(function, "evaluate_run")


def _check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(f"Part(…) got {name}={value!r}. Accepted: {', '.join(map(repr, accepted))}.")
