"""What must be alike on all nodes of a joined cluster is asked of each, before veRL starts there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
from agenttrain.errors import TrainerError
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agenttrain_verl.needs import NodeFree
from agenttrain_verl.worker_logs import worker_trouble

DISTRIBUTIONS = ("agenttrain", "agenttrain-verl", "verl", "TransferQueue", "tensordict", "torch", "transformers")
ANSWERS_IN_S = 120.0
"""For each node's first process: it gets what is shipped, and imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one node says of itself."""

    versions: Mapping[str, str]
    """By distribution; builds (+cpu, +cu130) left out, "none" where it isn't installed."""
    has_model: bool


def check_nodes(nodes: Sequence[NodeFree], *, model: Path, timeout_s: float = ANSWERS_IN_S) -> None:
    """Refuse a cluster whose nodes differ from this process in what is installed, or lack the policy's folder.

    Raises:
        TrainerError: names the node, what it has and what is needed.
    """
    remote = ray.remote(num_cpus=0, max_retries=0)(facts_here)
    asked = {
        node.address: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
        ).remote(str(model))
        for node in nodes
    }
    here = facts_here(str(model))
    for address, answer in asked.items():
        try:
            there = ray.get(answer, timeout=timeout_s)
        except (RayError, GetTimeoutError) as error:
            raise TrainerError(
                f"The node {address} can't run agenttrain: {worker_trouble(error)}. Install the same versions of "
                "agenttrain and agenttrain-verl[verl] on each node, as in docs/verl-cluster.md."
            ) from error
        refuse_difference(here, there, address=address, model=model)


def facts_here(model: str) -> NodeFacts:
    """Of the node that this process is on."""
    return NodeFacts(
        versions={name: _version(name) for name in DISTRIBUTIONS}, has_model=(Path(model) / "config.json").is_file()
    )


def refuse_difference(here: NodeFacts, there: NodeFacts, *, address: str, model: Path) -> None:
    """Raises:
    TrainerError: the node differs in what matters.
    """
    differ = [name for name in DISTRIBUTIONS if there.versions[name] != here.versions[name]]
    if differ:
        seen = ", ".join(f"{name} {there.versions[name]} (here {here.versions[name]})" for name in differ)
        raise TrainerError(
            f"The node {address} has {seen}. Install the same versions on each node, as in docs/verl-cluster.md."
        )
    if not there.has_model:
        raise TrainerError(
            f"The node {address} has no {model}, and the policy is too large to be shipped by Ray. Put it at that path "
            "on each node (a shared disk, or HF_HOME at one path and `hf download` there)."
        )


def _version(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "none"
