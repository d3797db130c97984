"""A graph's code becomes the chat models and the nodes that can be seen in it before it runs.

Looks at nodes, their closures, the globals their code names, bound objects' attributes, and tools. Best effort: a model
or a graph built inside a node is found at its first call only. Nothing is called or changed.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

from agenttrain.graph.runnable import RunnableGraph
from agenttrain.graph.site import model_identity

MAX_DEPTH = 8
MAX_OBJECTS = 5_000
"""Looked at in one graph; a graph that needs more is left to its first calls."""
_PLAIN = (str, bytes, int, float, bool, type(None))
_TASK = "_TaskFunction"
"""langgraph.func's class behind @task, which has no public name."""
_HELD = ("bound", "steps", "runnable", "func", "afunc", "coroutine", "default", "fallbacks", "last", "first", "middle")
"""Attributes by which runnables and tools hold others."""


def models_of(runnable: RunnableGraph) -> list[tuple[str, str, str]]:
    """(class, name, base address) of each model seen, once each, sorted."""
    return sorted({model_identity(found) for found in objects_of(runnable.graph) if isinstance(found, BaseChatModel)})


def nodes_of(runnable: RunnableGraph) -> list[str]:
    """Names of the nodes and tasks seen, those of graphs within included, once each, sorted."""
    names = set[str]()
    for found in objects_of(runnable.graph):
        if isinstance(found, Pregel):
            names.update(name for name in found.nodes if not name.startswith("__"))
        elif type(found).__name__ == _TASK:
            names.add(str(getattr(found.func, "__name__", "")))
    return sorted(names)


def objects_of(graph: Any) -> Iterator[Any]:
    """What can be reached from a graph, the nearest first; a model is not looked into."""
    seen: set[int] = set()
    waiting: deque[tuple[Any, int]] = deque([(graph, 0)])
    while waiting and len(seen) < MAX_OBJECTS:
        found, depth = waiting.popleft()
        if isinstance(found, _PLAIN) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if depth < MAX_DEPTH and not isinstance(found, BaseChatModel):
            waiting.extend((part, depth + 1) for part in _parts(found))


def _parts(found: Any) -> list[Any]:
    """What an object holds that may hold a model."""
    if isinstance(found, Pregel):
        nodes = list(found.nodes.values())
        branches = getattr(getattr(found, "builder", None), "branches", {})
        paths = [branch.path for by_name in branches.values() for branch in by_name.values()]
        return [*(node.bound for node in nodes), *(sub for node in nodes for sub in node.subgraphs or ()), *paths]
    if isinstance(found, (list, tuple, set, frozenset)):
        return list(found)
    if isinstance(found, Mapping):
        return list(found.values())
    if isinstance(found, functools.partial):
        return [found.func, *found.args, *found.keywords.values()]
    if inspect.ismethod(found):
        return [found.__func__, *_attributes(found.__self__)]
    if inspect.isfunction(found):
        within = inspect.unwrap(found)  # of a traced middleware's hook this is a bound method
        return _function_parts(found) if within is found else [within, *_function_parts(found)]
    if isinstance(found, type) or inspect.ismodule(found):
        return []
    return _attributes(found) if _is_users(found) else _held(found)


def _is_users(found: Any) -> bool:
    """Whether all attributes are worth a look: the user's own objects, and middleware, which holds its own models."""
    kind = type(found)
    if isinstance(found, (Runnable, BaseTool)):
        return False
    own = not kind.__module__.startswith(("langchain_core", "langgraph", "pydantic", "builtins", "typing", "openai"))
    return own and hasattr(found, "__dict__")


def _held(found: Any) -> list[Any]:
    held = getattr(found, "__dict__", {})
    parts = [held[name] for name in _HELD if name in held]
    return [*parts, *getattr(found, "tools_by_name", {}).values()]


def _attributes(owner: Any) -> list[Any]:
    return [value for value in getattr(owner, "__dict__", {}).values() if not isinstance(value, _PLAIN)]


def _function_parts(function: Any) -> list[Any]:
    parts = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:
            continue
    parts += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    return parts


def _names(code: CodeType) -> list[str]:
    """Those that a function's code and the functions, lambdas and comprehensions written in it name."""
    within = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *within]))
