"""The local trainer on a bandit: it learns, loses no rollout, undoes what was interrupted, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agenttrain.config import Config
from agenttrain.errors import ConfigError, RunError, TrainerError
from agenttrain.local.engine import LocalEngine
from agenttrain.local.learnable import unique_weights
from agenttrain.local.trainer import LocalTrainer
from agenttrain.protocols import TrainerContext
from agenttrain.records import (
    Generation,
    Ids,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sample,
    Sampling,
    Task,
)
from agenttrain.trainer.advantage import group_advantages
from agenttrain.trainer.batches import Lesson
from agenttrain.trainer.schedule import Cursor, learning_rate_at, tasks_at

Folder = Callable[[str], Path]
Run = Callable[[Any, Sequence[RolloutRequest], Any], list[RolloutResult]]
TASKS = [Task(id=str(i), input={}) for i in range(6)]


def odd_share(ids: Ids) -> float:
    return sum(i % 2 for i in ids) / len(ids)


def result_of(
    request: RolloutRequest, samples: Sequence[Sample], reward: float | None, n_sampled: int = 0
) -> RolloutResult:
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase=request.phase,
        step=request.step,
        sibling=request.sibling,
        attempt=0,
        status="environment_failure" if reward is None else "completed",
        reward=None if reward is None else Reward(score=reward, parts=()),
        n_sampled_ids=n_sampled,
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=tuple(samples))


def sample_of(request: RolloutRequest, prompt: Ids, answer: Generation) -> Sample:
    return Sample(
        prompt_ids=prompt,
        response_ids=answer.token_ids,
        response_mask=(1,) * len(answer.token_ids),
        response_logprobs=answer.logprobs,
        reward_score=0.0,
        num_turns=1,
        metrics={},
        extra_fields={"rollout_id": request.rollout_id, "min_global_steps": min(answer.weight_versions)},
    )


def seed_of(request: RolloutRequest) -> int:
    return request.step * 10_000 + int(request.task.id) * 100 + request.sibling


def bandit(engine: Any, requests: Sequence[RolloutRequest], _on_done: Any) -> list[RolloutResult]:
    """Reward: the share of odd ids among six."""
    futures: list[tuple[RolloutRequest, Ids, Future[Generation]]] = []
    for request in requests:
        prompt = (5, 6, 7 + int(request.task.id))
        sampling = Sampling(temperature=request.temperature, max_tokens=6, seed=seed_of(request), stop_ids=())
        futures.append((request, prompt, engine.generate(prompt, sampling, session=request.rollout_id)))
    results = []
    for request, prompt, future in futures:
        answer = future.result(timeout=60)
        engine.release(request.rollout_id)
        results.append(
            result_of(request, [sample_of(request, prompt, answer)], odd_share(answer.token_ids), len(answer.token_ids))
        )
    return results


@contextmanager
def opened(folder: Path, run: Run = bandit, *, deterministic: bool = False, **settings: Any) -> Iterator[LocalTrainer]:
    chosen = {"steps": 8, "tasks_per_step": 4, "group_size": 8, "learning_rate": 1e-2} | settings
    trainer = LocalTrainer(
        TrainerContext(
            config=Config(trainer=chosen),  # type: ignore[arg-type]
            spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=str(folder)),
            tasks=TASKS,
            open_engine=lambda: LocalEngine(folder, one_at_a_time=deterministic),
            run_rollouts=run,
            advantages=group_advantages,
        )
    )
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in unique_weights(trainer._learnable.model).items()}


@pytest.mark.parametrize("architecture", ["qwen3", "mamba"])
def test_learns_and_agrees_with_the_engine(architecture: str, model_folder: Folder) -> None:
    """The reward rises, and before each update trainer and engine give one log probability."""
    steps = 8 if architecture == "qwen3" else 3
    with opened(model_folder(architecture), steps=steps, learning_rate=3e-2) as trainer:
        done = list(trainer.steps())
    assert [step.step for step in done] == list(range(1, steps + 1))
    assert [step.weight_version for step in done] == list(range(1, steps + 1))
    assert max(step.metrics["logprob_gap_max"] for step in done) < 2e-5
    if architecture == "qwen3":
        assert done[-1].metrics["reward"] > done[0].metrics["reward"] + 0.2


def test_every_rollout_is_trained_or_dropped_and_the_samples_are_those_of_the_loss(model_folder: Folder) -> None:
    """Of four tasks one is all equal, one lost all but one rollout, and the others teach."""

    def partly(engine: Any, requests: Sequence[RolloutRequest], on_done: Any) -> list[RolloutResult]:
        results = bandit(engine, requests, on_done)
        ids = sorted({r.request.task.id for r in results})
        equal, lost = ids[0], ids[1]
        changed = []
        for r in results:
            if r.request.task.id == equal:
                changed.append(result_of(r.request, r.samples, 0.5))
            elif r.request.task.id == lost and r.request.sibling:
                changed.append(result_of(r.request, (), None))
            else:
                changed.append(r)
        return changed

    with opened(model_folder("qwen3"), partly, steps=1) as trainer:
        (step,) = trainer.steps()
    assert len(step.trained_rollout_ids) == 16
    assert len(step.dropped) == 16
    assert not set(step.trained_rollout_ids) & set(step.dropped)
    reasons = sorted(set(step.dropped.values()))
    assert reasons == ["all rewards equal", "fewer than two usable rollouts", "status environment_failure"]
    assert sorted(s.extra_fields["rollout_id"] for s in step.samples) == sorted(step.trained_rollout_ids)
    assert (step.metrics["groups"], step.metrics["groups_trained"], step.metrics["groups_equal"]) == (4, 2, 1)
    assert step.metrics["tokens_trained"] == 16 * 6


def test_a_step_that_teaches_nothing_publishes_nothing(model_folder: Folder) -> None:
    def equal(engine: Any, requests: Sequence[RolloutRequest], on_done: Any) -> list[RolloutResult]:
        return [result_of(r.request, r.samples, 1.0) for r in bandit(engine, requests, on_done)]

    with opened(model_folder("qwen3"), equal, steps=2) as trainer:
        before = weights_of(trainer)
        done = list(trainer.steps())
        after = weights_of(trainer)
    assert [step.weight_version for step in done] == [0, 0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "loss" not in done[0].metrics
    assert done[0].metrics["reward"] == 1.0


def lesson_of(name: str, parts: Sequence[tuple[Ids, Ids, Sequence[int]]], advantage: float) -> Lesson:
    """A rollout of trajectories (prompt, response, mask), with made-up recorded log probabilities."""
    request = RolloutRequest(task=Task(id=name, input={}), phase="train", step=1)
    samples = [
        Sample(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=tuple(mask),
            response_logprobs=tuple((-4.0 - 0.01 * i) * m for i, m in zip(response, mask, strict=True)),
            reward_score=0.0,
            num_turns=1,
            metrics={},
            extra_fields={"rollout_id": request.rollout_id},
        )
        for prompt, response, mask in parts
    ]
    return Lesson(result=result_of(request, samples, 1.0), advantage=advantage)


def gradient(trainer: LocalTrainer, kept: Sequence[Lesson]) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradient that one update would use; the weights stay."""
    caught: list[torch.Tensor] = []
    step = trainer._learner.optimizer.step
    try:
        trainer._learner.optimizer.step = lambda: caught.extend(  # type: ignore[assignment,method-assign]
            p.grad.clone() for p in trainer._learnable.parameters if p.grad is not None
        )
        training = trainer._learner.train(kept, step=1, learning_rate=0.0, weight_version=0)
    finally:
        trainer._learner.optimizer.step = step  # type: ignore[method-assign]
    return training.loss, caught


LESSONS = [
    lesson_of("0", [((5, 6, 7), (8, 9, 10, 11, 12, 13), (1, 1, 0, 0, 1, 1))], 1.3),
    lesson_of("1", [((5, 6), (20, 21, 22), (1, 0, 1))], -0.7),
    lesson_of("2", [((30, 31, 32, 33), (40, 41), (1, 1))], 0.4),
]
SPLIT = [
    lesson_of("0", [((5, 6, 7), (8, 9), (1, 1)), ((5, 6, 7, 8, 9, 10, 11), (12, 13), (1, 1))], 1.3),
    *LESSONS[1:],
]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma3", "mamba"])
@pytest.mark.parametrize("mean", ["token-mean", "rollout-mean"])
def test_the_gradient_is_that_of_the_formula(
    architecture: str, mean: str, model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    """Against one trajectory at a time through plain transformers: no padding, no hook, no threads."""
    model, total = plain_model(architecture), torch.zeros(())
    for lesson in LESSONS:
        (sample,) = lesson.samples
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logprobs = model(ids).logits.log_softmax(-1)
        for t, mask in enumerate(sample.response_mask):
            if mask:
                at = len(sample.prompt_ids) + t
                ratio = (logprobs[0, at - 1, ids[0, at]] - sample.response_logprobs[t]).exp()
                surrogate = torch.minimum(ratio * lesson.advantage, ratio.clamp(0.8, 1.28) * lesson.advantage)
                n = 8 if mean == "token-mean" else 3 * sum(sample.response_mask)
                total = total - surrogate / n
    expected = torch.autograd.grad(total, list(model.parameters()))
    with opened(model_folder(architecture), minibatches=1, loss=mean, max_grad_norm=1e9) as trainer:
        loss, grads = gradient(trainer, LESSONS)
    assert loss == pytest.approx(total.item(), abs=1e-6)
    assert len(grads) == len(expected)
    scale = max(float(e.abs().max()) for e in expected)
    assert max(float((g - e).abs().max()) for g, e in zip(grads, expected, strict=True)) < 1e-5 * max(1.0, scale)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "gemma2"])
def test_reading_a_common_beginning_once_changes_nothing(architecture: str, model_folder: Folder) -> None:
    """Loss and gradient are those of reading each row in full."""
    begin = tuple(range(3, 33))
    kept = [
        lesson_of("0", [((*begin, 5, 6, 7), (8, 9, 10, 11), (1, 1, 0, 1))], 1.3),
        lesson_of("1", [((*begin, 40), (20, 21), (1, 1))], -0.7),
        lesson_of("2", [((*begin, 5, 41), (22, 23, 24, 25, 26), (1, 0, 0, 0, 1))], 0.4),
    ]
    with opened(model_folder(architecture), minibatches=1) as trainer:
        assert trainer._learner._passes.shortest_prefix == 16
        trainer._learner._passes.n_workers = 1
        loss, grads = gradient(trainer, kept)
        trainer._learner._passes.shortest_prefix = None
        loss_full, grads_full = gradient(trainer, kept)
    assert abs(loss - loss_full) < 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(grads, grads_full, strict=True)) < 2e-6


@pytest.mark.parametrize("architecture", ["gemma3", "mamba"])
def test_models_without_plain_attention_read_every_row_in_full(architecture: str, model_folder: Folder) -> None:
    with opened(model_folder(architecture)) as trainer:
        assert trainer._learner._passes.shortest_prefix is None


@pytest.mark.parametrize("mean", ["token-mean", "rollout-mean"])
def test_splitting_a_rollout_changes_neither_loss_nor_gradient(mean: str, model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), minibatches=1, loss=mean) as trainer:
        loss, grads = gradient(trainer, LESSONS)
        loss_split, grads_split = gradient(trainer, SPLIT)
    assert abs(loss - loss_split) < 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(grads, grads_split, strict=True)) < 1e-6


def test_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(model_folder: Folder, tmp_path: Path) -> None:
    with opened(model_folder("qwen3"), steps=4) as whole:
        list(whole.steps())
        expected = weights_of(whole)
    with opened(model_folder("qwen3"), steps=4) as first:
        steps = first.steps()
        next(steps)
        next(steps)
        first.save(tmp_path / "checkpoint")
    with opened(model_folder("qwen3"), steps=4) as second:
        second.restore(tmp_path / "checkpoint")
        assert second.weight_version == 2
        assert [step.step for step in second.steps()] == [3, 4]
        after = weights_of(second)
    assert all(torch.allclose(expected[name], after[name], atol=1e-5) for name in expected)


def test_deterministic_runs_end_in_equal_weights(model_folder: Folder) -> None:
    """To the last bit, whatever the order in which the rollouts ask."""

    def backwards(engine: Any, requests: Sequence[RolloutRequest], on_done: Any) -> list[RolloutResult]:
        return bandit(engine, requests[::-1], on_done)[::-1]

    ends = []
    for run in (bandit, backwards):
        with opened(model_folder("qwen3"), run, steps=2, deterministic=True) as trainer:
            list(trainer.steps())
            ends.append(weights_of(trainer))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_another_run_is_refused(model_folder: Folder, tmp_path: Path) -> None:
    with opened(model_folder("qwen3")) as trainer:
        trainer.save(tmp_path / "checkpoint")
        trainer._config = Config(seed=5)
        with pytest.raises(RunError, match="seed 0, and this run has 5"):
            trainer.restore(tmp_path / "checkpoint")


def test_an_interrupted_update_is_undone(model_folder: Folder) -> None:
    """Ctrl-C between two optimizer steps: weights and optimizer are those before the step, and it can be made again."""
    with opened(model_folder("qwen3"), steps=2) as trainer:
        next(trainer.steps())
        before, state = weights_of(trainer), trainer._learner.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        update, n = trainer._learner._update, 0

        def interrupted(*args: Any) -> Any:
            nonlocal n
            n += 1
            if n == 2:
                raise KeyboardInterrupt
            return update(*args)

        trainer._learner._update = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(trainer.steps())
        after = weights_of(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert torch.equal(trainer._learner.optimizer.state_dict()["state"][0]["exp_avg"], state)
        trainer._learner._update = update  # type: ignore[method-assign]
        (again,) = trainer.steps()
    assert (again.step, again.weight_version) == (2, 2)
    assert again.metrics["logprob_gap_max"] < 2e-5


def test_a_gradient_that_is_no_number_ends_training(model_folder: Folder) -> None:
    broken = [lesson_of("0", [((5, 6), (7, 8), (1, 1))], float("nan")), *LESSONS[1:]]
    with opened(model_folder("qwen3")) as trainer, pytest.raises(TrainerError, match="an update needs a finite one"):
        trainer._learner.train(broken, step=3, learning_rate=1e-3, weight_version=2)


def test_an_export_answers_as_the_engine_does(model_folder: Folder, tmp_path: Path) -> None:
    """Float32, the tokenizer's files with it, and the same greedy ids in plain transformers."""
    with opened(model_folder("qwen3"), steps=2) as trainer:
        list(trainer.steps())
        trainer.export(tmp_path)
        greedy = Sampling(temperature=0, max_tokens=20, seed=0, stop_ids=())
        answer = trainer._engine.generate((5, 6, 7), greedy, session="x").result()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert (tmp_path / "tokenizer.json").read_text() == '{"a": 1}'
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([[5, 6, 7]]),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
    assert tuple(ids[0, 3:].tolist()) == answer.token_ids


def test_evaluation_uses_the_engine_that_serves_training(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), steps=1) as trainer:
        list(trainer.steps())
        request = RolloutRequest(task=TASKS[0], phase="held_out", temperature=0.0)
        (result,) = trainer.evaluate([request])
        assert result.samples[0].extra_fields["min_global_steps"] == 1
        assert trainer.engine_stats()["sampled_ids"] == 4 * 8 * 6 + 6
        assert (trainer.name, trainer.engine_name) == ("local", "local")
        assert trainer.n_parameters == sum(p.numel() for p in trainer._learnable.model.parameters())


def test_a_learning_rate_of_0_measures_noise(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), steps=1, learning_rate=0.0) as trainer:
        before = weights_of(trainer)
        (step,) = trainer.steps()
        after = weights_of(trainer)
    assert step.weight_version == 1
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_no_tasks_are_refused() -> None:
    context = TrainerContext(
        config=Config(),
        spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=""),
        tasks=[],
        open_engine=lambda: LocalEngine(""),
        run_rollouts=bandit,
        advantages=group_advantages,
    )
    with pytest.raises(ConfigError, match="no training tasks"):
        LocalTrainer(context)


def test_tasks_come_in_shuffled_epochs() -> None:
    """Six tasks, four a step: each step has four different ones, and the order is the seed's."""
    cursor, seen = Cursor(), []
    for _ in range(4):
        tasks, cursor = tasks_at(TASKS, cursor, 4, seed=3)
        seen.append([task.id for task in tasks])
        assert len(set(seen[-1])) == 4
    again, _ = tasks_at(TASKS, Cursor(), 4, seed=3)
    assert [task.id for task in again] == seen[0]
    assert len({tuple(step) for step in seen}) > 1
    assert len(tasks_at(TASKS, Cursor(), 100, seed=3)[0]) == 6
    halves, half_cursor = tasks_at(TASKS, Cursor(), 3, seed=3)
    others, _ = tasks_at(TASKS, half_cursor, 3, seed=3)
    assert {task.id for task in (*halves, *others)} == {task.id for task in TASKS}


def test_the_schedule_by_hand() -> None:
    rates = [learning_rate_at(s, steps=10, peak=1.0, warmup=2, final=0.1) for s in (1, 2, 6)]
    assert rates == pytest.approx([0.5, 0.91, 0.55])
    assert learning_rate_at(1, steps=1, peak=0.3, warmup=0, final=0.1) == 0.3
