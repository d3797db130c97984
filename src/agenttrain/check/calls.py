"""The turns of a trial become a table: who answered which call, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agenttrain.check.finding import counted
from agenttrain.graph.roles import model_label
from agenttrain.records import Role, RolloutResult, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one place in the graph to one model, in one role."""

    place: str
    """The node with the nodes around it, outermost first: `team:model`."""
    model: str
    """`Class:name` of the user's model."""
    role: Role
    reason: str
    n: int
    """Over all rollouts of the trial."""
    n_tokens: int
    """That the policy sampled; 0 for auxiliary calls, whose tokens are not known."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def calls_of(results: Sequence[RolloutResult]) -> tuple[Calls, ...]:
    """Most calls first."""
    by_kind: dict[tuple[str, str, Role, str], list[Turn]] = {}
    for turn in (turn for result in results for turn in result.turns):
        kind = (turn.site.place, model_label(turn.site.model_identity), turn.role, turn.role_reason)
        by_kind.setdefault(kind, []).append(turn)
    rows = [
        Calls(
            place=place,
            model=model,
            role=role,
            reason=reason,
            n=len(turns),
            n_tokens=sum(len(turn.response_ids) for turn in turns),
        )
        for (place, model, role, reason), turns in by_kind.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.n, row.place, row.model, row.role)))


def own_calls(results: Sequence[RolloutResult]) -> Mapping[str, int]:
    """Model of the user's own to how many calls it answered, most calls first."""
    turns = [turn for result in results for turn in result.turns if turn.role == "auxiliary"]
    return dict(Counter(model_label(turn.site.model_identity) for turn in turns).most_common())


def own_calls_note(results: Sequence[RolloutResult]) -> tuple[str, ...]:
    """What the check itself asked of models that may cost money."""
    made = own_calls(results)
    return (f"This check made {calls_text(made)}.",) if made else ()


def calls_text(by_model: Mapping[str, int]) -> str:
    """Example: {"ChatOpenAI:gpt-4o": 16} -> "16 calls of your own ChatOpenAI:gpt-4o"."""
    return " and ".join(f"{counted(n, 'call')} of your own {model}" for model, n in by_model.items())


def roles_by_node(calls: Sequence[Calls], nodes: Sequence[str]) -> Mapping[str, Mapping[Role, int]]:
    """Node of a drawing to how many calls of each role were made in it.

    A call in a graph that the drawing doesn't look into counts for the innermost node around it that is drawn; one in
    a graph of which nothing tells the nodes around, for the one drawn node of its name.
    """
    found: dict[str, dict[Role, int]] = {}
    for row in calls:
        node = _drawn(row.place, nodes)
        if node is not None:
            counts = found.setdefault(node, {})
            counts[row.role] = counts.get(row.role, 0) + row.n
    return found


def _drawn(place: str, nodes: Sequence[str]) -> str | None:
    parts = place.split(":")
    paths = [":".join(parts[:end]) for end in range(len(parts), 0, -1)]
    named = [node for node in nodes if node.endswith(f":{place}")]
    return next((path for path in paths if path in nodes), named[0] if len(named) == 1 else None)
