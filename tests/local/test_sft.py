"""Fine-tuning on successes: its loss, what it keeps, that the base samples until the end, and that it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agenttrain.config import Config
from agenttrain.local.engine import LocalEngine
from agenttrain.local.learnable import unique_weights
from agenttrain.local.sft import SftTrainer, successes
from agenttrain.protocols import TrainerContext
from agenttrain.records import (
    Ids,
    Reward,
    RewardPart,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sample,
    Sampling,
    Status,
    StepResult,
    Task,
)
from agenttrain.sample.staleness import step_staleness
from agenttrain.testing import toy_project
from agenttrain.trainer.advantage import own_rewards
from agenttrain.trainer.algorithms import with_algorithm
from agenttrain.trainer.batches import Lesson

Folder = Callable[[str], Path]
Run = Callable[[Any, Sequence[RolloutRequest], Any], list[RolloutResult]]
TASKS = [Task(id=str(i), input={}) for i in range(6)]
GREEDY = Sampling(temperature=0, max_tokens=12, seed=0, stop_ids=())


def result_of(
    request: RolloutRequest,
    samples: Sequence[Sample] = (),
    *,
    success: bool = True,
    status: Status = "completed",
    evidence: dict[str, Any] | None = None,
) -> RolloutResult:
    part = RewardPart(name="v", score=float(success), weight=1.0, evidence=evidence or {})
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase="train",
        step=request.step,
        sibling=request.sibling,
        attempt=0,
        status=status,
        reward=Reward(score=float(success), parts=(part,)) if status == "completed" else None,
        success=success,
        n_sampled_ids=sum(map(sum, (sample.response_mask for sample in samples))),
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=tuple(samples))


def request_of(task: str, sibling: int = 0) -> RolloutRequest:
    return RolloutRequest(task=Task(id=task, input={}), phase="train", step=1, sibling=sibling)


def sample_of(
    request: RolloutRequest, prompt: Ids, response: Ids, mask: Sequence[int] = (), *, version: int = 0, **told: Any
) -> Sample:
    return Sample(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=tuple(mask) or (1,) * len(response),
        response_logprobs=told.get("logprobs", (0.0,) * len(response)),
        reward_score=0.0,
        num_turns=1,
        metrics={},
        extra_fields={"rollout_id": request.rollout_id, "min_global_steps": version, "max_global_steps": version},
    )


def bandit(engine: Any, requests: Sequence[RolloutRequest], _on_done: Any) -> list[RolloutResult]:
    """Six ids; a success where four or more are odd."""
    asked = []
    for request in requests:
        prompt, seed = (
            (5, 6, 7 + int(request.task.id)),
            request.step * 999 + int(request.task.id) * 99 + request.sibling,
        )
        sampling = Sampling(temperature=request.temperature, max_tokens=6, seed=seed, stop_ids=())
        asked.append((request, prompt, engine.generate(prompt, sampling, session=request.rollout_id)))
    results = []
    for request, prompt, future in asked:
        answer = future.result(timeout=60)
        engine.release(request.rollout_id)
        version = answer.weight_versions[0]
        sample = sample_of(request, prompt, answer.token_ids, version=version, logprobs=answer.logprobs)
        results.append(result_of(request, [sample], success=sum(i % 2 for i in answer.token_ids) >= 4))
    return results


def none_succeeds(engine: Any, requests: Sequence[RolloutRequest], on_done: Any) -> list[RolloutResult]:
    return [result_of(r.request, r.samples, success=False) for r in bandit(engine, requests, on_done)]


def config_of(temperature: float, settings: dict[str, Any]) -> Config:
    own = {"name": "sft", "steps": 3, "tasks_per_step": 4, "group_size": 4, "learning_rate": 1e-2} | settings
    return with_algorithm(Config(trainer=own, sampling={"temperature": temperature}))  # type: ignore[arg-type]


@contextmanager
def opened(
    folder: Path, run: Run = bandit, *, temperature: float = 0.7, deterministic: bool = False, **settings: Any
) -> Iterator[SftTrainer]:
    trainer = SftTrainer(
        TrainerContext(
            config=config_of(temperature, settings),
            spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=str(folder)),
            tasks=TASKS,
            open_engine=lambda: LocalEngine(folder, one_at_a_time=deterministic),
            run_rollouts=run,
            advantages=own_rewards,
        )
    )
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(trainer: SftTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in unique_weights(trainer._learnable.model).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def greedy(trainer: SftTrainer) -> Ids:
    answer: Ids = trainer._engine.generate((5, 6, 7), GREEDY, session="greedy").result(timeout=60).token_ids
    trainer._engine.release("greedy")
    return answer


ROWS: Sequence[tuple[str, Ids, Ids, Sequence[int]]] = (
    ("0", (5, 6, 7), (8, 9, 10, 11, 12, 13), (1, 1, 0, 0, 1, 1)),
    ("1", (5, 6), (20, 21, 22), (1, 0, 1)),
    ("2", (30, 31, 32, 33), (40, 41), (1, 1)),
)


def loss_and_gradient(trainer: SftTrainer, kept: Sequence[Lesson]) -> tuple[float, list[torch.Tensor]]:
    """Of one update; the weights stay."""
    caught: list[torch.Tensor] = []
    parameters, step = trainer._learnable.parameters, trainer._learner.optimizer.step
    trainer._learner.optimizer.step = lambda: caught.extend(  # type: ignore[assignment,method-assign]
        p.grad.clone() for p in parameters if p.grad is not None
    )
    loss = trainer._learner.train(kept, step=1, learning_rate=0.0, weight_version=0).loss
    trainer._learner.optimizer.step = step  # type: ignore[method-assign]
    return loss, caught


def rows_as_results(tasks: Sequence[str]) -> list[RolloutResult]:
    requests = [request_of(task, sibling) for sibling, task in enumerate(tasks)]
    return [
        result_of(request, [sample_of(request, prompt, response, mask)])
        for request, (_, prompt, response, mask) in zip(requests, ROWS, strict=True)
    ]


def likelihoods(model: Any) -> list[tuple[torch.Tensor, int]]:
    """transformers' own loss of each row's trained tokens, and how many they are."""
    found = []
    for _, prompt, response, mask in ROWS:
        labels = [-100] * len(prompt) + [i if m else -100 for i, m in zip(response, mask, strict=True)]
        found.append((model(torch.tensor([[*prompt, *response]]), labels=torch.tensor([labels])).loss, sum(mask)))
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_loss_is_that_of_transformers(
    architecture: str, model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    """Negative log likelihood, the mean over all trained tokens, whatever the temperature of sampling was."""
    model = plain_model(architecture)
    rows = likelihoods(model)
    expected = sum(loss * n for loss, n in rows) / 8
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    with opened(model_folder(architecture), minibatches=1, max_grad_norm=1e9) as trainer:
        loss, found = loss_and_gradient(trainer, successes(rows_as_results(["a", "b", "c"])).kept)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert max(float((a - b).abs().max()) for a, b in zip(found, gradient, strict=True)) < 1e-5


def test_a_task_that_succeeds_twice_weighs_as_one_that_does_once(
    model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    """Rows of 4 and 2 tokens count as half a rollout each, the one of 2 as a whole: 5 tokens' worth in all."""
    (a, _), (b, _), (c, _) = likelihoods(plain_model("qwen3"))
    expected = (4 * a / 2 + 2 * b / 2 + 2 * c) / 5
    with opened(model_folder("qwen3"), minibatches=1) as trainer:
        loss, _ = loss_and_gradient(trainer, successes(rows_as_results(["x", "x", "y"])).kept)
    assert loss == pytest.approx(expected.item(), abs=1e-6)


def test_only_verified_successes_are_kept_and_the_others_have_a_reason() -> None:
    requests = [request_of("a", 0), request_of("a", 1), *(request_of("b", i) for i in range(5)), request_of("c")]
    a0, a1, b0, b1, b2, b3, b4, c = requests
    taught = successes(
        [
            result_of(a0, [sample_of(a0, (5,), (6,))]),
            result_of(a1, [sample_of(a1, (5,), (6,))]),
            result_of(b0, [sample_of(b0, (5,), (6,))], success=False),
            result_of(b1, status="environment_failure", success=False),
            result_of(b2, [sample_of(b2, (5,), (6,))], evidence={"tampering": ("test_it.py",)}),
            result_of(b3, [sample_of(b3, (5,), (6,), (0,))]),
            result_of(b4),
            result_of(c, [sample_of(c, (5,), (6,))]),
        ]
    )
    assert [(lesson.rollout_id, lesson.share, lesson.advantage) for lesson in taught.kept] == [
        (a0.rollout_id, 0.5, 1.0),
        (a1.rollout_id, 0.5, 1.0),
        (c.rollout_id, 1.0, 1.0),
    ]
    assert taught.dropped == {
        b0.rollout_id: "not a success",
        b1.rollout_id: "status environment_failure",
        b2.rollout_id: "changed what judges it",
        b3.rollout_id: "no trained tokens",
        b4.rollout_id: "no trained tokens",
    }
    assert (taught.n_groups, taught.n_trained, taught.n_equal) == (3, 2, 0)


def check_step(step: StepResult) -> None:
    """All samples are the base's, every rollout is accounted for, and the gap is told where the base is what trains."""
    assert {sample.extra_fields["max_global_steps"] for sample in step.samples} == {0}
    assert set(step_staleness(step)) == {step.step - 1}
    assert len(step.trained_rollout_ids) + len(step.dropped) == 16
    assert set(step.dropped.values()) == {"not a success"}
    assert step.metrics["successes"] == len(step.trained_rollout_ids)
    assert ("logprob_gap_max" in step.metrics) == (step.step == 1)
    assert step.metrics.get("logprob_gap_max", 0.0) < 2e-5
    assert {a for row in step.advantages for a in row} == {1.0}


def test_the_base_samples_until_the_end_and_the_engine_gets_what_was_learned_then(model_folder: Folder) -> None:
    with opened(model_folder("qwen3")) as trainer:
        base, seen = greedy(trainer), []
        for step in trainer.steps():
            check_step(step)
            seen.append((step.weight_version, trainer.weight_version, trainer._engine.weight_version))
            assert greedy(trainer) == base
        assert seen == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
        assert (trainer.weight_version, trainer._engine.weight_version) == (3, 3)
        learned = greedy(trainer)
        held = trainer.evaluate([RolloutRequest(task=TASKS[0], phase="held_out", temperature=0.0)])
    assert learned != base
    assert held[0].samples[0].extra_fields["min_global_steps"] == 3


@pytest.mark.slow
def test_successes_get_likelier(model_folder: Folder) -> None:
    """More of what is sampled in the end succeeds than of what the base sampled."""

    def share(trainer: SftTrainer) -> float:
        requests = [RolloutRequest(task=t, phase="train", step=9, sibling=i) for t in TASKS for i in range(8)]
        return sum(result.rollout.success for result in trainer.evaluate(requests)) / len(requests)

    with opened(model_folder("qwen3"), steps=6, learning_rate=3e-2) as trainer:
        before = share(trainer)
        list(trainer.steps())
        assert share(trainer) > before + 0.2


def test_a_step_without_a_success_trains_nothing(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), none_succeeds, steps=2) as trainer:
        before = weights_of(trainer)
        done = list(trainer.steps())
        assert equal(before, weights_of(trainer))
        assert (trainer.weight_version, trainer._engine.weight_version) == (0, 0)
    assert [(step.weight_version, step.metrics["successes"], step.samples) for step in done] == [(0, 0, ())] * 2
    assert all("loss" not in step.metrics for step in done)


@pytest.mark.slow
def test_goes_on_from_a_checkpoint_by_the_base_and_ends_in_equal_weights(model_folder: Folder, tmp_path: Path) -> None:
    """To the last bit, the samples too."""
    exact: dict[str, Any] = {"deterministic": True, "steps": 2, "tasks_per_step": 2, "group_size": 3}
    with opened(model_folder("qwen3"), **exact) as whole:
        expected = list(whole.steps())
        weights = weights_of(whole)
    with opened(model_folder("qwen3"), **exact) as first:
        next(first.steps())
        first.save(tmp_path / "checkpoint")
    with opened(model_folder("qwen3"), **exact) as second:
        second.restore(tmp_path / "checkpoint")
        assert (second.weight_version, second._engine.weight_version) == (0, 0)
        rest = list(second.steps())
        assert equal(weights, weights_of(second))
        assert second._engine.weight_version == 2
    assert [step.samples for step in rest] == [step.samples for step in expected[1:]]
    assert [step.weight_version for step in rest] == [2]
    assert all(step.samples for step in expected)


def test_a_run_that_was_stopped_after_its_last_step_publishes_what_it_learned(
    model_folder: Folder, tmp_path: Path
) -> None:
    with opened(model_folder("qwen3"), steps=1) as first:
        list(first.steps())
        first.save(tmp_path / "checkpoint")
        learned = greedy(first)
    with opened(model_folder("qwen3"), steps=1) as second:
        second.restore(tmp_path / "checkpoint")
        assert list(second.steps()) == []
        assert (second.weight_version, greedy(second)) == (1, learned)


def test_copies_of_a_sibling_are_counted_once(model_folder: Folder) -> None:
    """Four tasks, each with the same ids four times: 16 successes, 4 of them distinct."""

    def copied(engine: Any, requests: Sequence[RolloutRequest], _on_done: Any) -> list[RolloutResult]:
        return [result_of(r, [sample_of(r, (5, 6), (7, 8, 9), logprobs=(-4.0,) * 3)]) for r in requests]

    with opened(model_folder("qwen3"), copied, steps=1) as trainer:
        (step,) = trainer.steps()
    assert (step.metrics["successes"], step.metrics["distinct_successes"]) == (16, 4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 on transformers 5.24
def test_an_adapter_learns_and_is_published_once(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), steps=2, adapter="lora", lora_rank=4, learning_rate=0.1) as trainer:
        base = greedy(trainer)
        next(steps := trainer.steps())
        assert greedy(trainer) == base
        list(steps)
        assert (trainer.adapter or {})["rank"] == 4
        assert trainer._engine.weight_version == 2
        assert greedy(trainer) != base


def test_a_whole_run_reports_what_it_learned_from(tmp_path: Path) -> None:
    """Every sampled token has a place, none drifted; the evaluation is by what was learned."""
    project = toy_project(tmp_path)
    text = project.graph.read_text()
    project.graph.write_text(text.replace("len(text)\n\n", "len(text) > 0.5\n\n").replace("-> float", "-> bool"))
    run = project.fit(trainer={"name": "sft", "steps": 2, "group_size": 4}, sampling={"temperature": 2.0})
    report, rows = run.report, run.folder.metrics()
    n = sum(row["successes"] for row in rows)
    assert (report["trainer"], report["algorithm"], report["learned_from"]["successes"]) == ("sft", "sft", n)
    tokens = report["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["dropped"]
    assert (tokens["drifted"], tokens["frozen"], set(tokens["dropped_by_cause"])) == (0, 0, {"not a success"})
    text = (run.folder.path / "report.md").read_text()
    assert f"2 steps of supervised fine-tuning on {n} verified successes of the base (" in text
    by_phase = {
        phase: {v for r in run.store.results() if r.rollout.phase == phase for t in r.turns for v in t.weight_versions}
        for phase in ("train", "held_out")
    }
    assert by_phase == {"train": {0}, "held_out": {2}}
