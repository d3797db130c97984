"""veRL's own trainer, one step at a time, on tasks and rollouts of ours.

What becomes what: tasks become the groups that veRL dispatches, the rows it trained become StepOutcomes. `Stepwise` is
mixed over the trainer class that veRL has for a mode; everything that samples, measures, updates, saves and publishes
is veRL's. Invariants: a step's rows are those of the rollouts that teach, and no others; what a step reports is read
from what veRL trained, not from what was sent to it. Knows nothing of Ray's start or of the run's folder.

Mirrored from verl 0.9.1, trainer/ppo/v1/trainer_base.py: `fit` (its loop's body in `one_step`) and `_step_once`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from agenttrain.errors import TrainerError
from agenttrain.protocols import Elsewhere
from agenttrain.records import RolloutRequest, RolloutResult, Sample, Task
from agenttrain.trainer.batches import Lesson, Lessons, lessons
from agenttrain.trainer.schedule import Cursor, tasks_at
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from agenttrain_verl.agent_loop import KEPT, NAME, REQUESTS
from agenttrain_verl.calls import n_calls
from agenttrain_verl.counted import Counted
from agenttrain_verl.plan import Plan
from agenttrain_verl.rates import first_rate, saved_rate
from agenttrain_verl.rollout_workers import TRAIN, RolloutWorkers
from agenttrain_verl.rows import TURNS, Row, rows_of

POLL_S = 0.05
"""Between two looks at what has finished; veRL's own is 2 s."""
NO_ROWS = "no materializable trajectories"
"""In what veRL's replay buffer raises when every rollout of a batch failed (verl 0.9.1, replay_buffer.py, sample)."""
NO_ROW = "no row of it reached veRL"


@dataclass(slots=True, kw_only=True)
class Trained:
    """What one batch that veRL sampled came to."""

    results: tuple[RolloutResult, ...]
    """Of all its groups."""
    lessons: Lessons
    rows: tuple[Row, ...]
    """Those that were trained."""
    samples: tuple[Sample, ...] = ()
    """[rows] as veRL held them."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """[rows][T]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step came to."""

    step: int
    metrics: Mapping[str, float]
    """veRL's, by its own names."""
    timing: Mapping[str, float]
    """Seconds, by veRL's names."""
    trained: tuple[Trained, ...]
    """One per batch that was sampled in it."""
    seconds: float


class TaskStream:
    """Our data cursor where veRL expects its data loader: the tasks of each step, as the local trainer takes them."""

    def __init__(self, tasks: Sequence[Task], *, batch: int, seed: int) -> None:
        self._tasks, self._batch, self._seed = tasks, batch, seed
        self._trained = 0
        self._cursors = [Cursor()]
        """Where the steps after those that are trained begin."""

    def at(self, step: int) -> list[Task]:
        """The tasks of a step that isn't trained yet, however far ahead."""
        place = step - self._trained - 1
        while len(self._cursors) <= place + 1:
            _, following = tasks_at(self._tasks, self._cursors[-1], self._batch, self._seed)
            self._cursors.append(following)
        return tasks_at(self._tasks, self._cursors[place], self._batch, self._seed)[0]

    @property
    def trained(self) -> int:
        """The last step that is trained, 0 before the first: the version of the weights that are served."""
        return self._trained

    def done(self, step: int) -> None:
        """It is trained: a checkpoint of now goes on after it, whatever was asked for ahead."""
        self.at(step)
        self._cursors = self._cursors[step - self._trained :]
        self._trained = step

    def state_dict(self) -> dict[str, int]:
        return {"trained": self._trained, "epoch": self._cursors[0].epoch, "offset": self._cursors[0].offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._trained = state["trained"]
        self._cursors = [Cursor(epoch=state["epoch"], offset=state["offset"])]


class StepBuffer(ReplayBuffer):  # type: ignore[misc]
    """veRL's replay buffer, that waits for the groups of one step and gives those.

    In veRL's asynchronous modes its own takes whichever groups are done, so that the others grow older than any bound.
    """

    wanted: Sequence[str] = ()
    """Groups of the step, in the order of its tasks."""
    look: Callable[[], None]
    """Asked while it waits; what it raises ends the waiting."""

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        found: set[str] = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        return found.intersection(self.wanted)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.look()
        time.sleep(self.poll_interval)
        return last_debug_time


class Stepwise:
    """Mixed over veRL's trainer of a mode; see `open_controller`."""

    plan: Plan
    tasks: Sequence[Task]
    elsewhere: Elsewhere
    group_advantages: Callable[[Sequence[float]], list[float]]
    config: Any
    workers: RolloutWorkers
    global_steps: int
    rollout_order: Sequence[str]
    lessons: Sequence[Lesson]
    rate: float
    _groups: dict[int, Sequence[str]]
    """Step to the groups that were begun for it, until it samples them."""

    # ── made once ────────────────────────────────────────────────────────────────────────────────────────────────

    def _init_dataloader(self) -> None:
        """Our tasks instead of files; veRL asks its data loader for its state alone."""
        n = self.config.data.train_batch_size
        self.train_dataloader = TaskStream(self.tasks, batch=n, seed=self.plan.config.seed)
        self.steps_per_epoch = max(1, len(self.tasks) // n)
        self.total_training_steps = self.config.trainer.total_training_steps
        settings = self.plan.config.trainer
        each = n_calls(self.plan.algorithm, minibatches=settings.minibatches, epochs=settings.epochs)
        with open_dict(self.config):
            for table in (self.config.actor_rollout_ref.actor.optim, self.config.critic.optim):
                table.total_training_steps = self.total_training_steps * each
                table.lr_warmup_steps = table.lr_warmup_steps * each
        optim = self.config.actor_rollout_ref.actor.optim
        self.rate = first_rate(optim) if self.plan.settings.strategy == "fsdp2" else optim.lr

    def _build_replay_buffer(self) -> StepBuffer:
        # All that veRL's trainer has beside this by its mode's name is that checkpoints keep what is under way, of
        # which our rollout workers would know nothing (trainer_base.py, 0.9.1): it is made again with its seeds.
        self.trainer_mode = "sync"
        buffer = StepBuffer(
            trainer_mode=self.plan.settings.mode,
            trainer_config=self.config.trainer.v1.get(self.plan.settings.mode, {}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs=self.config.trainer.v1.sampler.sampler_kwargs,
            poll_interval=POLL_S,
        )
        buffer.look = lambda: self.workers.check()
        return buffer

    def begin(self, workers: RolloutWorkers) -> None:
        """Take the rollout workers, and open veRL's loggers."""
        self.workers = self.agent_loop_manager = workers
        self.prev_step_profile = self.curr_step_profile = self.next_step_profile = False
        self._groups, self._begun = {}, 0
        self.logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=OmegaConf.to_container(self.config.trainer.logger),
            config=OmegaConf.to_container(self.config, resolve=True),
        )

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def one_step(self) -> StepOutcome:
        """Roll out, update, publish; a step that is interrupted before its update leaves all as it was."""
        began = time.perf_counter()
        self.global_steps += 1
        self._outcomes: list[Trained] = []
        self._is_updating = False
        metrics: dict[str, Any] = {}
        self.timing_raw: dict[str, float] = {}
        try:
            with marked_timer("step", self.timing_raw):
                self.on_step_begin()  # type: ignore[attr-defined]
                batch = self.step(metrics, self.timing_raw)  # type: ignore[attr-defined]
                self.on_step_end()  # type: ignore[attr-defined]
                metrics.update(self._consume_sync_metrics())  # type: ignore[attr-defined]
        except BaseException:
            self.global_steps -= 1
            raise
        self._is_updating = False
        self.train_dataloader.done(self.global_steps)
        epoch = (self.global_steps - 1) // self.steps_per_epoch
        if len(batch):
            self._compute_metrics(  # type: ignore[attr-defined]
                batch, metrics, self.timing_raw, global_steps=self.global_steps, epoch=epoch
            )
            tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        self.logger.log(data=numbers, step=self.global_steps)
        return StepOutcome(
            step=self.global_steps,
            metrics=numbers,
            timing=dict(self.timing_raw),
            trained=tuple(self._outcomes),
            seconds=time.perf_counter() - began,
        )

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()  # type: ignore[attr-defined]
            batch, found = self._sampled()
            metrics.update(found)
            batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            self.on_sample_end()  # type: ignore[attr-defined]
        batch, outcome = self._taught(batch, self._groups.pop(self.global_steps))
        self._outcomes.append(outcome)
        if not len(batch):
            return batch
        self._is_updating = True
        batch = self._updated(batch, metrics, timing_raw)
        outcome.samples, outcome.advantages = trained_rows(batch, outcome.rows)
        return batch

    def _updated(self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        me: Any = self
        batch = me._balance_batch(batch, metrics=metrics)
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            batch = me._compute_old_log_prob(batch, metrics=metrics)
        if me.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                batch = me._compute_ref_log_prob(batch, metrics=metrics)
        if me.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                batch = me._compute_values(batch, metrics=metrics)
        with marked_timer("adv", timing_raw, color="brown"):
            batch = me._compute_advantage(batch, metrics=metrics)
        if me.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"):
                batch = me._update_critic(batch, metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing_raw, color="red"):
                batch = me._update_actor(batch, metrics=metrics)
        return batch

    def _sampled(self) -> tuple[KVBatchMeta, dict[str, Any]]:
        """The rows of the step's groups; none where every rollout of theirs failed."""
        buffer: StepBuffer = self.replay_buffer  # type: ignore[attr-defined]
        buffer.wanted = self._groups[self.global_steps]
        try:
            batch, found = buffer.sample(
                global_steps=self.global_steps, partition_id=TRAIN, batch_size=len(buffer.wanted)
            )
        except RuntimeError as error:
            if NO_ROWS not in str(error):
                raise
            tq.kv_clear(keys=list(buffer.wanted), partition_id=TRAIN)
            return KVBatchMeta(partition_id=TRAIN), {}
        return batch, found

    def _taught(self, batch: KVBatchMeta, uids: Sequence[str]) -> tuple[KVBatchMeta, Trained]:
        """Leave the rows of rollouts that teach; the others are told why not, and go."""
        groups = [self.workers.take_group(uid) for uid in uids]
        results = [result for group in groups for result in group.results]
        refused = {name: why for group in groups for name, why in group.refused.items()}
        rows = rows_of(batch) if len(batch) else []
        there = {row.rollout_id for row in rows}
        compares = not self.plan.algorithm.critic
        taught = lessons(results, self.group_advantages, compares=compares)
        missing = {name: refused.get(name, NO_ROW) for name in _ids(taught) if name not in there}
        if missing:  # their siblings are compared without them, as veRL does: one that is left alone teaches nothing
            others = [result for result in results if result.rollout.id not in missing]
            left_over = lessons(others, self.group_advantages, compares=compares)
            taught = replace(left_over, dropped={**left_over.dropped, **missing}, n_groups=taught.n_groups)
        self.rollout_order, self.lessons = _ids(taught), taught.kept
        wanted = set(self.rollout_order)
        left = [row for row in rows if row.rollout_id in wanted]
        gone = [row.key for row in rows if row.rollout_id not in wanted]
        if gone:
            batch = batch.select_keys([row.key for row in left]) if left else KVBatchMeta(partition_id=TRAIN)
            tq.kv_clear(keys=gone, partition_id=TRAIN)
        return batch, Trained(results=tuple(results), lessons=taught, rows=tuple(left))

    def end(self) -> None:
        """No step follows: what is under way is cut off, and told."""
        self.workers.cut_off()
        left = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
        if left:
            tq.kv_clear(keys=list(left), partition_id=TRAIN)

    # ── tasks to groups ──────────────────────────────────────────────────────────────────────────────────────────

    def prepare_step(self) -> dict[str, Any]:
        """Begin the groups of this step and of those that may be ahead of it, up to the last, unless they were."""
        settings = self.plan.settings
        ahead = 0 if settings.mode == "sync" else settings.max_staleness
        newest = min(self.global_steps + ahead, self.plan.config.trainer.steps)
        for step in range(max(self._begun + 1, self.global_steps), newest + 1):
            batch = self._groups_at(step)
            self._groups[step], self._begun = [str(uid) for uid in batch["uid"]], step
            self._submit_batch_to_rollout(batch)  # type: ignore[attr-defined]
        return {}

    def _groups_at(self, step: int) -> TensorDict:
        """A step's tasks as veRL's rows, one group each."""
        tasks = self.train_dataloader.at(step)
        requests = [request for task in tasks for request in self._requests(task, step)]
        kept, still = self._go_on(requests)
        width = self.config.actor_rollout_ref.rollout.n
        groups = [slice(at, at + width) for at in range(0, len(requests), width)]
        columns: dict[str, Sequence[Any]] = {
            "uid": [uuid.uuid4().hex for _ in tasks],
            "raw_prompt": [[{"role": "user", "content": task.id}] for task in tasks],
            "index": list(range(len(tasks))),
            "agent_name": [NAME] * len(tasks),
            REQUESTS: [still[group] for group in groups],
            KEPT: [{n: r for n, r in enumerate(kept[group]) if r is not None} for group in groups],
        }
        batch = tu.get_tensordict({name: _objects(values) for name, values in columns.items()})
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def _requests(self, task: Task, step: int) -> Iterator[RolloutRequest]:
        config = self.plan.config
        for sibling in range(self.config.actor_rollout_ref.rollout.n):
            yield RolloutRequest(
                task=task,
                phase="train",
                step=step,
                sibling=sibling,
                temperature=config.sampling.temperature,
                seed=config.seed,
            )

    def _go_on(self, requests: list[RolloutRequest]) -> tuple[list[RolloutResult | None], list[RolloutRequest]]:
        """(what an earlier life made of each, the request of now of each)."""
        gone_on = self.elsewhere.go_on(requests)
        kept = [gone_on.kept.get(n) for n in range(len(requests))]
        return kept, [gone_on.open.get(n, request) for n, request in enumerate(requests)]

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path) -> None:
        """veRL's checkpoint, `global_step_N/`, into a folder.

        Raises:
            TrainerError: an update was cut in half.
        """
        if getattr(self, "_is_updating", False):
            raise TrainerError("The trainer's ranks were stopped in the middle of an update: there is nothing to save.")
        with open_dict(self.config):
            self.config.trainer.default_local_dir = str(folder)
        self._save_checkpoint()  # type: ignore[attr-defined]

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote, with its weights on the replicas."""
        saved = next(folder.glob("global_step_*"))
        with open_dict(self.config):
            self.config.trainer.resume_mode = "resume_path"
            self.config.trainer.resume_from_path = str(saved)
        if self.plan.settings.strategy == "fsdp2":
            self.rate = saved_rate(saved / "actor")
        self.checkpoint_manager.sleep_replicas()  # type: ignore[attr-defined]
        self._load_checkpoint()  # type: ignore[attr-defined]
        self.on_init_end()  # type: ignore[attr-defined]


def open_controller(
    config: Any,
    plan: Plan,
    *,
    tasks: Sequence[Task],
    elsewhere: Elsewhere,
    group_advantages: Callable[[Sequence[float]], list[float]],
) -> Any:
    """veRL's trainer of the plan's mode, with ranks and replicas started and the base's weights on them."""
    base = get_trainer_cls(plan.settings.mode)
    controller = type(f"Agenttrain{base.__name__}", (Stepwise, Counted, base), {})
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    tq.init(config.transfer_queue)
    made: Any = object.__new__(controller)
    made.plan, made.tasks, made.elsewhere, made.group_advantages = plan, tasks, elsewhere, group_advantages
    made.__init__(config=config)
    made.init()
    return made


def trained_rows(batch: KVBatchMeta, rows: Sequence[Row]) -> tuple[tuple[Sample, ...], tuple[tuple[float, ...], ...]]:
    """([rows] samples, [rows][T] advantages) as veRL held them after the update."""
    by_token = ["prompts", "responses", "response_mask", "rollout_log_probs", "advantages"]
    fields = [*by_token, "extra_fields", "num_turns"]
    data = tq.kv_batch_get(keys=[row.key for row in rows], partition_id=batch.partition_id, select_fields=fields)
    columns = {name: [x.tolist() for x in data[name].unbind()] for name in by_token}
    extra = [getattr(value, "data", value) for value in data["extra_fields"]]
    turns = [int(getattr(value, "data", value)) for value in data["num_turns"]]
    samples = tuple(
        Sample(
            prompt_ids=tuple(columns["prompts"][n]),
            response_ids=tuple(columns["responses"][n]),
            response_mask=tuple(int(mask) for mask in columns["response_mask"][n]),
            response_logprobs=tuple(columns["rollout_log_probs"][n]),
            reward_score=row.reward,
            num_turns=turns[n],
            metrics=dict(extra[n].get("metrics", {})),
            extra_fields={name: value for name, value in extra[n].items() if name not in ("metrics", TURNS)},
        )
        for n, row in enumerate(rows)
    )
    masks = [sample.response_mask for sample in samples]
    advantages = tuple(
        tuple(value if mask else 0.0 for value, mask in zip(row, on, strict=True))
        for row, on in zip(columns["advantages"], masks, strict=True)
    )
    return samples, advantages


def _ids(taught: Lessons) -> list[str]:
    return [lesson.rollout_id for lesson in taught.kept]


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """[n] Python objects, which NumPy would else look into."""
    objects = np.empty(len(values), dtype=object)
    for n, value in enumerate(values):
        objects[n] = value
    return objects


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
