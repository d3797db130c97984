"""Tasks to rollouts to updates, in this process: what all trainers of one Hugging Face folder have in common.

A step rolls out a group for each of its tasks, waits for all of them and trains the lessons that a subclass makes of
them, in a fixed order. Invariants: every rollout of a step is trained or has a reason why not; the samples a step
reports are those the loss saw; a step that is cut short leaves weights and optimizer as they were. Who teaches, and
when an engine gets the weights, a subclass says. Knows nothing of graphs or rewards.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from agenttrain import telemetry
from agenttrain.errors import ConfigError, RunError
from agenttrain.local import policy
from agenttrain.local.adapter import open_learnable
from agenttrain.local.learner import Learner, Training
from agenttrain.protocols import TakesAdapters, TrainerContext
from agenttrain.records import RolloutRequest, RolloutResult, StepResult, Task
from agenttrain.trainer import checkpoint
from agenttrain.trainer.batches import Lessons
from agenttrain.trainer.figures import rollout_figures
from agenttrain.trainer.schedule import Cursor, learning_rate_at, tasks_at


class EmbeddedTrainer(ABC):
    """protocols.Trainer for one Hugging Face folder, on the CPU or on CUDA, but for what its steps teach."""

    name: str

    def __init__(self, context: TrainerContext) -> None:
        """Load the policy and open the engine.

        Raises:
            ConfigError: no tasks.
            ModelError: the policy's folder can't be loaded.
        """
        self._context = context
        self._config = context.config
        self._settings = context.config.trainer
        if not context.tasks:
            raise ConfigError('There are no training tasks. Give tasks with split "train", or leave `split` out.')
        self._engine = context.open_engine()  # first: it may load in a process of its own meanwhile
        self.engine_name = self._engine.name
        self._learnable = open_learnable(context.spec.model, device=policy.choose_device(), config=context.config)
        self._learner = Learner(self._learnable, context.config)
        self.n_parameters = self._learnable.n_parameters
        self.n_trained_parameters, self.adapter = self._learnable.n_trained_parameters, self._learnable.adapter
        self._critic = "value head" if self._learner.critic is not None else None
        """As a checkpoint names it."""
        self._step = 0
        self._cursor = Cursor()
        self.weight_version = 0
        self._own_version = 0
        """Of the weights here; the engine may be behind."""

    @abstractmethod
    def _lessons(self, results: Sequence[RolloutResult]) -> Lessons:
        """Who teaches."""

    @abstractmethod
    def _updated(
        self, taught: Lessons, results: Sequence[RolloutResult], step: int, learning_rate: float
    ) -> tuple[Lessons, Training, dict[str, float]]:
        """Train, or leave everything as it was; gives the lessons as they were taught, and figures.

        Adds 1 to `_own_version`; the figures have `train_s` and `sync_s`.
        """

    def _figures(self, taught: Lessons) -> dict[str, float]:
        """Of a step, beside those of all trainers."""
        return {}

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self) -> Iterator[StepResult]:
        """Train, one result a step, from where it stands to `trainer.steps`."""
        while self._step < self._settings.steps:
            yield self._one_step()

    def evaluate(
        self, requests: Sequence[RolloutRequest], on_done: Callable[[RolloutResult], None] | None = None
    ) -> list[RolloutResult]:
        """Roll out on the engine that serves training, at the weights of now."""
        return self._context.run_rollouts(self._engine, requests, on_done)

    def _one_step(self) -> StepResult:
        tasks, cursor = tasks_at(self._context.tasks, self._cursor, self._settings.tasks_per_step, self._config.seed)
        step = self._step + 1
        began = time.perf_counter()
        made: list[RolloutResult] = []  # without those that an earlier life of the run had made
        results = self._context.run_rollouts(self._engine, self._requests(tasks, step), made.append)
        rolled_out = time.perf_counter()
        taught = self._lessons(results)
        learning_rate = learning_rate_at(
            step,
            steps=self._settings.steps,
            peak=self._settings.learning_rate,
            warmup=self._settings.warmup_steps,
            final=self._settings.final_learning_rate,
        )
        training: Training | None = None
        figures = {"train_s": 0.0, "sync_s": 0.0}
        if taught.kept:
            taught, training, figures = self._updated(taught, results, step, learning_rate)
        self._step, self._cursor = step, cursor
        figures |= {
            "rollout_s": rolled_out - began,
            "tokens_per_s": _n_sampled(made) / max(1e-9, rolled_out - began),
        }
        return StepResult(
            step=step,
            weight_version=self._own_version,
            metrics=_metrics(results, taught, training, learning_rate) | figures | self._figures(taught),
            trained_rollout_ids=tuple(lesson.rollout_id for lesson in taught.kept),
            dropped=taught.dropped,
            samples=tuple(sample for lesson in taught.kept for sample in lesson.samples),
            advantages=tuple(row for lesson in taught.kept for row in lesson.token_advantages),
        )

    def _requests(self, tasks: Sequence[Task], step: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                task=task,
                phase="train",
                step=step,
                sibling=sibling,
                temperature=self._config.sampling.temperature,
                seed=self._config.seed,
            )
            for task in tasks
            for sibling in range(self._settings.group_size)
        ]

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, version: int) -> None:
        """The weights of now to the engine."""
        engine = self._engine
        with telemetry.publish_span(version):
            alone = self._learnable.adapter_weights()
            if alone is not None and isinstance(engine, TakesAdapters) and engine.takes_adapters:
                engine.update_adapter(alone, version)
            else:
                engine.update_weights(self._learnable.published().items(), version)
        self.weight_version = self._own_version = version

    def save(self, folder: Path) -> None:
        """Resumable state into an empty folder: weights, optimizer, schedule, seed, data cursor."""
        state = {
            "step": self._step,
            "steps": self._settings.steps,
            "weight_version": self._own_version,
            "seed": self._config.seed,
            "cursor": {"epoch": self._cursor.epoch, "offset": self._cursor.offset},
            "n_tasks": len(self._context.tasks),
            "adapter": self.adapter,
            "critic": self._critic,
        }
        checkpoint.save(
            folder,
            checkpoint.TrainingState(
                weights=self._learner.saved(), optimizer=self._learner.optimizer.state_dict(), state=state
            ),
        )

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            RunError: the checkpoint is damaged, or of another run (seed or tasks differ).
        """
        saved = checkpoint.load(folder)
        state = saved.state
        own = {
            "seed": self._config.seed,
            "n_tasks": len(self._context.tasks),
            "adapter": self.adapter,
            "critic": self._critic,
        }
        for key, here in own.items():
            if state.get(key) != here:
                raise RunError(
                    f"The checkpoint {folder} was written with {key} {state.get(key)}, and this run has {here}. Resume "
                    "with the run's own configuration and tasks."
                )
        self._learner.restore(saved.weights, saved.optimizer, where=str(folder))
        self._step = int(state["step"])
        self._cursor = Cursor(epoch=int(state["cursor"]["epoch"]), offset=int(state["cursor"]["offset"]))
        self._own_version = int(state["weight_version"])

    def export(self, folder: Path) -> None:
        """The weights of now as a Hugging Face folder, in float32, with the base's tokenizer files."""
        self._learnable.export(Path(folder))

    def engine_stats(self) -> Mapping[str, float]:
        """The engine's own counters."""
        return self._engine.stats()

    def close(self) -> None:
        """End the workers and the engine."""
        self._learner.close()
        self._engine.close()


def _n_sampled(results: Sequence[RolloutResult]) -> int:
    return sum(result.rollout.n_sampled_ids for result in results)


def _metrics(
    results: Sequence[RolloutResult], taught: Lessons, training: Training | None, learning_rate: float
) -> dict[str, float]:
    """The numbers of a step; those of an update are left out when there was none."""
    metrics = rollout_figures(results, [taught]) | {
        "learning_rate": learning_rate,
        "tokens_trained": training.n_tokens if training else 0,
    }
    if training is not None:
        metrics |= {
            "loss": training.loss,
            "grad_norm": training.grad_norm,
            "clip_fraction": training.clip_fraction,
            "nll": training.nll,
            "updates": training.n_updates,
        }
        if training.gap_mean is not None and training.gap_max is not None:
            metrics |= {"logprob_gap_mean": training.gap_mean, "logprob_gap_max": training.gap_max}
        if training.value_loss is not None:
            metrics["value_loss"] = training.value_loss
        if training.unreplayed is not None:
            metrics["logprob_gap_unreplayed_mean"] = training.unreplayed.total / max(1, training.unreplayed.n)
            metrics["logprob_gap_unreplayed_max"] = training.unreplayed.largest
    return metrics
