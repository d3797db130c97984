"""Two nodes of a Ray cluster, as Ray's own test utility simulates them: a graph reaches both, and both train it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
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
from agenttrain.testing.toy import ToyProject, ToyRun
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agenttrain_verl.cluster import QUEUE, Cluster, set_variables
from agenttrain_verl.plan import Plan, plan_of
from agenttrain_verl.ray_folder import RayFolder
from agenttrain_verl.shipping import runtime_env

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
    nodes.add_node(num_cpus=6, num_gpus=1, object_store_memory=10**8)
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
        assert cluster.folder is None
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
    with pytest.raises(
        TrainerError,
        match=r"has no place for 2 GPUs and 6 CPUs for 2 trainer ranks, beside the transfer queue's storage\. It has ",
    ):
        Cluster.open(
            plan_at(two_nodes.address, nodes=1, ranks_per_node=2), run_dir=tmp_path, runtime_env={}, patience_s=1.0
        )
    assert not ray.is_initialized()


def test_a_cluster_that_another_run_is_on_is_refused(two_nodes: Any, tmp_path: Path) -> None:
    """Its queue's controller has one name in the whole cluster, whatever job asks."""
    other = f"""
import time, ray
ray.init(address={two_nodes.address!r}, log_to_driver=False)
queue = ray.remote(type("Queue", (), {{}})).options(name={QUEUE!r}, namespace="transfer_queue", num_cpus=0).remote()
ray.get(queue.__ray_ready__.remote())
print("up", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "up" in process.stdout.readline()
            with pytest.raises(TrainerError, match="another run of veRL is on it"):
                Cluster.open(plan_at(two_nodes.address), run_dir=tmp_path, runtime_env={}, patience_s=1.0)
        finally:
            process.kill()


def test_a_policy_that_is_not_on_a_node_is_told(two_nodes: Any, tmp_path: Path) -> None:
    plan = replace(plan_at(two_nodes.address), model=tmp_path / "nowhere")
    with pytest.raises(TrainerError, match=r"has no .*/nowhere, and the policy is too large to be shipped by Ray"):
        Cluster.open(plan, run_dir=tmp_path, runtime_env={})


# ── a whole run ──────────────────────────────────────────────────────────────────────────────────────────────────────

N_TRAIN, N_EVAL = 12, 6
OURS = ("EngineServer", "AgentLoopWorkerTQ")
"""Replicas; rollout workers, which Ray calls by the class that they are made from."""


@pytest.fixture(scope="module")
def run(two_nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """One step of the order desk with a rank, a replica and a rollout worker on each node."""
    folder = tmp_path_factory.mktemp("run") / "desk"
    shutil.copytree(DESK, folder)
    return trained(folder, two_nodes.address)


def trained(folder: Path, address: str) -> ToyRun:
    return ToyProject(folder).fit(
        trainer={"name": "verl", "steps": 1, "tasks_per_step": N_TRAIN // 4, "group_size": 4},
        eval={"tasks": N_EVAL},
        verl={"address": address, "device": "cpu", "nodes": 2, "ranks_per_node": 1, "rollout_workers": 2},
    )


def actors_of(address: str) -> list[dict[str, Any]]:
    """All that the cluster knows of, those that have ended too."""
    ray.init(address=address, log_to_driver=False)
    try:
        return list(ray._private.state.actors().values())
    finally:
        ray.shutdown()


def rollouts_by_process(run: ToyRun) -> dict[int, int]:
    """Process id, which stands in a file's name, to how many rollouts it wrote."""
    written: Counter[int] = Counter()
    for file in run.folder.rollouts.glob("*.db"):
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as records:
            written[int(file.name.split("-")[1])] += records.execute("SELECT COUNT(*) FROM begun").fetchone()[0]
    return {process: n for process, n in written.items() if n}


def test_each_rollout_is_stored_once_whatever_node_made_it(run: ToyRun) -> None:
    """Those of the driver's node by its worker, those of the other one by the driver, which got them shipped."""
    assert Counter(rollout.phase for rollout in run.store.rollouts()) == {
        "baseline": N_EVAL,
        "train": N_TRAIN,
        "held_out": N_EVAL,
    }
    by_process = rollouts_by_process(run)
    assert len(by_process) == 2
    assert os.getpid() in by_process
    assert sum(by_process.values()) == N_TRAIN + 2 * N_EVAL
    assert all(run.store.turns(rollout.id) for rollout in run.store.rollouts())


def test_two_ranks_train_what_was_sampled_on_both_nodes(run: ToyRun) -> None:
    tokens = run.report["tokens"]
    assert (tokens["drifted"], run.report["steps"]) == (0, 1)
    assert tokens["trained"] > 0
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"]
    assert run.report["logprob_gap"]["max"] < 1e-3


def test_the_exported_policy_is_whole(run: ToyRun) -> None:
    """As many numbers as the base has, and some of them learned."""
    from safetensors.torch import load_file

    base, policy = (load_file(at / "model.safetensors") for at in (DESK / "policy", run.folder.policy))
    assert {name: value.shape for name, value in base.items()} == {name: value.shape for name, value in policy.items()}
    assert any(not policy[name].equal(value.float()) for name, value in base.items())


def test_the_cluster_stands_and_nothing_of_the_run_is_left_on_it(run: ToyRun, two_nodes: Any) -> None:
    actors = actors_of(two_nodes.address)
    assert [actor["ActorClassName"] for actor in actors if actor["State"] != "DEAD"] == []
    for name in OURS:
        nodes = {actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == name}
        assert len(nodes) == 2, (name, actors)


def test_a_second_run_on_the_same_cluster_is_as_the_first(run: ToyRun, two_nodes: Any, tmp_path: Path) -> None:
    shutil.copytree(DESK, tmp_path / "desk")
    again = trained(tmp_path / "desk", two_nodes.address)

    def sampled(of: ToyRun) -> dict[str, list[tuple[int, ...]]]:
        ids = [rollout.id for rollout in of.store.rollouts() if rollout.phase != "held_out"]
        return {id: [turn.response_ids for turn in of.store.turns(id)] for id in ids}

    assert sampled(again) == sampled(run)
    assert again.report["tokens"]["drifted"] == 0
