"""Values that cross between a test and the agent's code, as JSON: plain data by value, all else as a reference.

Both sides use it. Reading builds exact built-in types only, whatever the other side wrote; who writes decides what a
reference is. The way itself is files: message n is written by one side and answered by the other under the same number.
"""

from __future__ import annotations

import base64
import builtins
import datetime
import json
import os
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Other = Callable[[Any], Any]
SCALARS = (type(None), bool, str, float)
MAX_INT = 1 << 63
MAX_DEPTH = 200
SHORTEST_S, LONGEST_S = 0.0005, 0.01
"""Between two looks for a message."""


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


def put(folder: str, number: int, message: Any) -> None:
    """Write a message whole."""
    place = os.path.join(folder, str(number))
    with open(place + ".new", "w", encoding="utf-8") as file:
        file.write(json.dumps(message) + "\n")
    os.replace(place + ".new", place)


def get(folder: str, number: int) -> Any:
    """Wait for a message; it is there when its last line has ended."""
    place, pause = os.path.join(folder, str(number)), SHORTEST_S
    while True:
        try:
            with open(place, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            text = ""
        if text.endswith("\n"):
            os.unlink(place)
            return json.loads(text)
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_S)
