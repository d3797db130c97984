"""Values that cross between a test and the agent's code, as JSON: plain data by value, all else as a reference.

Both sides use it. Reading builds exact built-in types only, whatever the other side wrote; who writes decides what a
reference is. Messages go to and fro in turn.
"""

from __future__ import annotations

import base64
import builtins
import datetime
import json
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Other = Callable[[Any], Any]
SCALARS = (type(None), bool, str, float)
MAX_INT = 1 << 63
MAX_DEPTH = 200
MAX_LINE = 1000
"""Characters of a message that goes through a pipe: with its end no more than the least output that a sandbox keeps."""
LONG, AS_FILE = ".json", '"long"'
"""Ending of the file that holds a longer one, and what the pipe says then."""


class WireError(Exception):
    """Something that can't cross, or that came and can't be read."""


def encode(value: Any, other: Other, depth: int = MAX_DEPTH) -> Any:
    """A value as JSON; a scalar as itself, all else as [what, content].

    Args:
        other: gives the [what, content] of a value that is no plain data.

    Raises:
        WireError: it is nested too deep.
    """
    if depth == 0:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep, or holds itself")
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is int:
        return value if -MAX_INT < value < MAX_INT else ["int", hex(value)]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [encode(each, other, depth - 1) for each in value]]
    if kind in _MAPPINGS:
        pairs = [[encode(key, other, depth - 1), encode(each, other, depth - 1)] for key, each in dict.items(value)]
        return ["dict", pairs]
    if kind in _TEXTS:
        name, to_text, _ = _TEXTS[kind]
        return [name, to_text(value)]
    return other(value)


def decode(data: Any, other: Other) -> Any:
    """The value that `encode` gave.

    Args:
        other: gives the value of a [what, content] that is no plain data.

    Raises:
        WireError: it is no such thing.
    """
    if type(data) in SCALARS or type(data) is int:
        return data
    if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
        raise WireError("a message can't be read")
    name, content = data
    try:
        if name in _MAKES:
            return _MAKES[name]([decode(each, other) for each in content])
        if name == "dict":
            return {decode(key, other): decode(each, other) for key, each in content}
        if name in _READS:
            return _READS[name](content)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise WireError(f"a {name} can't be read: {error}") from error
    return other(data)


def _bytes_text(value: Any) -> str:
    return base64.b64encode(bytes(value)).decode()


def _timedelta(text: str) -> datetime.timedelta:
    days, seconds, microseconds = map(int, text.split())
    return datetime.timedelta(days, seconds, microseconds)


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_MAKES: dict[str, Callable[[list[Any]], Any]] = {name: kind for kind, name in _SEQUENCES.items()}
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("int", hex, lambda text: int(text, 16)),
    bytes: ("bytes", _bytes_text, base64.b64decode),
    bytearray: ("bytearray", _bytes_text, lambda text: bytearray(base64.b64decode(text))),
    complex: ("complex", lambda value: f"{value.real.hex()} {value.imag.hex()}", lambda text: _complex(text)),
    range: (
        "range",
        lambda value: f"{value.start} {value.stop} {value.step}",
        lambda text: range(*map(int, text.split())),
    ),
    Decimal: ("Decimal", str, Decimal),
    Fraction: ("Fraction", str, Fraction),
    datetime.date: ("date", lambda value: value.isoformat(), datetime.date.fromisoformat),
    datetime.time: ("time", lambda value: value.isoformat(), datetime.time.fromisoformat),
    datetime.datetime: ("datetime", lambda value: value.isoformat(), datetime.datetime.fromisoformat),
    datetime.timedelta: (
        "timedelta",
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        _timedelta,
    ),
}
_READS: dict[str, Callable[[str], Any]] = {name: read for name, _, read in _TEXTS.values()}


def _complex(text: str) -> complex:
    real, imaginary = map(float.fromhex, text.split())
    return complex(real, imaginary)


def is_builtin(value: Any) -> bool:
    """Whether a value is one of Python's built-in types."""
    return isinstance(value, type) and getattr(builtins, value.__name__, None) is value


def builtin_exception(name: str) -> type[BaseException]:
    """A built-in exception of this name that only fails a test, none that ends pytest; else Exception."""
    kind: Any = getattr(builtins, name, None)
    is_safe = isinstance(kind, type) and (issubclass(kind, Exception) or kind is SystemExit)
    return kind if is_safe else Exception


class Way:
    """One side's two ends: messages go out and come in. A short one is a line in a pipe, a long one a file beside."""

    def __init__(self, folder: str) -> None:
        self.out, self.into = os.path.join(folder, "out"), os.path.join(folder, "in")

    def put(self, message: Any) -> None:
        """Hand a message over; waits until it is taken."""
        text = json.dumps(message)
        if len(text) > MAX_LINE:
            with open(self.out + LONG, "w", encoding="utf-8") as file:
                file.write(text)
            text = AS_FILE
        with open(self.out, "w", encoding="utf-8") as pipe:
            pipe.write(text + "\n")

    def get(self) -> Any:
        """Wait for a message."""
        with open(self.into, encoding="utf-8") as pipe:
            text = pipe.readline()
        if text.strip() == AS_FILE:
            with open(self.into + LONG, encoding="utf-8") as file:
                text = file.read()
        return json.loads(text)
