"""Two nodes of a Ray cluster, as Ray's own test utility simulates them: a graph reaches the second one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from agenttrain.capture.store import SqliteStore
from agenttrain.config import Config, resolve
from agenttrain.errors import TrainerError
from agenttrain.plugins import Plugins
from agenttrain.protocols import EngineContext
from agenttrain.records import RolloutRequest, RolloutSpec
from agenttrain.rollout import open_runner_of
from agenttrain.tasks import read_tasks
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agenttrain_verl.cluster import Cluster, set_variables
from agenttrain_verl.plan import Plan, plan_of
from agenttrain_verl.ray_folder import RayFolder
from agenttrain_verl.shipping import resolved, runtime_env

pytestmark = pytest.mark.long

DESK = Path(__file__).parents[4] / "examples" / "order-desk"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Each with places for one rank; the second one has one more."""
    from ray.cluster_utils import Cluster as Nodes

    set_variables(own=True)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no process of a node finds this module
    folder = RayFolder.make()
    head = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 10**8, "temp_dir": str(folder.path)}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=4, num_gpus=1, object_store_memory=10**8)
    yield nodes
    nodes.shutdown()
    folder.remove()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def config() -> Config:
    tables = {"trainer": {"name": "verl"}, "limits": {"turns": 8, "tokens": 640}, "renderer": {"family": "default"}}
    return resolve(("test", tables))


def plan_at(address: str, **verl: Any) -> Plan:
    given = config().model_dump()
    given["plugins"] = {"verl": {"address": address, "device": "cpu", **verl}}
    return plan_of(resolve(("test", given)), DESK / "policy", n_tasks=20)


def rolled_out(spec: RolloutSpec, folder: str) -> dict[str, Any]:
    """One rollout with the local engine, in a process of a node."""
    spec = resolved(spec)
    config = Config.model_validate(dict(spec.config))
    engine = Plugins.load(only=None).engine("local")(EngineContext(config=config, model=spec.model))
    store = SqliteStore(Path(folder))
    try:
        with open_runner_of(spec, store=store) as runner:
            task = read_tasks(runner.loaded.file.parent / "tasks.jsonl")[0]
            result = runner.run(RolloutRequest(task=task, phase="train", step=1), engine)
            return {
                "node": ray.get_runtime_context().get_node_id(),
                "graph": str(runner.loaded.file),
                "verifier": sys.modules[runner.loaded.target.__module__].__file__,
                "cwd": os.getcwd(),
                "status": result.rollout.status,
                "n_sampled": result.rollout.n_sampled_ids,
            }
    finally:
        engine.close()
        store.close()


def test_a_graph_is_shipped_to_the_second_node_and_rolls_out_there(two_nodes: Any, tmp_path: Path) -> None:
    spec = RolloutSpec(
        graph_file=str(DESK / "graph.py"),
        attribute=None,
        config=config().model_dump(mode="json"),
        run_dir=str(tmp_path / "run"),
        model=str(DESK / "policy"),
    )
    plan = plan_at(two_nodes.address, nodes=2, ranks_per_node=1)
    env, shipped = runtime_env(plan, spec, joined=True, run_dir=tmp_path / "run")
    cluster = Cluster.open(replace(plan, model=Path(shipped.model)), run_dir=tmp_path / "run", runtime_env=env)
    try:
        assert not cluster.is_own
        assert cluster.n_nodes == 2
        (other,) = (node.node_id for node in cluster.nodes() if node.node_id != cluster.node_id)
        there = NodeAffinitySchedulingStrategy(node_id=other, soft=False)
        Path(env["env_vars"]["AGENTTRAIN_VERL_SHIPPED"]).unlink()  # the driver's own, which a second machine has not
        facts = ray.get(
            ray.remote(rolled_out).options(scheduling_strategy=there).remote(shipped, str(tmp_path / "there"))
        )
    finally:
        cluster.close()
    assert facts["node"] == other
    assert facts["graph"] == f"{facts['cwd']}/graph-files/graph.py" == facts["verifier"]
    assert "working_dir_files" in facts["cwd"]
    assert not facts["graph"].startswith(str(DESK))
    assert facts["status"] in ("completed", "truncated", "budget_exhausted", "policy_failure")
    assert facts["n_sampled"] > 0


def test_a_cluster_that_is_too_small_is_refused_before_anything_waits(two_nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"has no place for 2 GPUs and 6 CPUs for 2 trainer ranks\. It has "):
        Cluster.open(
            plan_at(two_nodes.address, nodes=1, ranks_per_node=2), run_dir=tmp_path, runtime_env={}, patience_s=1.0
        )
    assert not ray.is_initialized()


def test_a_policy_that_is_not_on_a_node_is_told(two_nodes: Any, tmp_path: Path) -> None:
    plan = replace(plan_at(two_nodes.address), model=tmp_path / "nowhere")
    with pytest.raises(TrainerError, match=r"has no .*/nowhere, and the policy is too large to be shipped by Ray"):
        Cluster.open(plan, run_dir=tmp_path, runtime_env={})
