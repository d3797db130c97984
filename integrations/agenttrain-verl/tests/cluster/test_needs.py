"""What a plan needs of a cluster's nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from agenttrain.config import resolve
from agenttrain.errors import TrainerError

from agenttrain_verl.needs import Block, Needs, NodeFree, check, needs_of
from agenttrain_verl.plan import Plan, plan_of

POLICY = Path(__file__).parents[4] / "examples" / "order-desk" / "policy"


def node(address: str, gpus: float, cpus: float) -> NodeFree:
    return NodeFree(node_id=address, address=address, gpus=gpus, cpus=cpus, free_gpus=gpus, free_cpus=cpus)


def plan(**verl: object) -> Plan:
    return plan_of(resolve(("test", {"trainer": {"name": "verl"}, "plugins": {"verl": verl}})), POLICY, n_tasks=20)


def test_ranks_stand_together_on_each_node() -> None:
    needs = needs_of(plan(nodes=2, ranks_per_node=2, device="cpu"))
    assert [(block.gpus, block.cpus) for block in needs.blocks] == [(2, 6), (2, 6)]
    assert (needs.gpus, needs.units, needs.loose_cpus, needs.cpus) == (4, 4, 2, 18)


def test_blocks_find_places_where_least_is_left() -> None:
    needs = Needs(blocks=(Block(what="a", gpus=4, cpus=4), Block(what="b", gpus=2, cpus=4)), units=0, loose_cpus=2)
    assert needs.shortage([node("big", 4, 8), node("small", 2, 8)]) is None


def test_a_block_is_never_spread_over_nodes() -> None:
    needs = Needs(blocks=(Block(what="4 trainer ranks", gpus=4, cpus=12),), units=0, loose_cpus=0)
    assert needs.shortage([node("a", 2, 64), node("b", 2, 64)]) == "4 GPUs and 12 CPUs for 4 trainer ranks"


def test_what_starts_needs_cpus_beside_the_blocks() -> None:
    needs = Needs(blocks=(Block(what="a", gpus=1, cpus=3),), units=0, loose_cpus=10)
    assert needs.shortage([node("a", 1, 12)]) == "10 CPUs for the transfer queue and for processes that start"
    assert needs.shortage([node("a", 1, 13)]) is None


def test_the_queues_storage_takes_its_share_of_each_node_before_the_ranks() -> None:
    """A node with 4 CPUs gets 2 units, and the 3 CPUs of its rank would be waited for without end."""
    needs = needs_of(plan(nodes=2, ranks_per_node=1, device="cpu"))
    missing = needs.shortage([node("head", 1, 16), node("small", 1, 4)])
    assert missing == "1 GPUs and 3 CPUs for 1 trainer ranks, beside the transfer queue's storage"
    assert (
        needs.shortage([node("head", 1, 16), node("small", 1, 5)])
        == "1 CPU on each node for a rollout worker that starts"
    )
    assert needs.shortage([node("head", 1, 16), node("small", 1, 6)]) is None


def test_the_queues_storage_needs_a_cpu_on_every_node() -> None:
    needs = Needs(blocks=(), units=4, loose_cpus=0)
    assert "1 CPU on each node in turn" in str(needs.shortage([node("a", 1, 16), node("b", 1, 0)]))


def test_a_cluster_without_a_place_is_refused_with_what_each_node_has() -> None:
    needs = Needs(blocks=(Block(what="8 trainer ranks", gpus=8, cpus=24),), units=0, loose_cpus=10)
    taken = replace(node("10.0.0.2", 8, 64), free_gpus=4.0)
    with pytest.raises(TrainerError) as refused:
        check(needs, [node("10.0.0.1", 0, 16), taken], address="10.0.0.1:6379")
    text = str(refused.value)
    assert "The Ray cluster at 10.0.0.1:6379 has no place for 8 GPUs and 24 CPUs for 8 trainer ranks." in text
    assert "10.0.0.1: 0 of 0 GPUs and 16 of 16 CPUs free; 10.0.0.2: 4 of 8 GPUs and 64 of 64 CPUs free" in text
    assert "needs 8 GPUs and 34 CPUs" in text
