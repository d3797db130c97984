"""A graph's shape and its calls as lines and as mermaid text."""

from __future__ import annotations

from dataclasses import replace

from agenttrain.check.calls import Calls, calls_of, roles_by_node
from agenttrain.check.drawing import drawn, mermaid
from agenttrain.graph.shape import Edge, GraphShape


def edge(source: str, target: str, *, conditional: bool = False) -> Edge:
    return Edge(source=source, target=target, conditional=conditional)


SHAPE = GraphShape(
    nodes=("__start__", "plan", "team:__start__", "team:model", "team:__end__", "__end__"),
    edges=(
        edge("__start__", "plan"),
        edge("plan", "team:__start__", conditional=True),
        edge("plan", "__end__", conditional=True),
        edge("team:__start__", "team:model"),
        edge("team:model", "team:__end__"),
        edge("team:__end__", "plan"),
    ),
    cached=(),
    checkpointers=(),
    stores=(),
    llm_caches=(),
    breakpoints=(),
    interrupting=(),
)


def calls(place: str, role: str, n: int) -> Calls:
    return Calls(place=place, model="m", role=role, reason="", n=n, n_tokens=0)  # type: ignore[arg-type]


CALLS = (calls("team:model", "trained", 4), calls("team:model", "frozen", 1), calls("plan:inner", "auxiliary", 2))


def test_a_call_counts_for_the_innermost_node_that_is_drawn() -> None:
    """A graph that a node calls by itself is not drawn."""
    roles = roles_by_node((*CALLS, calls("nowhere", "trained", 1)), SHAPE.nodes)
    assert roles == {"team:model": {"trained": 4, "frozen": 1}, "plan": {"auxiliary": 2}}


def test_lines() -> None:
    """Ways lead through the borders of a subgraph; the role of most calls is the node's."""
    nodes = drawn(SHAPE, roles_by_node(CALLS, SHAPE.nodes))
    assert [(node.name, node.depth, node.role, node.calls, node.ways) for node in nodes] == [
        ("start", 0, None, "", "→ plan"),
        ("plan", 0, "auxiliary", "auxiliary 2", "⇢ team:model   ⇢ end"),
        ("team:model", 1, "trained", "trained 4, frozen 1", "→ plan"),
    ]


def test_mermaid() -> None:
    text = mermaid(SHAPE, roles_by_node(CALLS, SHAPE.nodes)).split("\n")
    assert text[0] == "graph TD"
    assert '  team_model_["team:model<br/>trained 4, frozen 1"]:::trained' in text
    assert '  __start___(["start"])' in text
    assert "  plan_ -.-> __end___" in text
    assert "  __start___ --> plan_" in text
    assert text[-3:] == [
        "  classDef trained fill:#2e7d32,color:#fff",
        "  classDef frozen fill:#b26a00,color:#fff",
        "  classDef auxiliary fill:#455a64,color:#fff",
    ]


def test_mermaid_of_names_that_it_would_take_for_its_own() -> None:
    """No two nodes have one id, and a name's signs are text."""
    shape = replace(SHAPE, nodes=("a-b", "a_b", '<lambda> "x"'), edges=(edge("a-b", "a_b"),))
    assert mermaid(shape, {}).split("\n")[1:5] == [
        '  a_b_["a-b"]',
        '  a_b__["a_b"]',
        '  _lambda___x__["&lt;lambda&gt; #quot;x#quot;"]',
        "  a_b_ --> a_b__",
    ]


def test_a_call_that_forgot_the_nodes_around_it_counts_for_the_one_node_of_its_name() -> None:
    """Nothing tells what stands around it; where two nodes have that name, none is guessed."""
    roles = roles_by_node((calls("model", "trained", 2),), SHAPE.nodes)
    assert roles == {"team:model": {"trained": 2}}
    assert roles_by_node((calls("model", "trained", 2),), (*SHAPE.nodes, "other:model")) == {}


def test_no_call_is_an_empty_table() -> None:
    assert calls_of([]) == ()
