"""What a user writes of what a tool does to the world: `read_only`, `sandboxed`, or External. Knows no tool."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agenttrain.errors import ConfigError

KINDS = ("read_only", "sandboxed")


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A tool that does something to the world outside of a rollout: it writes, sends, pays.

    Example: External(stand_in=fake_refund); External(permitted=True, key_argument="idempotency_key")
    """

    stand_in: Callable[..., Any] | None = None
    """Runs in the tool's place in every rollout: a function of the tool's arguments, sync or async. It gets what the
    runtime injects only where it asks for that by name. None: the tool has none."""
    permitted: bool = False
    """The tool itself may run in rollouts."""
    key_argument: str | None = None
    """Name of the argument by which the tool gets its call's `idempotency_key()` in rollouts. None: it asks itself."""


Declared = Literal["read_only", "sandboxed"] | External


def check_tools(tools: Mapping[str, Declared], *, has_sandbox: bool) -> None:
    """Refuse declarations that can't be kept.

    Raises:
        ConfigError: the first of them, with what to write.
    """
    if not isinstance(tools, Mapping):
        raise ConfigError(f"@trainable got tools={tools!r}. Write tools={{'name of the tool': \"read_only\"}}.")
    for name, declared in tools.items():
        _check(name, declared, has_sandbox)


def _check(name: object, declared: object, has_sandbox: bool) -> None:
    where = f"tools={{{name!r}: …}} of @trainable"
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} names no tool. Write the name that the model calls it by.")
    if isinstance(declared, External):
        _check_external(where, declared)
    elif declared == "sandboxed" and not has_sandbox:
        raise ConfigError(f'{where} says "sandboxed", and there is no sandbox. Add sandbox=SandboxSpec(…).')
    elif declared not in KINDS:
        close = difflib.get_close_matches(str(declared), KINDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"{where} says {declared!r}. Accepted: 'read_only', 'sandboxed', or External(stand_in=…) or "
            f"External(permitted=True) for a tool that does something to the world outside.{hint}"
        )


def _check_external(where: str, declared: External) -> None:
    if declared.stand_in is None and declared.permitted is not True:
        raise ConfigError(
            f"{where} is external, and nothing says what happens in training. Write External(stand_in=function), which "
            "runs in the tool's place, or External(permitted=True), which lets the tool itself run in every rollout."
        )
    if declared.stand_in is not None and declared.permitted:
        raise ConfigError(f"{where} has a stand-in and permitted=True. Keep one: a stand-in runs in the tool's place.")
    if declared.stand_in is not None and not callable(declared.stand_in):
        raise ConfigError(f"{where} has stand_in={declared.stand_in!r}. Name a function of the tool's arguments.")
    if declared.key_argument is not None and not (isinstance(declared.key_argument, str) and declared.key_argument):
        raise ConfigError(f"{where} has key_argument={declared.key_argument!r}. Name one argument of the tool.")
