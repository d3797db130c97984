"""A function becomes text that changes when what it does may have changed, and is the same in every process.

Its source, and what it closes over: a verifier that a factory made is told from one made with other settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

DEEPEST = 4
"""Functions and dataclasses within what functions close over."""


def source_of(function: Any, depth: int = 0) -> tuple[str, ...]:
    """The source of a function and of what it was made with; what has no source goes by its type's name.

    Example: of `numeric_answer(tolerance=0.5)`: the source of the function within, and "tolerance=0.5".
    """
    if isinstance(function, functools.partial):
        given = dict(enumerate(function.args)) | function.keywords
        return (*source_of(function.func, depth), *_settings(given, depth))
    try:
        source = inspect.getsource(function)
    except (TypeError, OSError):
        return (f"{type(function).__module__}.{type(function).__qualname__}",)
    return (source, *_settings(_closed_over(function), depth))


def functions_in(function: Any) -> Iterator[FunctionType]:
    """A function and those it is made with: held by a partial, closed over, or named in it and found in its module."""
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(function, 0)]
    while waiting:
        each, depth = waiting.pop(0)
        if id(each) in seen or depth > DEEPEST:
            continue
        seen.add(id(each))
        if inspect.isfunction(each):
            yield each
        waiting += [(inner, depth + 1) for inner in _held(each)]


def _held(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if not inspect.isroutine(function):
        return []
    inner = inspect.unwrap(getattr(function, "__func__", function))
    named = getattr(getattr(inner, "__code__", None), "co_names", ())
    there = getattr(inner, "__globals__", {})
    return [*_closed_over(function).values(), *(there[name] for name in named if name in there)]


def _closed_over(function: Callable[..., Any]) -> dict[Any, Any]:
    """What a function holds; of a method the object it is bound to."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    names, cells = getattr(getattr(inner, "__code__", None), "co_freevars", ()), getattr(inner, "__closure__", None)
    found: dict[Any, Any] = {"self": function.__self__} if inspect.ismethod(function) else {}
    for name, cell in zip(names, cells or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return found


def _settings(given: dict[Any, Any], depth: int) -> tuple[str, ...]:
    return tuple(f"{name}={_said(value, depth)}" for name, value in given.items() if depth < DEEPEST)


def _said(value: Any, depth: int) -> str:
    """In words without an address. Of a dataclass its fields, but those of its own ("_ids"), which may change."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_said(each, depth) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_said(key, depth)}: {_said(each, depth)}' for key, each in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_said(each, depth) for each in value))}}}"
    if isinstance(value, re.Pattern):
        return f"{value.pattern!r} {value.flags}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < DEEPEST:
        own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.name[0] != "_"}
        return f"{type(value).__qualname__}({_said(own, depth + 1)})"
    if callable(value):
        return "\n".join(source_of(value, depth + 1))
    return f"{type(value).__module__}.{type(value).__qualname__}"
