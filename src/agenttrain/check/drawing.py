"""A graph's shape and its calls become lines for the terminal, and mermaid text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agenttrain.graph.shape import END, START, Edge, GraphShape
from agenttrain.records import Role

ALWAYS, SOMETIMES = "→", "⇢"
COLOURS: Mapping[Role, str] = {"trained": "#2e7d32", "frozen": "#b26a00", "auxiliary": "#455a64"}
RolesByNode = Mapping[str, Mapping[Role, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnNode:
    """One node as it is drawn."""

    name: str
    depth: int
    """How many graphs it lies in, 0 in the graph itself."""
    role: Role | None
    """Of most of its calls. None: it made none."""
    calls: str
    """Example: "trained 24, frozen 2"."""
    ways: str
    """Where it leads: → always, ⇢ sometimes."""


def drawn(shape: GraphShape, roles: RolesByNode) -> tuple[DrawnNode, ...]:
    """The nodes in the order in which they are reached, each with the ways out of it; borders of subgraphs left out."""
    out = _ways_out(shape.edges)
    return tuple(
        DrawnNode(
            name=_shown(node),
            depth=node.count(":"),
            role=_main_role(roles.get(node, {})),
            calls=_calls_text(roles.get(node, {})),
            ways="   ".join(_way(edge) for edge in out.get(node, ())),
        )
        for node in _in_order(shape.nodes, out)
        if node != END and not _is_border(node)
    )


def mermaid(shape: GraphShape, roles: RolesByNode) -> str:
    """The graph as mermaid text, with a class for each role."""
    ends_of_edges = (node for edge in shape.edges for node in (edge.source, edge.target))
    lines, ids = ["graph TD"], _ids((*shape.nodes, *ends_of_edges))
    for node in shape.nodes:
        text = "<br/>".join(part for part in (_quoted(_shown(node)), _calls_text(roles.get(node, {}))) if part)
        role = _main_role(roles.get(node, {}))
        ends = ("([", "])") if node in (START, END) else ("[", "]")
        lines.append(f'  {ids[node]}{ends[0]}"{text}"{ends[1]}{f":::{role}" if role else ""}')
    arrows = {True: "-.->", False: "-->"}
    lines += [f"  {ids[edge.source]} {arrows[edge.conditional]} {ids[edge.target]}" for edge in shape.edges]
    lines += [f"  classDef {role} fill:{colour},color:#fff" for role, colour in COLOURS.items()]
    return "\n".join(lines)


def _ways_out(edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    """Node to the ways out of it; one into or out of a subgraph leads to what comes behind its border."""
    direct: dict[str, list[Edge]] = {}
    for edge in edges:
        direct.setdefault(edge.source, []).append(edge)
    return {
        node: list({way.target: way for edge in ways for way in _behind_borders(edge, direct, frozenset())}.values())
        for node, ways in direct.items()
    }


def _behind_borders(edge: Edge, direct: Mapping[str, Sequence[Edge]], passed: frozenset[str]) -> Iterator[Edge]:
    if not _is_border(edge.target) or edge.target in passed:
        yield edge
        return
    for way in direct.get(edge.target, ()):
        onward = Edge(source=edge.source, target=way.target, conditional=edge.conditional or way.conditional)
        yield from _behind_borders(onward, direct, passed | {edge.target})


def _is_border(node: str) -> bool:
    """Whether it is a subgraph's own start or end."""
    return node.endswith((f":{START}", f":{END}"))


def _in_order(nodes: Sequence[str], out: Mapping[str, Sequence[Edge]]) -> list[str]:
    """Breadth first from the start; then what no edge leads to."""
    order: list[str] = []
    waiting = [START] if START in nodes else list(nodes[:1])
    for node in waiting:
        if node not in order:
            order.append(node)
            waiting += [edge.target for edge in out.get(node, ())]
    return [*order, *(node for node in nodes if node not in order)]


def _way(edge: Edge) -> str:
    return f"{SOMETIMES if edge.conditional else ALWAYS} {_shown(edge.target)}"


def _shown(node: str) -> str:
    return node.replace("__start__", "start").replace("__end__", "end")


def _main_role(counts: Mapping[Role, int]) -> Role | None:
    return max(counts, key=lambda role: counts[role], default=None)


def _calls_text(counts: Mapping[Role, int]) -> str:
    return ", ".join(f"{role} {n}" for role, n in sorted(counts.items(), key=lambda pair: -pair[1]))


def _quoted(text: str) -> str:
    """As mermaid takes it between quotation marks. Example: "<lambda>" -> "&lt;lambda&gt;"."""
    return html.escape(text, quote=False).replace('"', "#quot;")


def _ids(nodes: Sequence[str]) -> dict[str, str]:
    """A mermaid id for each node, no two alike; the end of it keeps mermaid's own words, such as end, out."""
    ids: dict[str, str] = {}
    for node in dict.fromkeys(nodes):
        id = re.sub(r"\W", "_", node) + "_"
        while id in ids.values():
            id += "_"
        ids[node] = id
    return ids
