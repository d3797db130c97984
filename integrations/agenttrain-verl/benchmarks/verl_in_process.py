"""veRL's trainer and its FSDP2 worker in this process, without Ray: the same stages, over a TransferQueue in memory.

`InProcess` is agenttrain's Counted over veRL's PPOTrainerSync, with veRL's real configuration, advantages, losses,
engine and optimizer. Two things are not veRL's: the queue is a dictionary, and a call of the worker group is one of
the worker. Import it before verl: it sets what veRL reads from the environment.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_LOGGING_LEVEL": "WARN",
    "OMP_NUM_THREADS": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(_free_port()),
}
warnings.filterwarnings("ignore", message=r"\w+ engine is not available")

import torch
import transfer_queue
from agenttrain.records import RolloutResult
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import response_from_nested

from agenttrain_verl.compose import compose
from agenttrain_verl.counted import Counted
from agenttrain_verl.emission import RowRules, outputs_of
from agenttrain_verl.plan import Plan
from agenttrain_verl.rates import first_rate
from agenttrain_verl.rows import listed


class Memory:
    """What veRL's trainer asks of the TransferQueue, over a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Columns that every row has, tensors as jagged ones."""
        rows = [self.rows[key] for key in keys]
        names = [name for name in rows[0] if all(name in row for row in rows)]
        wanted = names if select_fields is None else [name for name in select_fields if name in names]
        columns = {name: _column([row[name] for row in rows]) for name in wanted}
        return TensorDict(columns, batch_size=len(keys))

    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        for name in [] if fields is None else list(fields.keys()):
            column = fields[name]
            values = column.unbind() if isinstance(column, torch.Tensor) else listed(column)
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        self.tags |= dict(zip(keys, tags or [self.tags[key] for key in keys], strict=True))
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def data(self, batch: KVBatchMeta) -> TensorDict:
        """What a worker is given (utils/transferqueue_utils.py, _async_meta_to_realdata)."""
        data = self.get(batch.keys, "train")
        for name, value in batch.extra_info.items():
            tu.assign_non_tensor_data(data, name, value)
        return data

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand where the TransferQueue's functions are."""
        names = {"kv_batch_get": self.get, "kv_batch_put": self.put}
        before = {name: getattr(transfer_queue, name) for name in names}
        for name, function in names.items():
            setattr(transfer_queue, name, function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(transfer_queue, name, function)


def _column(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.nested.as_nested_tensor([value.detach() for value in values], layout=torch.jagged)
    return NonTensorStack(*map(NonTensorData, values))


class Workers:
    """A worker group of one rank; every call of `update_actor` is noted."""

    def __init__(self, config: Any, queue: Memory, *, role: str) -> None:
        self._dispatch_info = {"actor": [0]}
        self._queue = queue
        self.worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=role)
        self.worker.init_model()
        self.updates: list[dict[str, Any]] = []
        """[calls] what each gave."""

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._inferred(self.worker.compute_log_prob, batch)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._inferred(self.worker.compute_ref_log_prob, batch)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        output = self.worker.update_actor(self._queue.data(batch))
        self.updates.append(dict(output["metrics"]))
        return output

    def _inferred(self, function: Callable[[TensorDict], TensorDict], batch: KVBatchMeta) -> KVBatchMeta:
        output = function(self._queue.data(batch))
        fields = [name for name, value in output.items() if isinstance(value, torch.Tensor)]
        self._queue.put(batch.keys, "train", output.select(*fields))
        return batch


class Critic:
    """veRL's critic as a worker group of one rank, made as veRL's trainer makes it (trainer_base.py, _setup)."""

    def __init__(self, config: Any, queue: Memory) -> None:
        self._temperature = config.actor_rollout_ref.rollout.temperature
        settings = omega_conf_to_dataclass(config.critic)
        settings.engine.infer_max_token_len_per_gpu = settings.ppo_infer_max_token_len_per_gpu
        settings.engine.max_token_len_per_gpu = settings.ppo_infer_max_token_len_per_gpu
        self._queue = queue
        self.worker = TrainingWorker(
            config=TrainingWorkerConfig(
                model_type="value_model",
                model_config=settings.model,
                engine_config=settings.engine,
                optimizer_config=settings.optim,
                checkpoint_config=settings.checkpoint,
            )
        )
        self.worker.reset()
        self.worker.set_loss_fn(partial(value_loss, config=settings))
        self.updates: list[dict[str, Any]] = []
        """[calls] what each gave."""

    def values(self, batch: KVBatchMeta) -> None:
        batch.extra_info |= {"compute_loss": False, "temperature": self._temperature}
        output = self.worker.infer_batch(self._queue.data(batch))
        self._queue.put(batch.keys, "train", output.select("values"))
        stored = self._queue.get(batch.keys, "train", ["values", "response_mask"])
        stored["values"] = response_from_nested(stored.pop("values"), stored["response_mask"])
        self._queue.put(batch.keys, "train", stored.select("values"))

    def train_mini_batch(self, batch: KVBatchMeta) -> Any:
        output = self.worker.train_mini_batch(self._queue.data(batch))
        self.updates.append(dict(output["metrics"]))
        return SimpleNamespace(get=lambda: output)


class InProcess(Counted, PPOTrainerSync):
    """veRL's trainer from the sampled batch on."""

    def __init__(self, plan: Plan, group_advantages: Callable[[Sequence[float]], list[float]], run_dir: Any) -> None:
        self.config = compose(plan, run_dir=run_dir)
        self.plan, self.group_advantages = plan, group_advantages
        self.queue = Memory()
        self.use_critic = plan.algorithm.critic
        self.use_reference_policy = bool(self.config.actor_rollout_ref.actor.use_kl_loss)
        self.ref_in_actor = False
        self.tokenizer = SimpleNamespace(eos_token_id=0)
        self.global_steps = 1
        self.rate = first_rate(self.config.actor_rollout_ref.actor.optim)
        self.actor_rollout_wg = Workers(self.config, self.queue, role="actor")
        if self.use_reference_policy:
            self.ref_policy_wg = Workers(self.config, self.queue, role="ref")
        if self.use_critic:
            self.critic_wg = Critic(self.config, self.queue)

    def train(self, results: Sequence[RolloutResult], *, step: int) -> Mapping[str, Any]:
        """One step on rollouts that teach; gives veRL's metrics."""
        self.global_steps, self.queue.rows = step, {}
        self.actor_rollout_wg.updates.clear()
        metrics: dict[str, Any] = {}
        with self.queue.in_place():
            batch = put_rows(self.queue, results, max_length=self.plan.max_length)
            batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            batch = self._balance_batch(batch, metrics)
            batch = self._compute_old_log_prob(batch, metrics)
            if self.use_reference_policy:
                batch = self._compute_ref_log_prob(batch, metrics)
            if self.use_critic:
                self.critic_wg.values(batch)
            batch = self._compute_advantage(batch, metrics)
            if self.use_critic:
                batch = self._update_critic(batch, metrics)
            self.batch = self._update_actor(batch, metrics)
        return metrics

    def advantages(self) -> dict[tuple[str, int], list[float]]:
        """(rollout id, trajectory) to the advantages of its trained tokens."""
        found = {}
        for row in self.dealt.rows:
            stored = self.queue.rows[row.key]
            found[row.rollout_id, row.trajectory] = stored["advantages"][stored["response_mask"].bool()].tolist()
        return found


def put_rows(queue: Memory, results: Sequence[RolloutResult], *, max_length: int) -> KVBatchMeta:
    """Rows as veRL's AgentLoopWorkerTQ writes them (trainer/ppo/v1/agent_loop_tq.py, _agent_loop_postprocess)."""
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    uids: dict[str, str] = {}
    for result in results:
        uid = uids.setdefault(result.rollout.group_id, f"{len(uids):032x}")
        for i, output in enumerate(outputs_of(result, RowRules(max_length=max_length))):
            fields = output.as_dict() | {"uid": uid, "session_id": result.rollout.sibling}
            fields["loss_mask"] = fields["response_mask"]
            fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
            n = len(fields["input_ids"])
            fields["position_ids"] = torch.arange(n)
            fields["multi_modal_inputs"] = {}
            keys.append(f"{uid}_{result.rollout.sibling}_{i}")
            tags.append(
                {
                    "status": "success",
                    "prompt_len": len(fields["prompts"]),
                    "response_len": len(fields["responses"]),
                    "seq_len": n,
                    "global_steps": 1,
                    "min_global_steps": fields["extra_fields"]["min_global_steps"],
                    "max_global_steps": fields["extra_fields"]["max_global_steps"],
                }
            )
            queue.rows[keys[-1]] = fields
    queue.tags = dict(zip(keys, tags, strict=True))
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")
