"""Turns of one rollout become Trajectories: root-to-leaf token paths.

A turn continues the turn that it `extends` when its prompt ids begin with that turn's prompt and response ids. Of
several continuations of one turn the first goes on in the same trajectory; each other one begins a new trajectory,
with the whole history as its prompt. So every turn lies in exactly one trajectory, and every sampled id has exactly
one place: trained once, or at mask 0 for a reason that its span names.

Three kinds of sampled ids stand at mask 0: those of frozen calls, those of a node attempt that LangGraph retried (the
graph threw its answer away, so it did not lead to the reward), and those of calls that the engine aborted (their
answer never reached the graph). A retried attempt whose answer lives on in a later prompt did lead there: trained.

The routed experts of a trajectory begin with the rows of the turns that its prompt came from. A turn's last id was
read by the turn that continues it, which holds its row; the last id of a leaf has none.

The result depends on what the turns hold and not on the order in which parallel calls came in. Nothing here knows
rewards or statuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.errors import CaptureError
from agenttrain.records import BreakCause, RoutedExperts, Trajectory, Turn, TurnSpan

SUPERSEDED = "dropped: superseded by a retry"
ABORTED = "dropped: aborted before the graph had the answer"


@dataclass(slots=True, kw_only=True)
class _Node:
    """A turn and the turns that continue it."""

    turn: Turn
    untrained: str
    """Why its sampled ids stand at mask 0; empty when they are trained."""
    parent: _Node | None = None
    """None: it began a trajectory."""
    children: list[_Node] = field(default_factory=list)


def trajectories(turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    """The token paths of one rollout.

    Args:
        turns: of one rollout, in any order; auxiliary turns hold no ids and are passed over.

    Returns:
        Trajectories in a fixed order; each turn of the policy lies in exactly one of them. The first is said to have
        begun with the first turn, since of parallel first calls any may have come in first.

    Raises:
        CaptureError: two different turns have one id.
    """
    roots = sorted(_forest(_policy_turns(turns)), key=_order)
    chains: list[tuple[list[_Node], BreakCause]] = []
    for root, cause in zip(roots, _root_causes(roots), strict=True):
        _walk(root, cause, chains)
    return tuple(_trajectory(chain, cause, index) for index, (chain, cause) in enumerate(chains))


def extends_exactly(turn: Turn, parent: Turn) -> bool:
    """Whether the prompt of a turn begins with all that another turn saw and sampled."""
    n, m = len(parent.prompt_ids), len(parent.prompt_ids) + len(parent.response_ids)
    prompt = turn.prompt_ids
    return len(prompt) >= m and prompt[:n] == parent.prompt_ids and prompt[n:m] == parent.response_ids


def _policy_turns(turns: Sequence[Turn]) -> dict[str, Turn]:
    by_id: dict[str, Turn] = {}
    for turn in turns:
        if turn.role == "auxiliary" or not turn.response_ids:
            continue
        if by_id.setdefault(turn.id, turn) != turn:
            raise CaptureError(f"Turn {turn.id} was given twice with different content. Each call has its own id.")
    return by_id


def _parents(by_id: Mapping[str, Turn]) -> dict[str, Turn]:
    """Turn id to the turn that it goes on from; those that began a trajectory are left out."""
    said = ((turn, by_id.get(turn.extends or "")) for turn in by_id.values())
    return {turn.id: parent for turn, parent in said if parent is not None and extends_exactly(turn, parent)}


def _forest(by_id: Mapping[str, Turn]) -> list[_Node]:
    parents = _parents(by_id)
    reasons = _reasons(by_id, parents)
    nodes = {id: _Node(turn=turn, untrained=reasons.get(id, "")) for id, turn in by_id.items()}
    for id, parent in parents.items():
        nodes[id].parent = nodes[parent.id]
        nodes[parent.id].children.append(nodes[id])
    return [node for node in nodes.values() if node.parent is None]


def _reasons(by_id: Mapping[str, Turn], parents: Mapping[str, Turn]) -> dict[str, str]:
    """Turn id to why its ids are not trained; turns that are trained are left out."""
    superseded = _superseded(by_id, parents)
    reasons = {}
    for id, turn in by_id.items():
        if turn.role == "frozen":
            reasons[id] = f"frozen: {turn.role_reason}"
        elif id in superseded:
            reasons[id] = SUPERSEDED
        elif turn.stop_reason == "aborted":
            reasons[id] = ABORTED
    return reasons


def _superseded(by_id: Mapping[str, Turn], parents: Mapping[str, Turn]) -> set[str]:
    """Ids of turns of node attempts that were retried, unless a turn that counts goes on from them."""
    executions, last = {id: turn.site.executions for id, turn in by_id.items()}, dict[str, int]()
    for attempts in executions.values():
        for execution, attempt in attempts.items():
            last[execution] = max(last.get(execution, attempt), attempt)
    retried = {id for id, attempts in executions.items() if any(n < last[each] for each, n in attempts.items())}
    live: set[str] = set()
    for id in by_id.keys() - retried:
        while (parent := parents.get(id)) is not None and parent.id not in live:
            live.add(parent.id)
            id = parent.id
    return retried - live


def _order(node: _Node) -> tuple[Any, ...]:
    """Sorts the continuations of one turn, and the roots: what counts first, then by place in the graph and content."""
    turn, site = node.turn, node.turn.site
    return (
        node.untrained == SUPERSEDED,
        bool(node.untrained),
        site.checkpoint_ns.count("|"),
        site.step or 0,
        ns_names(site.checkpoint_ns),
        site.node or "",
        site.path,
        site.attempt,
        turn.prompt_ids,
        turn.response_ids,
        turn.response_logprobs,
        turn.sampling.seed if turn.sampling else 0,
        turn.id,
    )


def ns_names(checkpoint_ns: str) -> str:
    """The node names of a checkpoint namespace, without the ids that differ in every run."""
    return "|".join(part.partition(":")[0] for part in checkpoint_ns.split("|"))


def _walk(start: _Node, cause: BreakCause, chains: list[tuple[list[_Node], BreakCause]]) -> None:
    """Add the chain from `start` to its leaf, then the chains that branch off, the earliest branch first."""
    chain, branches = [start], []
    while chain[-1].children:
        first, *others = sorted(chain[-1].children, key=_order)
        branches += [(other, _branch_cause(other, first)) for other in others]
        chain.append(first)
    chains.append((chain, cause))
    for branch, why in branches:
        _walk(branch, why, chains)


def _root_causes(roots: Sequence[_Node]) -> list[BreakCause]:
    """Why each root began. Any of parallel first calls may have come in first; the one that sorts first is it."""
    causes: list[BreakCause] = [root.turn.break_cause or "template" for root in roots]
    if "first_turn" in causes:
        causes[causes.index("first_turn")] = causes[0]
    return ["first_turn", *causes[1:]] if causes else []


def _branch_cause(branch: _Node, first: _Node) -> BreakCause:
    mine, other = branch.turn.site, first.turn.site
    if mine.retries(other) or other.retries(mine):
        return "retry"
    same_step = mine.step == other.step and mine.checkpoint_ns.count("|") == other.checkpoint_ns.count("|")
    return "parallel_sibling" if same_step else "history_rewritten"


def _trajectory(chain: Sequence[_Node], cause: BreakCause, index: int) -> Trajectory:
    """Lay the turns of one chain end to end, with the context between them at mask 0."""
    head = chain[0].turn
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    spans: list[TurnSpan] = []
    for node in chain:
        turn, n_before = node.turn, len(head.prompt_ids) + len(ids)
        context = turn.prompt_ids[n_before:]
        n_sampled, trained = len(turn.response_ids), not node.untrained
        ids += [*context, *turn.response_ids]
        mask += [0] * len(context) + [int(trained)] * n_sampled
        logprobs += [0.0] * len(context) + (list(turn.response_logprobs) if trained else [0.0] * n_sampled)
        versions += [-1] * len(context) + (list(turn.weight_versions) if trained else [-1] * n_sampled)
        spans.append(
            TurnSpan(turn_id=turn.id, start=len(ids) - n_sampled, end=len(ids), trained=trained, reason=node.untrained)
        )
    return Trajectory(
        rollout_id=head.rollout_id,
        index=index,
        prompt_ids=head.prompt_ids,
        response_ids=tuple(ids),
        response_mask=tuple(mask),
        response_logprobs=tuple(logprobs),
        weight_versions=tuple(versions),
        spans=tuple(spans),
        break_cause=cause,
        routed_experts=_experts(chain[-1]),
    )


def _experts(leaf: _Node) -> RoutedExperts | None:
    """Of the whole path to a leaf, whatever trajectories its turns lie in. None: not known of every turn."""
    parts, node = [leaf.turn.routed_experts], leaf
    while node.parent is not None:
        node = node.parent
        parts.append(node.turn.routed_experts)
    return RoutedExperts.of_path(parts[::-1])
