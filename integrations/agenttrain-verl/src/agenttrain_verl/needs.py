"""What a plan needs of a Ray cluster, held against its nodes.

veRL asks Ray for placement groups and waits for them without end (0.9.1: single_controller/ray/base.py), so what can't
be placed is told here, with what each node has. Knows no Ray: nodes are plain records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agenttrain.errors import TrainerError

if TYPE_CHECKING:
    from agenttrain_verl.plan import Plan

CPUS_PER_RANK = 3
"""Of a bundle of the trainer's pool (veRL 0.9.1: single_controller/ray/base.py, ResourcePoolManager)."""
CPUS_PER_APART = 2
"""Of a bundle of a replica beside the trainer (veRL 0.9.1: workers/rollout/replica.py, init_standalone)."""
CPUS_PER_UNIT = 1
"""Of the transfer queue's controller, and of each of its storage units (TransferQueue 0.1.11)."""
CPUS_TO_START = 1
"""An actor that asks for nothing needs one free CPU while it starts, and none afterwards; any node may get a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFree:
    """What one node of the cluster has, and what of it is free."""

    node_id: str
    address: str
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float

    def __str__(self) -> str:
        return (
            f"{self.address}: {self.free_gpus:g} of {self.gpus:g} GPUs and "
            f"{self.free_cpus:g} of {self.cpus:g} CPUs free"
        )

    def without(self, block: Block) -> NodeFree:
        return replace(self, free_gpus=self.free_gpus - block.gpus, free_cpus=self.free_cpus - block.cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What must be free on one node at once."""

    what: str
    gpus: int
    cpus: int

    def __str__(self) -> str:
        return f"{self.gpus} GPUs and {self.cpus} CPUs for {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan asks of a cluster."""

    blocks: tuple[Block, ...]
    """Each on one node, several may share one."""
    units: int
    """Processes of one CPU each, dealt over all nodes by their ids before anything else (TransferQueue 0.1.11:
    utils/common.py, get_node_round_robin_scheduling_strategies)."""
    loose_cpus: int
    """On any nodes."""

    @property
    def gpus(self) -> int:
        return sum(block.gpus for block in self.blocks)

    @property
    def cpus(self) -> int:
        return sum(block.cpus for block in self.blocks) + self.units + self.loose_cpus

    def shortage(self, nodes: Sequence[NodeFree]) -> str | None:
        """The first thing that finds no place, or None; the largest blocks are placed first, each where least is left.

        The storage units stand first, as they do in a run.

        Example: 2 blocks of 4 GPUs, nodes with 8 and 2 -> None; nodes with 6 and 2 -> the second block.
        """
        left = sorted(nodes, key=lambda node: node.node_id)
        for unit in range(self.units):
            at = unit % len(left) if left else 0
            if not left or left[at].free_cpus < 1:
                return "1 CPU on each node in turn for the transfer queue, whose storage is dealt over all of them"
            left[at] = left[at].without(UNIT)
        for block in sorted(self.blocks, key=lambda block: -block.gpus):
            fitting = [
                i for i, node in enumerate(left) if node.free_gpus >= block.gpus and node.free_cpus >= block.cpus
            ]
            if not fitting:
                return f"{block}, beside the transfer queue's storage" if self.units else str(block)
            best = min(fitting, key=lambda i: (left[i].free_gpus, left[i].free_cpus))
            left[best] = left[best].without(block)
        return self._shortage_to_start(left)

    def _shortage_to_start(self, left: Sequence[NodeFree]) -> str | None:
        """What is left once all that is placed on one node stands."""
        if any(node.cpus and node.free_cpus < CPUS_TO_START for node in left):
            return f"{CPUS_TO_START} CPU on each node for a rollout worker that starts"
        if sum(int(node.free_cpus) for node in left) < self.loose_cpus:
            return f"{self.loose_cpus} CPUs for the transfer queue and for processes that start"
        return None


UNIT = Block(what="a storage unit", gpus=0, cpus=CPUS_PER_UNIT)


def storage_units(plan: Plan) -> int:
    """Processes that hold the rows of a step on their way to the trainer."""
    return 1 if plan.settings.nodes == 1 else 2 * plan.settings.nodes


def needs_of(plan: Plan) -> Needs:
    """What veRL will ask Ray for."""
    settings, per_node, span = plan.settings, plan.ranks_per_node, plan.settings.tensor_parallel
    ranks = Block(what=f"{per_node} trainer ranks", gpus=per_node, cpus=CPUS_PER_RANK * per_node)
    blocks = [ranks] * settings.nodes
    if settings.mode == "separate_async":
        blocks += [Block(what="a replica", gpus=span, cpus=CPUS_PER_APART * span)] * plan.n_replicas
    return Needs(blocks=tuple(blocks), units=storage_units(plan), loose_cpus=CPUS_PER_UNIT + CPUS_TO_START)


def check(needs: Needs, nodes: Sequence[NodeFree], *, address: str) -> None:
    """Refuse a cluster that the plan does not fit on.

    Raises:
        TrainerError: what finds no place, what each node has, and what to change.
    """
    missing = needs.shortage(nodes)
    if missing is None:
        return
    seen = "; ".join(str(node) for node in nodes) or "no node"
    raise TrainerError(
        f"The Ray cluster at {address} has no place for {missing}. It has {seen}; the run needs {needs.gpus} GPUs and "
        f"{needs.cpus} CPUs, all that is of one kind on one node. Free what other jobs hold (ray status), add nodes, "
        "or set verl.nodes, verl.ranks_per_node and verl.replicas to what is there. On nodes without GPUs, "
        "`ray start --num-gpus=N` gives veRL the places that it counts by."
    )
