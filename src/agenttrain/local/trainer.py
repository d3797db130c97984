"""Groups of rollouts to updates by a policy gradient, the weights published after each to whatever engine serves.

Invariants: before a step's first update the log probabilities recorded in sampling are compared with the trainer's own;
the weight version goes up exactly when weights were published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agenttrain.local.embedded import EmbeddedTrainer
from agenttrain.local.learner import Training
from agenttrain.local.measured import measured_metrics
from agenttrain.protocols import TrainerContext
from agenttrain.records import RolloutResult, StepResult
from agenttrain.trainer.advantage import own_rewards
from agenttrain.trainer.batches import Lessons, lessons
from agenttrain.trainer.credit import credited, kl_penalty


class LocalTrainer(EmbeddedTrainer):
    """Trains the groups that teach, by the algorithm that `trainer.algorithm` names."""

    name = "local"

    def __init__(self, context: TrainerContext) -> None:
        """Load the policy and open the engine; raises as EmbeddedTrainer does."""
        super().__init__(context)
        self._engine_is_behind = False
        """An update was undone after the engine may have taken its weights."""

    def _one_step(self) -> StepResult:
        if self._engine_is_behind:
            self._publish(self.weight_version)
        return super()._one_step()

    def _updated(
        self, taught: Lessons, results: Sequence[RolloutResult], step: int, learning_rate: float
    ) -> tuple[Lessons, Training, dict[str, float]]:
        """Train and publish, or leave everything as it was."""
        began = time.perf_counter()
        with self._learner.whole_or_undone(), self._engine_noted():
            taught, fixed = self._measured(taught, results)
            training = self._learner.train(
                taught.kept, step=step, learning_rate=learning_rate, weight_version=self.weight_version
            )
            trained = time.perf_counter()
            self._publish(self.weight_version + 1)
        return taught, training, {**fixed, "train_s": trained - began, "sync_s": time.perf_counter() - trained}

    def _lessons(self, results: Sequence[RolloutResult]) -> Lessons:
        """Who teaches; where a critic judges, a rollout needs no siblings.

        Where k1 is taken from a group's rewards, its advantages come once that is measured.
        """
        compares = self._learner.algorithm.critic is None
        later = compares and self._cost_in_reward > 0
        return lessons(results, own_rewards if later else self._context.advantages, compares=compares)

    @property
    def _cost_in_reward(self) -> float:
        return self._settings.kl_coefficient if self._settings.kl == "k1" else 0.0

    def _measured(self, taught: Lessons, results: Sequence[RolloutResult]) -> tuple[Lessons, dict[str, float]]:
        """The same lessons with what stays fixed through the step's updates, and the figures of it."""
        critic, cost = self._learner.algorithm.critic, self._cost_in_reward
        kept = self._learner.measured(taught.kept)
        if critic is not None:
            kept = credited(kept, critic, kl_coefficient=cost)
        elif cost:
            penalties = {lesson.rollout_id: cost * kl_penalty(lesson) for lesson in kept}
            scored = lessons(results, self._context.advantages, penalties=penalties).kept
            kept = tuple(replace(other, measured=one.measured) for one, other in zip(kept, scored, strict=True))
        return replace(taught, kept=kept), measured_metrics(kept, self._settings)

    @contextmanager
    def _engine_noted(self) -> Iterator[None]:
        """When an update is undone the engine may have taken its weights already: it gets the others again."""
        version = self.weight_version
        try:
            yield
        except BaseException:
            self.weight_version = self._own_version = version
            self._engine_is_behind = True
            raise

    def _publish(self, version: int) -> None:
        super()._publish(version)
        self._engine_is_behind = False

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote, and publish its weights to the engine; raises as EmbeddedTrainer does."""
        super().restore(folder)
        self._publish(self._own_version)
