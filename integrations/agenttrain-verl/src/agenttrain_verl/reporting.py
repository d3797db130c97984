"""A StepOutcome of veRL's trainer becomes the StepResult of ours, in the words of the local trainer."""

from __future__ import annotations

from agenttrain.records import StepResult
from agenttrain.trainer.figures import rollout_figures

from agenttrain_verl.controller import StepOutcome
from agenttrain_verl.step_figures import step_metrics

UPDATE = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Parts of a step that are the update's, by veRL's names in timing_s/."""


def step_result(outcome: StepOutcome) -> StepResult:
    """What `fit` is told of one step; several batches of it are one."""
    results = [result for trained in outcome.trained for result in trained.results]
    kept = [lesson for trained in outcome.trained for lesson in trained.lessons.kept]
    dropped = {name: why for trained in outcome.trained for name, why in trained.lessons.dropped.items()}
    timing = outcome.timing
    rollout_s = timing.get("gen", 0.0)
    metrics = {
        **rollout_figures(results, [trained.lessons for trained in outcome.trained]),
        **step_metrics(outcome.metrics),
        "tokens_trained": float(sum(sum(s.response_mask) for trained in outcome.trained for s in trained.samples)),
        "rollout_s": rollout_s,
        "train_s": sum(timing.get(name, 0.0) for name in UPDATE),
        "sync_s": timing.get("update_weights", 0.0),
        "tokens_per_s": sum(result.rollout.n_sampled_ids for result in results) / max(1e-9, rollout_s),
    }
    return StepResult(
        step=outcome.step,
        weight_version=outcome.step,
        metrics=metrics,
        trained_rollout_ids=tuple(lesson.rollout_id for lesson in kept),
        dropped=dropped,
        samples=tuple(sample for trained in outcome.trained for sample in trained.samples),
        advantages=tuple(row for trained in outcome.trained for row in trained.advantages),
    )
