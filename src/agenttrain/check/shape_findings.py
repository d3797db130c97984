"""A graph as it can be seen before it runs becomes findings: models, selectors, caches, what rollouts would share."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.check.finding import Finding, error, warning
from agenttrain.check.roles import UndeclaredModel
from agenttrain.errors import RoleError
from agenttrain.graph.roles import Identity, check_nodes, lines_to_paste, model_label
from agenttrain.graph.shape import GraphShape, Shared
from agenttrain.trainable import Trainable

APART = "Nothing need be done for training."
UNNAMED = "LangGraph"
"""What LangGraph calls a graph that was compiled without `name=`."""


def shape_findings(shape: GraphShape, noted: Trainable | None) -> list[Finding]:
    """What the nodes hold and are compiled with; the same of several graphs that have no name is told once."""
    found = []
    if shape.cached:
        found.append(warning("node_cache", _listed(shape.cached), "A cache keeps what these nodes gave."))
    found += [warning("llm_cache", where, "It keeps the answers of models.") for where in shape.llm_caches]
    found += [
        _shared("shared_checkpointer", held, "LangGraph checkpointer") for held in dict.fromkeys(shape.checkpointers)
    ]
    found += [_shared("shared_store", held, "store") for held in dict.fromkeys(shape.stores)]
    waits = waiting_places(shape)
    if waits and (noted is None or noted.on_interrupt is None):
        text = "The graph may wait for a human there, and nothing answers for one: such a rollout has no reward."
        found.append(warning("unscripted_interrupt", waits, text))
    return found


def waiting_places(shape: GraphShape) -> str:
    """The nodes where a graph may wait for a human, as far as it can be seen; empty: none is seen."""
    return _listed(tuple(dict.fromkeys((*shape.breakpoints, *shape.interrupting))))


def selector_findings(noted: Trainable | None, nodes: Sequence[str]) -> tuple[list[Finding], tuple[str, ...]]:
    """(selectors that misspell a node, notes on those whose nodes are not seen yet)."""
    findings, notes = list[Finding](), list[str]()
    selectors = {"train": noted.train, "frozen": noted.frozen, "auxiliary": noted.auxiliary} if noted else {}
    for keyword, written in selectors.items():
        for selector in written:
            try:
                notes += check_nodes({keyword: (selector,)}, nodes)
            except RoleError as refused:
                findings.append(error("selector_unmatched", f"{keyword}=[{selector!r}]", str(refused)))
    return findings, tuple(notes)


def undeclared_models(models: Sequence[Identity], noted: Trainable | None) -> tuple[Identity, ...]:
    """Models that can be seen before the graph runs; none where something is declared, since only calls can tell."""
    declares = noted is not None and bool(noted.train or noted.frozen or noted.auxiliary)
    return () if declares else tuple(models)


def second_model_findings(
    seen: Sequence[Identity], called: Sequence[UndeclaredModel], *, one: Identity | None
) -> list[Finding]:
    """One finding a model of which nothing was declared; what its calls told goes before what was seen in the code.

    Args:
        seen: models of the code.
        called: those beside the trained one that calls were made to.
        one: the trained one. None: no call was made, and the first that was seen is taken for it.
    """
    trained = one or next(iter(seen), None)
    if trained is None:
        return []
    found = {
        identity: UndeclaredModel(identity=identity, beside=trained, node=None, detected=None)
        for identity in seen
        if identity != trained
    }
    found |= {model.identity: model for model in called}
    return [_second_model(model) for model in found.values()]


def _second_model(model: UndeclaredModel) -> Finding:
    label, one = model_label(model.identity), model_label(model.beside)
    by = f"Node {model.node!r} calls {label}" if model.node else f"The graph holds {label}"
    why = f" ({model.detected})" if model.detected else ""
    return error(
        "second_model",
        f"node {model.node}" if model.node else label,
        f"{by}{why} beside {one}, and nothing says who answers it.",
        fix=f"Add to @trainable: {' or '.join(lines_to_paste(model.identity, model.node, model.beside))}.",
    )


def _shared(code: str, held: Shared, what: str) -> Finding:
    where = "a graph without a name" if held.graph == UNNAMED else held.graph
    text = f"A {what} is compiled into {where}, {held.kind}"
    if held.apart:
        return warning(code, where, f"{text}. Rollouts don't share it: each has its own in memory.", fix=APART)
    return warning(code, where, f"{text}, outside of this process: all rollouts share it.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
