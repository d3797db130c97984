"""Replicas, weight pushes and the mailbox in one small Ray session: veRL's own classes around them, two real ranks."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from agenttrain.errors import EngineError, ModelError, TrainerError
from safetensors.torch import load_file
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from agenttrain_verl import cpu, turn_client
from agenttrain_verl.replica import EngineReplica
from agenttrain_verl.turn_client import TurnClient

pytestmark = pytest.mark.verl
PROMPT = [5, 9, 13, 17]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this module's own, with two devices that are none."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="at", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=32,
            num_gpus=8,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            object_store_memory=512 << 20,
            runtime_env={"env_vars": cpu.environment_variables()},
        )
        yield
        ray.shutdown()


def rollout_config(spec: Any, **fields: Any) -> Any:
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    engine = CheckpointEngineConfig(
        backend="agenttrain", update_weights_bucket_megabytes=1, custom_backend_module="agenttrain_verl.mailbox"
    )
    known = {"tensor_model_parallel_size": 1, "n_gpus_per_node": 1, "checkpoint_engine": engine}
    return RolloutConfig(**{**known, "name": "agenttrain", "custom": spec.as_custom()} | fields)


class Rank(Worker):  # type: ignore[misc]
    """A trainer's rank with sharded weights, and veRL's ways to hand them on."""

    def __init__(self, config: Any, model_config: Any, folder: str, scale: float = 1.0) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from verl.checkpoint_engine.base import CheckpointEngineRegistry
        from verl.utils.distributed import initialize_global_process_group_ray

        import agenttrain_verl.mailbox  # noqa: F401
        from agenttrain_verl.weight_push import WeightPush

        initialize_global_process_group_ray(backend="cpu:gloo")
        n_ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (1, n_ranks, 1), mesh_dim_names=["dp", "infer_tp", "infer_pp"])
        shards = init_device_mesh("cpu", (n_ranks,))
        weights = load_file(f"{folder}/model.safetensors")
        self.weights = {name: distribute_tensor(tensor, shards, [Shard(0)]) for name, tensor in weights.items()}
        self.push = WeightPush(config, model_config, mesh)
        self.engine = CheckpointEngineRegistry.new(
            "agenttrain", is_master=torch.distributed.get_rank() == 0, bucket_size=1 << 20
        )

    def gathered(self, scale: float, odd: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights.items():
            yield name, scale * tensor.full_tensor()
        if odd:
            yield "nobody.weight", torch.zeros(2)
            raise ZeroDivisionError("the gathering itself")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def pushed(self, scale: float, global_steps: int | None, odd: bool = False) -> None:
        await self.push.update_weights(self.gathered(scale, odd), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        scale = 2.0 if (global_steps or 0) % 2 else 1.0
        return await self.engine.send_weights(self.gathered(scale, global_steps == 99), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


def ranks(config: Any, model_config: Any, folder: Any, n: int) -> RayWorkerGroup:
    pool = RayResourcePool([n], use_gpu=True, max_colocate_count=2, name_prefix=f"ranks{time.time_ns()}")
    made = RayClassWithInitArgs(ray.remote(Rank), config, model_config, str(folder))
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def client_of(*replicas: EngineReplica) -> TurnClient:
    from verl.workers.rollout.router import get_router_handle

    router = get_router_handle(servers={r.server_address: r.server_handle for r in replicas})
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="agenttrain")))
    return TurnClient(config, router)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 240))


async def greedy(client: TurnClient) -> Any:
    return await client.generate("r", prompt_ids=PROMPT, sampling_params=GREEDY)


def test_two_ranks_push_to_the_replica_beside_them(cluster: None, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded weights, gathered by both, reach it whole; a refusal is told in its own words and hangs nobody."""
    from verl.workers.config import HFModelConfig

    config = rollout_config(spec(run="hybrid"), tensor_model_parallel_size=2, n_gpus_per_node=2)
    model_config = HFModelConfig(path=str(spec.model))
    group = ranks(config, model_config, spec.model, 2)
    replica = EngineReplica(0, config, model_config, gpus_per_node=2)

    async def body() -> None:
        await replica.init_hybrid(group)
        assert (replica.facts.name, replica.facts.max_length) == ("local", 1024)
        client = client_of(replica)
        first = await greedy(client)
        assert set(first.extra_fields["weight_versions"]) == {0}
        await asyncio.gather(*group.pushed(2.0, 1))
        doubled = await greedy(client)
        assert set(doubled.extra_fields["weight_versions"]) == {1}
        assert doubled.log_probs != first.log_probs
        await asyncio.gather(*group.pushed(1.0, None))
        same = await greedy(client)
        assert (same.token_ids, same.extra_fields["global_steps"]) == (first.token_ids, 1)
        assert same.log_probs == pytest.approx(first.log_probs, abs=1e-5)
        told = await asyncio.gather(*group.pushed(1.0, 2, True), return_exceptions=True)
        assert all("the gathering itself" in str(each) for each in told)
        await asyncio.gather(*group.pushed(1.0, 3))
        assert (await greedy(client)).extra_fields["global_steps"] == 3
        with pytest.raises(EngineError, match="id 999"):
            await client.generate("r", prompt_ids=[999], sampling_params=GREEDY)
        monkeypatch.setattr(turn_client, "DEAD_FOR_S", 0.5)
        ray.kill(replica.server_handle)
        began = time.monotonic()
        with pytest.raises(EngineError, match="The process of the replica that answers r has died"):
            await greedy(client)
        told = await asyncio.gather(*group.pushed(1.0, 4), return_exceptions=True)
        assert isinstance(told[0], EngineError)
        assert "has died" in str(told[0])
        assert told[1] is None
        assert time.monotonic() - began < 10

    run(body)


def test_several_replicas_apart_get_the_same_weights(cluster: None, spec: Any) -> None:
    """By veRL's own CheckpointEngineManager and workers; a turn that is under way goes on with the new ones."""
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.workers.config import HFModelConfig

    import agenttrain_verl.mailbox  # noqa: F401

    config = rollout_config(spec(run="apart"))
    model_config = HFModelConfig(path=str(spec.model))
    group = ranks(config, model_config, spec.model, 1)
    replicas = [EngineReplica(i, config, model_config, gpus_per_node=1) for i in range(2)]

    async def body() -> None:
        await asyncio.gather(*(replica.init_standalone() for replica in replicas))
        manager = CheckpointEngineManager(config.checkpoint_engine, group, replicas)
        clients = [client_of(replica) for replica in replicas]
        long = {"temperature": 1.0, "max_tokens": 900, "seed": 5}
        turn = asyncio.create_task(clients[0].generate("long", prompt_ids=PROMPT, sampling_params=long))
        while not (await replicas[0].server_handle.stats.remote())["sampled_ids"]:
            await asyncio.sleep(0.01)
        await manager.update_weights(global_steps=1)
        output = await turn
        assert len(output.token_ids) == 900
        assert set(output.extra_fields["weight_versions"]) == {0, 1}
        first, second = [await greedy(client) for client in clients]
        assert first.log_probs == second.log_probs
        assert first.extra_fields["global_steps"] == second.extra_fields["global_steps"] == 1
        await manager.update_weights(global_steps=2)
        again = await greedy(clients[1])
        assert again.extra_fields["global_steps"] == 2
        assert again.log_probs != second.log_probs

    run(body)


def test_what_the_engine_finds_wrong_is_the_replica_s_error(cluster: None, spec: Any) -> None:
    config = rollout_config(spec(run="wrong", model=str(spec.folder / "none")))
    replica = EngineReplica(0, config, None, gpus_per_node=1)
    worker = ray.remote(SimpleNamespace).remote()
    with pytest.raises(ModelError, match="none"):
        run(lambda: replica.init_hybrid(SimpleNamespace(workers=[worker])))


def test_a_reward_model_is_refused(spec: Any) -> None:
    replica = EngineReplica(0, rollout_config(spec()), None, gpus_per_node=1, is_reward_model=True)
    with pytest.raises(TrainerError, match="reward or teacher"):
        run(replica.launch_servers)
