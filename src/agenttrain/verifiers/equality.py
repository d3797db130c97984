"""Whether two values of JSON's types are the same, without Python's liberties: true is not 1, and a text no number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same(one: Any, other: Any) -> bool:
    """True when both hold the same.

    Example: same(1, 1.0) -> True; same(1, True) -> False; same([1, "a"], (1, "a")) -> True
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return isinstance(one, bool) and isinstance(other, bool) and one == other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def shown(value: Any) -> str:
    """In a comment: short, and with what tells a text from a number."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits, or lists nested too deep
        return f"a {type(value).__name__} that can't be written down"
    return text if len(text) <= 120 else f"{text[:120]}…"
