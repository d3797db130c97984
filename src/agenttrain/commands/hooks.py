"""`agenttrain plugins --hooks`: every plugin point as its docstring tells it.

A docstring of `agenttrain.hookspecs` becomes a Hook; the sections are those that every hook there has.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from agenttrain.commands.arguments import print_json
from agenttrain.errors import PluginError

SECTIONS = ("Shape", "When", "Exception", "Example")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One plugin point."""

    name: str
    signature: str
    """Arguments and result with their types, as they stand in the source."""
    summary: str
    """The docstring's first line."""
    shape: str
    """register, decide, observe or veto; with what is special to it."""
    when: str
    exception: str
    """What an exception of an implementation does."""
    example: str
    """Python that could stand in a plugin."""


def hooks(name: str | None = None) -> list[Hook]:
    """Every plugin point in the order of `hookspecs`, or the one of that name, with or without "agenttrain_".

    Raises:
        PluginError: there is none of that name.
    """
    from agenttrain.plugins import PREFIX, hook_names, suggestion

    names = hook_names()
    if name is None:
        return [_hook(each) for each in names]
    full = name if name.startswith(PREFIX) else PREFIX + name
    if full not in names:
        raise PluginError(f"There is no hook {name!r}.{suggestion(full, names)} Hooks: {', '.join(names)}.")
    return [_hook(full)]


def print_hooks(chosen: Sequence[Hook], *, as_json: bool) -> None:
    """As text for people, or as {"hooks": [...]}."""
    if as_json:
        print_json({"hooks": [asdict(hook) for hook in chosen]})
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for hook in chosen:
        console.print(f"{hook.name}{hook.signature}", style="bold", markup=False)
        console.print(f"  {hook.summary}", markup=False)
        for label in ("shape", "when", "exception"):
            console.print(f"  {label}: {getattr(hook, label)}", markup=False)
        console.print(textwrap.indent(hook.example, "      "), style="green", markup=False)
        console.print()


def _hook(name: str) -> Hook:
    from agenttrain import hookspecs

    function = getattr(hookspecs, name)
    sections = _sections(inspect.getdoc(function) or "")
    return Hook(
        name=name,
        signature=_signature(function),
        summary=sections[""].partition("\n")[0],
        shape=_joined(sections["Shape"]),
        when=_joined(sections["When"]),
        exception=_joined(sections["Exception"]),
        example=textwrap.dedent(sections["Example"]).strip("\n"),
    )


def _sections(docstring: str) -> dict[str, str]:
    """Section to its text; what stands before the first is under ""."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in docstring.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in SECTIONS:
            current, line = head, rest
        sections.setdefault(current, []).append(line)
    missing = [section for section in SECTIONS if section not in sections]
    if missing:
        raise PluginError(f"A hook's docstring lacks {', '.join(missing)}: {docstring.partition(chr(10))[0]}")
    return {section: "\n".join(lines) for section, lines in sections.items()}


def _joined(text: str) -> str:
    return " ".join(text.split())


def _signature(function: object) -> str:
    """With annotations as they are written, since types are long when they are resolved."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    arguments = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
    return f"({arguments}) -> {signature.return_annotation}"
