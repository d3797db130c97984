"""The base's own verified successes to updates by their likelihood: what reinforcement learning has to beat.

The engine keeps the weights that the run began with until training has ended, so that all that is learned from is the
base's own. Invariants: only successes are trained; a step's tasks weigh alike, however many rollouts of them succeeded,
so that copies of one success weigh no more than the one; a resumed run samples from the base too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from agenttrain.local.embedded import EmbeddedTrainer
from agenttrain.local.learner import Training
from agenttrain.records import RolloutResult, StepResult
from agenttrain.reward.tampering import tampering_of
from agenttrain.trainer.batches import NOTHING_SAMPLED, Lesson, Lessons, usable, why_unusable

NOT_A_SUCCESS = "not a success"
TAMPERED = "changed what judges it"


class SftTrainer(EmbeddedTrainer):
    """Trains rollouts that succeeded, and publishes once, at the end."""

    name = "sft"

    def steps(self) -> Iterator[StepResult]:
        """Train on the base's successes, one result a step; after the last one the engine gets what was learned."""
        yield from super().steps()
        if self.weight_version != self._own_version:
            self._publish(self._own_version)

    def _lessons(self, results: Sequence[RolloutResult]) -> Lessons:
        return successes(results)

    def _figures(self, taught: Lessons) -> dict[str, float]:
        """successes: those that were trained; distinct_successes: without copies of a sibling."""
        copies = {
            (
                lesson.result.request.task.id,
                tuple((each.prompt_ids, each.response_ids, each.response_mask) for each in lesson.samples),
            )
            for lesson in taught.kept
        }
        return {"successes": len(taught.kept), "distinct_successes": len(copies)}

    def _updated(
        self, taught: Lessons, results: Sequence[RolloutResult], step: int, learning_rate: float
    ) -> tuple[Lessons, Training, dict[str, float]]:
        began = time.perf_counter()
        with self._learner.whole_or_undone():
            training = self._learner.train(
                taught.kept, step=step, learning_rate=learning_rate, weight_version=self._own_version
            )
        self._own_version += 1
        return taught, training, {"train_s": time.perf_counter() - began, "sync_s": 0.0}


def successes(results: Sequence[RolloutResult]) -> Lessons:
    """The rollouts that succeeded, each task's together counting as one rollout.

    Example: two successes of task a and one of task b: shares 1/2, 1/2 and 1.
    """
    dropped = {result.rollout.id: why for result in results if (why := _why_not(result))}
    taken = [result for result in results if result.rollout.id not in dropped]
    n_of_task = Counter(result.request.task.id for result in taken)
    return Lessons(
        kept=tuple(
            Lesson(result=result, advantage=1.0, share=1.0 / n_of_task[result.request.task.id]) for result in taken
        ),
        dropped=dropped,
        n_groups=len({result.request.task.id for result in results}),
        n_equal=0,
        n_trained=len(n_of_task),
    )


def _why_not(result: RolloutResult) -> str:
    """Why a rollout is not trained; empty where it is."""
    if not usable(result):
        return why_unusable(result)
    if not result.rollout.success:
        return NOT_A_SUCCESS
    if tampering_of(result.rollout):
        return TAMPERED
    return "" if any(any(sample.response_mask) for sample in result.samples) else NOTHING_SAMPLED
