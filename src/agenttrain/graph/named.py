"""A user's function and the values it may ask for become the call: of `setup=` and `on_interrupt=`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenttrain.errors import GraphError


def call_with(
    function: Callable[..., Any], values: Mapping[str, Any], *, positional: Sequence[str], what: str
) -> Callable[[], Any]:
    """The call of a function with those of the values that it asks for by name.

    Args:
        values: name to value.
        positional: names in the order in which a function gets them that asks for as many under names of its own.
        what: as the user wrote it, such as `setup=shop`, for the message.

    Raises:
        GraphError: an argument that nothing fills.

    Example: `def shop(order)` with values {"task": task} and positional ("task",) -> shop(task); `*args` alone gets
    the positional ones, `**named` every one.
    """
    by_position, by_keyword = _names(function, tuple(values), tuple(positional), what)
    args = [values[name] for name in by_position]
    return functools.partial(function, *args, **{name: values[name] for name in by_keyword})


def check_call(function: Callable[..., Any], names: Sequence[str], *, positional: Sequence[str], what: str) -> None:
    """Refuse, before anything runs, a function whose arguments can't be filled.

    Raises:
        GraphError: naming the argument and what there is.
    """
    _names(function, tuple(names), tuple(positional), what)


def _names(
    function: Callable[..., Any], names: tuple[str, ...], positional: tuple[str, ...], what: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(passed by position, passed by keyword)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return positional, ()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in named if p.default is p.empty]
    unknown = [p for p in required if p.name not in names]
    if unknown and not _stand_for(required, positional, names):
        raise GraphError(
            f"{what} asks for {unknown[0].name!r}, which nothing fills. It may ask for any of {', '.join(names)}, or "
            f"take {' and '.join(positional)} under other names."
        )
    if unknown:
        return positional, ()
    known = [p for p in named if p.name in names]
    kinds = {p.kind for p in parameters}
    if not named and inspect.Parameter.VAR_POSITIONAL in kinds:
        return positional, ()
    by_position = tuple(p.name for p in known if p.kind is p.POSITIONAL_ONLY)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return by_position, tuple(name for name in names if name not in by_position)
    return by_position, tuple(p.name for p in known if p.kind is not p.POSITIONAL_ONLY)


def _stand_for(required: Sequence[inspect.Parameter], positional: Sequence[str], names: Sequence[str]) -> bool:
    """Whether these parameters are the positional ones under other names, with no name of ours in a wrong place."""
    if len(required) != len(positional) or any(p.kind is p.KEYWORD_ONLY for p in required):
        return False
    return all(p.name == own or p.name not in names for p, own in zip(required, positional, strict=True))
