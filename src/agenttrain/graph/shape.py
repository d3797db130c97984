"""A compiled graph becomes its drawing and what it shares: nodes, edges, caches, LangGraph checkpointers, stores.

Only looked at, as in `graph.models`: nothing is called or changed, and what is made inside a node is not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import interrupt

from agenttrain.graph.models import objects_of
from agenttrain.graph.runnable import RunnableGraph
from agenttrain.graph.site import model_identity

START, END = "__start__", "__end__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A way from one node to another."""

    source: str
    target: str
    conditional: bool
    """Taken only sometimes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Something that a graph was compiled with and that outlives a rollout."""

    graph: str
    kind: str
    """Its class."""
    apart: bool
    """Each rollout has its own in place of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What can be seen of a graph before it runs."""

    nodes: tuple[str, ...]
    """In the order in which they were added, `__start__` and `__end__` among them; a subgraph's as `team:model`."""
    edges: tuple[Edge, ...]
    cached: tuple[str, ...]
    """Nodes and tasks with a cache policy, where a cache is compiled in."""
    checkpointers: tuple[Shared, ...]
    """LangGraph checkpointers, that of the graph itself first."""
    stores: tuple[Shared, ...]
    llm_caches: tuple[str, ...]
    """`set_llm_cache` or a model that has a cache of its own, in words."""
    breakpoints: tuple[str, ...]
    """Nodes that the graph stops before or after."""
    interrupting: tuple[str, ...]
    """Nodes whose code asks a human by `interrupt()`; a subgraph's as `team:approve`."""
    asking: tuple[str, ...] = ()
    """Nodes whose code holds a chat model, named likewise."""


def shape_of(runnable: RunnableGraph) -> GraphShape:
    """The shape of the user's own graph, with what a rollout's copy leaves out."""
    graph = runnable.compiled
    seen = list(objects_of(graph))
    pregels = [found for found in seen if isinstance(found, Pregel)]
    nodes, edges = _drawing(graph)
    return GraphShape(
        nodes=nodes,
        edges=edges,
        cached=tuple(dict.fromkeys(_cached(seen))) if any(each.cache is not None for each in pregels) else (),
        checkpointers=tuple(_checkpointers(graph, pregels)),
        stores=tuple(_stores(pregels)),
        llm_caches=tuple(dict.fromkeys(_llm_caches(seen))),
        breakpoints=tuple(dict.fromkeys(_breakpoints(graph))),
        interrupting=tuple(_nodes_where(graph, _asks_human)),
        asking=tuple(_nodes_where(graph, _holds_model)),
    )


def _drawing(graph: Any) -> tuple[tuple[str, ...], tuple[Edge, ...]]:
    """Nodes and edges as LangGraph draws them; subgraphs are looked into where it can."""
    for xray in (True, False):
        try:
            drawn = graph.get_graph(xray=xray)
        except Exception:  # langgraph 1.2 draws no graph whose branches name nodes that a subgraph renames
            continue
        edges = [Edge(source=e.source, target=e.target, conditional=bool(e.conditional)) for e in drawn.edges]
        return tuple(drawn.nodes), tuple(dict.fromkeys(edges))
    return tuple(graph.nodes), ()


def _cached(seen: list[Any]) -> Iterator[str]:
    for found in seen:
        if isinstance(found, Pregel):
            yield from (name for name, node in found.nodes.items() if node.cache_policy is not None)
            if found.cache_policy is not None:
                yield str(found.name)
        elif getattr(found, "cache_policy", None) is not None and hasattr(found, "func"):
            yield str(getattr(found.func, "__name__", "a task"))


def _checkpointers(graph: Any, pregels: list[Pregel[Any, Any, Any, Any]]) -> Iterator[Shared]:
    """Those of a graph's own; True and False only say where to look for one."""
    for pregel in pregels:
        held = pregel.checkpointer
        if held is not None and not isinstance(held, bool):
            apart = pregel is graph or isinstance(held, InMemorySaver)
            yield Shared(graph=str(pregel.name), kind=type(held).__name__, apart=apart)


def _stores(pregels: list[Pregel[Any, Any, Any, Any]]) -> Iterator[Shared]:
    for pregel in pregels:
        if pregel.store is not None:
            apart = isinstance(pregel.store, InMemoryStore)
            yield Shared(graph=str(pregel.name), kind=type(pregel.store).__name__, apart=apart)


def _llm_caches(seen: list[Any]) -> Iterator[str]:
    cache = get_llm_cache()
    if cache is not None:
        yield f"set_llm_cache({type(cache).__name__})"
    for found in seen:
        own = getattr(found, "cache", None) if isinstance(found, BaseChatModel) else None
        if own not in (None, False, True):
            model_class, name, _ = model_identity(found)
            yield f"{type(own).__name__} of {model_class} {name}".strip()


def _breakpoints(graph: Any) -> Iterator[str]:
    for names in (graph.interrupt_before_nodes, graph.interrupt_after_nodes):
        yield from (["every node"] if names == "*" else names)


def _nodes_where(graph: Any, is_so: Callable[[Any], bool], around: str = "") -> Iterator[str]:
    for name, node in graph.nodes.items():
        if isinstance(node.bound, Pregel):
            yield from _nodes_where(node.bound, is_so, f"{around}{name}:")
        elif is_so(node.bound):
            yield f"{around}{name}"


def _holds_model(bound: Any) -> bool:
    return any(isinstance(found, BaseChatModel) for found in objects_of(bound))


def _asks_human(bound: Any) -> bool:
    """Whether some function that is reached from here has `interrupt` among its globals and names it."""
    return any(
        inspect.isfunction(found)
        and "interrupt" in found.__code__.co_names
        and found.__globals__.get("interrupt") is interrupt
        for found in objects_of(bound)
    )
