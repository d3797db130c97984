"""Who answers here where a policy serves: a record that tools and nodes may ask for.

Set around each step of a served graph; asked for, it may depend on the LangGraph thread that asks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Which policy answers a conversation."""

    run_id: str
    """Of the run that trained it; "base" for the policy before any training."""
    is_canary: bool
    """It is tried on a share of the conversations: what its tools do may have to be held back."""
    conversation: str
    """LangGraph's thread_id where there is one."""


_served: contextvars.ContextVar[Callable[[], Served] | None] = contextvars.ContextVar("agenttrain_served", default=None)


def current_serving() -> Served:
    """Which policy answers here, in which conversation; for use inside tools and nodes.

    Raises:
        LookupError: no policy serves here.

    Example:
        @tool
        def refund(order: str) -> str:
            return payments.refund(order, dry_run=agenttrain.current_serving().is_canary)
    """
    served = serving_here()
    if served is None:
        raise LookupError(
            "No policy serves here, so there is nothing to tell. Call current_serving() inside a node or tool of a "
            "graph that agenttrain.attach gave, or in a block of agenttrain.use; a thread of your own needs "
            "contextvars.copy_context()."
        )
    return served


def serving_here() -> Served | None:
    """The same; None where no policy serves."""
    tell = _served.get()
    return None if tell is None else tell()


@contextmanager
def current_serving_is(tell: Callable[[], Served]) -> Iterator[None]:
    """Make `current_serving` give what this tells, inside the block."""
    token = _served.set(tell)
    try:
        yield
    finally:
        _served.reset(token)
