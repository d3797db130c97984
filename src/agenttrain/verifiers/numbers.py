"""The last number that a text states becomes an exact number, or why it is none.

Exact arithmetic, so that neither 17 digits nor a tolerance of 0 are rounded; and short numbers only, so that no text
makes it slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agenttrain.errors import ConfigError
from agenttrain.verifiers.equality import shown

SEPARATORS = (",", "_", "'", " ")
MOST_SIGNS = 64
"""Of one number: longer ones are refused."""
MOST_EXPONENT = 308
BEFORE = "()[]{}\"'`*_,;:"
BEHIND = f"{BEFORE}.!?"
"""May stand around a number without belonging to it."""
SIGNS = "-+−"
BETWEEN_WORDS = re.compile(r"\s+|(?<![<>!=])=(?!=)")
LIKE_A_NUMBER = re.compile(r"\W{0,2}[\d¼-¾⅐-⅞]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberForm:
    """How numbers are written."""

    pattern: re.Pattern[str] | None
    units: tuple[str, ...]
    thousands: str | None

    @classmethod
    def of(cls, *, pattern: str | None, units: Sequence[str], thousands: str | None) -> NumberForm:
        """
        Raises:
            ConfigError: a pattern without one group, a unit that is no word, or an unknown separator.
        """
        if isinstance(units, str) or not all(isinstance(unit, str) and unit.split() == [unit] for unit in units):
            raise ConfigError(f"numeric_answer got units={units!r}. Write a list of words or signs: units=('km',).")
        if thousands is not None and thousands not in SEPARATORS:
            raise ConfigError(
                f"numeric_answer got thousands={thousands!r}. Accepted: {', '.join(map(repr, SEPARATORS))}."
            )
        return cls(
            pattern=None if pattern is None else _compiled(pattern),
            units=tuple(sorted(units, key=len, reverse=True)),
            thousands=thousands,
        )

    def number_in(self, answer: Any) -> tuple[Fraction | None, str]:
        """(the number, how it was written), or (None, why there is none)."""
        if isinstance(answer, str):
            return self._in_text(answer)
        if isinstance(answer, int | float) and not isinstance(answer, bool) and _is_finite(answer):
            return self.exact(answer), shown(answer)
        return None, "there is no answer" if answer is None else f"{shown(answer)} is no finite number"

    @staticmethod
    def exact(value: float) -> Fraction:
        """As it is written: 0.1 is a tenth."""
        return Fraction(value) if isinstance(value, int) else Fraction(repr(float(value)))

    def _in_text(self, text: str) -> tuple[Fraction | None, str]:
        if self.pattern is not None:
            matches = list(self.pattern.finditer(text))
            if not matches:
                return None, f"nothing matches {self.pattern.pattern!r}"
            said = (matches[-1].group(1) or "").strip()
        else:
            found = _stated(self._joined(text), self.units)
            if found is None:
                return None, "no number is stated"
            said = found
        value = self._read(said)
        return (value, said) if value is not None else (None, f"the last one, {shown(said)}, can't be read")

    def _joined(self, text: str) -> str:
        """Without blanks between groups of three digits, where they separate thousands."""
        if self.thousands != " ":
            return text
        return re.sub(r"(?<![\w.,])[-+−]?[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda m: m[0].replace(" ", ""), text)

    def _read(self, said: str) -> Fraction | None:
        """A number and nothing else but its unit."""
        bare = self._without_unit(said)
        if bare is None or len(bare) > MOST_SIGNS:
            return None
        separator = None if self.thousands in (None, " ") else re.escape(str(self.thousands))
        whole = "[0-9]+" if separator is None else f"(?:[0-9]{{1,3}}(?:{separator}[0-9]{{3}})+|[0-9]+)"
        match = re.fullmatch(rf"([-+−]?)({whole}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([-+]?[0-9]+))?", bare)
        if match is None or abs(int(match[3] or 0)) > MOST_EXPONENT:
            return None
        digits = match[2] if self.thousands is None else match[2].replace(self.thousands, "")
        value = Fraction(digits) * Fraction(10) ** int(match[3] or 0)
        return -value if match[1] in ("-", "−") else value

    def _without_unit(self, said: str) -> str | None:
        """None: units are asked for, and none stands there."""
        if not self.units:
            return said
        for unit in self.units:
            if said.endswith(unit):
                return said.removesuffix(unit).strip()
            sign, rest = (said[0], said[1:]) if said[:1] in tuple(SIGNS) else ("", said)
            if rest.startswith(unit):
                return sign + rest.removeprefix(unit).strip()
        return None


def _is_finite(value: float) -> bool:
    """Also of a whole number that no float holds."""
    return isinstance(value, int) or math.isfinite(value)


def number_of_reference(task_id: str, reference: Any, form: NumberForm) -> Fraction:
    """The number to hold answers against: a finite one, or a text that states one and nothing else.

    Raises:
        ValueError: it is none, which is no fault of the policy.
    """
    if isinstance(reference, str):
        bare = NumberForm(pattern=None, units=(), thousands=form.thousands)._read(reference.strip())
        found = bare if bare is not None else form._read(reference.strip())
    else:
        found, _ = form.number_in(reference)
    if found is None:
        raise ValueError(f"the reference of task {task_id!r} is {shown(reference)}, and a finite number is expected")
    return found


def _stated(text: str, units: Sequence[str]) -> str | None:
    """The last word of a text that looks like a number, with the unit beside it. None: none does.

    A word looks like one when it begins with a digit behind signs, brackets and a unit: "A41" and "v2" do not.
    """
    words = [word for word in BETWEEN_WORDS.split(text) if word]
    for n in range(len(words) - 1, -1, -1):
        bare = words[n].lstrip(BEFORE).rstrip(BEHIND)
        if LIKE_A_NUMBER.match(_without_prefix(bare, units)):
            return _with_unit(words, n, bare, units)
    return None


def _without_prefix(bare: str, units: Sequence[str]) -> str:
    """Without sign and unit before it. Example: "-$5" with "$" -> "5"."""
    rest = bare.lstrip(SIGNS)
    return next((rest.removeprefix(unit) for unit in units if rest.startswith(unit)), rest)


def _with_unit(words: Sequence[str], n: int, bare: str, units: Sequence[str]) -> str:
    """A number's word, with a unit that stands as a word of its own behind or before it."""
    behind = words[n + 1].lstrip(BEFORE).rstrip(BEHIND) if n + 1 < len(words) and words[n][-1] not in BEHIND else ""
    before = words[n - 1].lstrip(BEFORE) if n else ""
    if behind in units:
        return f"{bare} {behind}"
    return f"{before} {bare}" if before in units else bare


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"numeric_answer got pattern={pattern!r}, which is no regular expression: {error}."
        ) from error
    if compiled.groups != 1:
        raise ConfigError(
            f"numeric_answer got pattern={pattern!r} with {compiled.groups} groups. Put the number, and nothing else, "
            r"in one: pattern=r'answer: (\S+)'."
        )
    return compiled
