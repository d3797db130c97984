"""A graph's tools as they can be seen before it runs, held against what is declared of them.

Best effort, as in `graph.models`: a tool that is made inside a node is seen at its first call only. Nothing is called.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool, Tool

from agenttrain.errors import ConfigError
from agenttrain.graph.models import objects_of
from agenttrain.graph.roles import MISSPELT
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.tool_spec import Declared, External
from agenttrain.trainable import function_name

Tools = Mapping[str, Sequence[BaseTool]]
"""Name to the tools that go by it, sorted by name."""


def tools_of(runnable: RunnableGraph) -> Tools:
    """Those that can be seen."""
    found: dict[str, list[BaseTool]] = {}
    for each in objects_of(runnable.graph):
        if isinstance(each, BaseTool):
            found.setdefault(each.name, []).append(each)
    return dict(sorted(found.items()))


def undeclared_tools(declared: Mapping[str, Declared], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the names that nothing is declared of."""
    return tuple(name for name in names if name not in declared)


def runs_itself(left: Sequence[str]) -> str:
    """What comes of it that nothing is declared of these tools, in words.

    Example: ["search"] -> "The tool 'search' is not declared: a rollout that calls it runs the tool itself."
    """
    which = f"The tool {left[0]!r} is" if len(left) == 1 else f"The tools {', '.join(map(repr, left))} are"
    return f"{which} not declared: a rollout that calls {'it' if len(left) == 1 else 'one'} runs the tool itself."


def unseen_stand_ins(declared: Mapping[str, Declared], tools: Tools) -> frozenset[str]:
    """Names of external tools with a stand-in that no tool has so far."""
    external = (name for name, what in declared.items() if isinstance(what, External) and not what.permitted)
    return frozenset(name for name in external if name not in tools)


def check_declared(declared: Mapping[str, Declared], tools: Tools) -> tuple[str, ...]:
    """Refuse, before anything runs, what can't be true of the tools that are seen.

    Returns:
        A note for each name that no tool has so far; one may be made when the graph runs.

    Raises:
        ConfigError: a name that no tool has while one of another name is undeclared, a stand-in that can't take its
            tool's arguments, or a key argument that its tool hasn't.
    """
    notes = []
    for name, what in declared.items():
        if name not in tools:
            notes.append(_unseen(name, declared, tools))
        for tool in tools.get(name, ()):
            if isinstance(what, External):
                _check_external(tool, what)
    return tuple(notes)


def _unseen(name: str, declared: Mapping[str, Declared], tools: Tools) -> str:
    """A note on a name that no tool has.

    Raises:
        ConfigError: some tool is undeclared, and would run by itself if the name was meant for it.
    """
    said = f"tools={{{name!r}: …}} names no tool that can be seen before the graph runs. "
    said += f"Seen: {', '.join(tools) or 'none'}."
    close = difflib.get_close_matches(name, list(tools), n=1, cutoff=MISSPELT)
    left = undeclared_tools(declared, list(tools))
    if not close and not left:
        return said
    meant = f"Did you mean {close[0]!r}? " if close else ""
    others = f"Of {', '.join(left)} nothing is declared: declare all that are seen" if left else "Declare what is seen"
    raise ConfigError(f"{said} {meant}{others}, and leave out what isn't there.")


def _check_external(tool: BaseTool, declared: External) -> None:
    told, injected = _arguments(tool)
    key = declared.key_argument
    if key is not None and key not in told | injected:
        raise ConfigError(
            f"tools={{{tool.name!r}: External(key_argument={key!r})}} names no argument of the tool. It takes "
            f"{', '.join(sorted(told | injected)) or 'none'}. Add {key}: Annotated[str, InjectedToolArg] to it, which "
            "no model sees."
        )
    overridden = [name for name in ("run", "arun") if getattr(type(tool), name) is not getattr(BaseTool, name)]
    if overridden:
        raise ConfigError(
            f"The tool {tool.name!r} is external, and its class {type(tool).__name__} has a {overridden[0]}() of its "
            "own, which runs whatever is declared. Put its work into _run and _arun."
        )
    if declared.stand_in is not None:
        _check_stand_in(tool, declared.stand_in, told - {key}, injected | {key or "config", "config"})


def _check_stand_in(tool: BaseTool, stand_in: Callable[..., Any], told: set[str], injected: set[str]) -> None:
    """Refuse one that can't be called with the tool's arguments.

    Raises:
        ConfigError: naming the argument.
    """
    try:
        parameters = inspect.signature(stand_in).parameters
    except (TypeError, ValueError):
        return
    name = f"The stand-in {function_name(stand_in)} of the tool {tool.name!r}"
    by_name = {p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    kinds = {p.kind for p in parameters.values()}
    takes = f"The tool takes {', '.join(sorted(told)) or 'no arguments'}"
    if isinstance(tool, Tool):
        if not (kinds - {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}):
            raise ConfigError(f"{name} takes no argument by position, and the tool gives one so.")
        return
    lacking = sorted(told - by_name) if inspect.Parameter.VAR_KEYWORD not in kinds else []
    if lacking:
        raise ConfigError(f"{name} doesn't take {', '.join(map(repr, lacking))}. {takes}: give it the same parameters.")
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.name in by_name]
    unfilled = [each for each in needed if each not in told | injected]
    if unfilled:
        raise ConfigError(
            f"{name} asks for {unfilled[0]!r}, which nothing fills. {takes}: give it the same parameters."
        )


def _arguments(tool: BaseTool) -> tuple[set[str], set[str]]:
    """(those that a caller gives, those that the runtime injects)."""
    told = _fields(tool.tool_call_schema)
    every = _fields(tool.args_schema if isinstance(tool.args_schema, dict) else tool.get_input_schema())
    return told, (every | set(tool._injected_args_keys)) - told


def _fields(schema: Any) -> set[str]:
    fields = schema.get("properties", {}) if isinstance(schema, dict) else getattr(schema, "model_fields", {})
    return set(fields)
