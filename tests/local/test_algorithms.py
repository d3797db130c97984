"""Every algorithm in the local trainer: the papers' losses, splits that change nothing, resume, what is undone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agenttrain.config import Config
from agenttrain.errors import ConfigError, ModelError, RunError
from agenttrain.local.engine import LocalEngine
from agenttrain.local.trainer import LocalTrainer
from agenttrain.plugins import Plugins
from agenttrain.protocols import TrainerContext
from agenttrain.records import (
    Generation,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sample,
    Sampling,
    Task,
)
from agenttrain.trainer.algorithms import chosen
from agenttrain.trainer.batches import Lesson

Folder = Callable[[str], Path]
Rows = list[tuple[list[int], list[int], list[int], list[float]]]
"""Trajectories of a rollout: prompt, response, mask, recorded log probabilities."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "rloo": {"algorithm": "rloo"},
    "gspo": {"algorithm": "gspo"},
    "ppo": {"algorithm": "ppo", "discount": 0.9, "gae_lambda": 0.8},
    "grpo, k3": {"kl_coefficient": 0.3},
    "rloo, k1": {"algorithm": "rloo", "kl_coefficient": 0.3, "kl": "k1"},
    "ppo, k1": {"algorithm": "ppo", "kl_coefficient": 0.3, "kl": "k1", "discount": 0.9, "gae_lambda": 0.8},
    "grpo, importance": {"importance_cap": 1.1},
}
TASKS = [Task(id=str(i), input={}) for i in range(4)]


@contextmanager
def opened(folder: Path, run: Any = None, *, deterministic: bool = False, **trainer: Any) -> Iterator[LocalTrainer]:
    """A trainer whose critic, if it has one, has seen something already."""
    config = Config(trainer={"steps": 3, "tasks_per_step": 4, "group_size": 4, "learning_rate": 1e-2} | trainer)  # type: ignore[arg-type]
    own = LocalTrainer(
        TrainerContext(
            config=config,
            spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=str(folder)),
            tasks=TASKS,
            open_engine=lambda: LocalEngine(folder, one_at_a_time=deterministic),
            run_rollouts=run or bandit,
            advantages=Plugins.load(only=None).advantage(chosen(config.trainer).advantage),
        )
    )
    try:
        yield own
    finally:
        own.close()


def bandit(engine: Any, requests: Sequence[RolloutRequest], _on_done: Any) -> list[RolloutResult]:
    """Reward: the share of odd ids among six."""
    asked = []
    for request in requests:
        seed = request.step * 10_000 + int(request.task.id) * 100 + request.sibling
        sampling = Sampling(temperature=1.0, max_tokens=6, seed=seed, stop_ids=())
        asked.append((request, engine.generate((5, 6, 7), sampling, session=request.rollout_id)))
    results = []
    for request, future in asked:
        answer: Generation = future.result(timeout=60)
        engine.release(request.rollout_id)
        row = ([5, 6, 7], list(answer.token_ids), [1] * 6, list(answer.logprobs))
        reward = sum(i % 2 for i in answer.token_ids) / 6
        results.append(result_of(request, [row], reward, version=min(answer.weight_versions)))
    return results


def result_of(request: RolloutRequest, rows: Rows, reward: float, version: int = 0) -> RolloutResult:
    rollout = Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        phase="train",
        step=request.step,
        sibling=request.sibling,
        attempt=0,
        status="completed",
        reward=Reward(score=reward, parts=()),
        n_sampled_ids=sum(sum(mask) for *_, mask, _ in rows),
    )
    samples = tuple(
        Sample(
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            response_mask=tuple(mask),
            response_logprobs=tuple(p * m for p, m in zip(logprobs, mask, strict=True)),
            reward_score=reward,
            num_turns=1,
            metrics={},
            extra_fields={"rollout_id": rollout.id, "min_global_steps": version},
        )
        for prompt, response, mask, logprobs in rows
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=samples)


# ── rollouts that are the same in every test ─────────────────────────────────────────────────────────────────────────

REWARDS = {"0": [1.0, 0.0, 0.25], "1": [0.0, 0.5, 1.0]}
MASKS = [[1, 1, 0, 0, 1, 1], [1, 0, 1], [1, 1], [1, 1, 1, 0, 1], [1], [1, 0, 0, 1, 1, 0, 1]]


def rollouts(model: Any) -> list[RolloutResult]:
    """Two groups of three; recorded log probabilities are a plain model's, a little off."""
    draw, results = np.random.default_rng(3), []
    masks = iter(MASKS)
    for task, rewards in REWARDS.items():
        for sibling, reward in enumerate(rewards):
            request = RolloutRequest(task=Task(id=task, input={}), phase="train", step=1, sibling=sibling)
            mask = next(masks)
            prompt = draw.integers(3, 60, 3).tolist()
            response = draw.integers(3, 60, len(mask)).tolist()
            own = logprobs_of(model, prompt, response)
            recorded = [p + float(draw.normal(0, 0.2)) for p in own]
            results.append(result_of(request, [(prompt, response, mask, recorded)], reward))
    return results


def logprobs_of(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Each response id's, read by itself: no padding, no shared beginning."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].double().log_softmax(-1)
    return [float(logits[len(prompt) + t - 1, token]) for t, token in enumerate(response)]


def split(result: RolloutResult, cuts: Sequence[int]) -> RolloutResult:
    """The same rollout in more trajectories: each begins at a cut, with all before it as its prompt."""
    (sample,) = result.samples
    n = len(sample.response_ids)
    edges = sorted({0, n, *(cut for cut in cuts if cut < n)})
    pieces = [
        replace(
            sample,
            prompt_ids=(*sample.prompt_ids, *sample.response_ids[:start]),
            response_ids=sample.response_ids[start:end],
            response_mask=sample.response_mask[start:end],
            response_logprobs=sample.response_logprobs[start:end],
        )
        for start, end in itertools.pairwise(edges)
    ]
    return replace(result, samples=tuple(piece for piece in pieces if any(piece.response_mask)))


def moved(trainer: LocalTrainer) -> None:
    """Weights a little off the base, as after some steps, and a critic that expects something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer._learner._parameters:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def update_of(trainer: LocalTrainer, results: Sequence[RolloutResult]) -> tuple[Any, list[torch.Tensor]]:
    """What the learner tells of one update, and its gradient; the weights stay."""
    caught: list[torch.Tensor] = []
    learner = trainer._learner
    step = learner.optimizer.step
    taught, _ = trainer._measured(trainer._lessons(results), results)
    try:
        learner.optimizer.step = lambda: caught.extend(p.grad.clone() for p in learner._parameters)  # type: ignore
        training = learner.train(taught.kept, step=1, learning_rate=0.0, weight_version=0)
    finally:
        learner.optimizer.step = step  # type: ignore[method-assign]
    return training, caught


# ── loss by the papers ───────────────────────────────────────────────────────────────────────────────────────────────


def paper_loss(name: str, told: list[dict[str, Any]]) -> tuple[float, float]:
    """(policy loss, value loss) in numpy, by loops over rollouts and tokens, in float64."""
    base = name.split(",")[0]
    rewards = np.array([each["reward"] for each in told])
    if name == "rloo, k1":
        rewards = rewards - 0.3 * np.array([sum(each["old"] - each["reference"]) for each in told])
    advantages: list[np.ndarray[Any, Any]] = []
    for i, each in enumerate(told):
        group = [j for j, other in enumerate(told) if other["task"] == each["task"]]
        mean = sum(rewards[j] for j in group) / len(group)
        spread = math.sqrt(sum((rewards[j] - mean) ** 2 for j in group) / len(group))
        others = [rewards[j] for j in group if j != i]
        one = {
            "grpo": (rewards[i] - mean) / spread,
            "gspo": (rewards[i] - mean) / spread,
            "dr_grpo": rewards[i] - mean,
            "rloo": rewards[i] - sum(others) / len(others),
            "ppo": 0.0,
        }[base]
        advantages.append(np.full(len(each["new"]), one))
    value = 0.0
    n_tokens = sum(len(each["new"]) for each in told)
    if base == "ppo":
        advantages, value = paper_gae(told, 0.3 if "k1" in name else 0.0, n_tokens)
    low, high = {"grpo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(base, (0.2, 0.2))
    total = 0.0
    for each, advantage in zip(told, advantages, strict=True):
        n = len(each["new"])
        old = each["new"] if "importance" in name else each["old"]
        ratio = np.exp(each["new"] - old)
        if base == "gspo":
            ratio = np.full(n, math.exp(sum(each["new"] - old) / n))
        scale = {"dr_grpo": 1 / (len(told) * 4096), "gspo": 1 / (len(told) * n)}.get(base, 1 / n_tokens)
        for t in range(n):
            surrogate = min(ratio[t] * advantage[t], min(max(ratio[t], 1 - low), 1 + high) * advantage[t])
            weight = min(math.exp(each["new"][t] - each["old"][t]), 1.1) if "importance" in name else 1.0
            total -= scale * weight * surrogate
            if "k3" in name:
                r = math.exp(each["reference"][t] - each["new"][t])
                total += 0.3 * scale * (r - math.log(r) - 1)
    return total, value


def paper_gae(
    told: list[dict[str, Any]], kl_coefficient: float, n_tokens: int
) -> tuple[list[np.ndarray[Any, Any]], float]:
    """Whitened advantages as sums of discounted errors, and the clipped value error."""
    plain, errors = [], 0.0
    for each in told:
        n, values = len(each["new"]), [*each["values"], 0.0]
        rewards = -kl_coefficient * (each["old"] - each["reference"])
        rewards[-1] += each["reward"]
        delta = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(n)]
        plain.append(np.array([sum((0.9 * 0.8) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]))
        errors += 0.5 * sum(plain[-1] ** 2)  # before the first update a value is its own old one
    numbers = np.concatenate(plain)
    white = [(row - numbers.mean()) / numbers.std() for row in plain]
    return white, errors / n_tokens


def expected_values(trainer: LocalTrainer, ids: list[int]) -> np.ndarray[Any, Any]:
    """The value head by hand, on hidden states as transformers tells them: [ids]."""
    critic = trainer._learner.critic
    assert critic is not None
    own = {name: tensor.numpy().astype(np.float64) for name, tensor in critic.saved().items()}
    with torch.no_grad():
        states = trainer._learnable.model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    normal = (states - states.mean(1, keepdims=True)) / np.sqrt(states.var(1, keepdims=True) + 1e-5)
    inner = np.tanh(normal @ own["inner.weight"].T + own["inner.bias"])
    values: np.ndarray[Any, Any] = (inner @ own["outer.weight"].T + own["outer.bias"])[:, 0]
    return values


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_is_that_of_the_paper(name: str, model_folder: Folder, plain_model: Callable[[str], Any]) -> None:
    """Numpy in float64, rollout by rollout and token by token, against padded batches of several threads."""
    base = plain_model("qwen3")
    results, told = rollouts(base), []
    with opened(model_folder("qwen3"), minibatches=1, **ALGORITHMS[name]) as trainer:
        moved(trainer)
        for result in results:
            (sample,) = result.samples
            at = [t for t, mask in enumerate(sample.response_mask) if mask]
            ids = (sample.prompt_ids, sample.response_ids)
            one = {
                "task": result.request.task.id,
                "reward": REWARDS[result.request.task.id][result.request.sibling],
                "new": np.array(logprobs_of(trainer._learnable.model, *ids))[at],
                "old": np.array(sample.response_logprobs)[at],
                "reference": np.array(logprobs_of(base, *ids))[at],
            }
            if trainer._learner.critic is not None:
                whole = expected_values(trainer, [*sample.prompt_ids, *sample.response_ids])
                one["values"] = whole[[len(sample.prompt_ids) + t - 1 for t in at]]
            told.append(one)
        training, _ = update_of(trainer, results)
    policy, value = paper_loss(name, told)
    assert training.loss == pytest.approx(policy, abs=2e-6)
    if "ppo" in name:
        assert training.value_loss == pytest.approx(value, rel=1e-4)
    else:
        assert training.value_loss is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@given(cuts=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=6, max_size=6))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_splitting_rollouts_changes_neither_loss_nor_gradient(
    name: str, cuts: list[list[int]], model_folder: Folder, plain_model: Callable[[str], Any]
) -> None:
    results = rollouts(plain_model("qwen3"))
    parted = [split(result, each) for result, each in zip(results, cuts, strict=True)]
    with opened(model_folder("qwen3"), minibatches=1, **ALGORITHMS[name]) as trainer:
        moved(trainer)
        whole, grads = update_of(trainer, results)
        other, parted_grads = update_of(trainer, parted)
    assert abs(whole.loss - other.loss) < 1e-6
    assert abs((whole.value_loss or 0) - (other.value_loss or 0)) < 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(grads, parted_grads, strict=True)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_masked_moves_nothing(name: str, model_folder: Folder, plain_model: Callable[[str], Any]) -> None:
    """The last id of a response is read by nothing: masked, another one there gives the same gradient."""
    results = rollouts(plain_model("qwen3"))
    (sample,) = results[0].samples
    masked = replace(sample, response_mask=(*sample.response_mask[:-1], 0))
    pair = []
    with opened(model_folder("qwen3"), minibatches=1, **ALGORITHMS[name]) as trainer:
        moved(trainer)
        for last in (3, 50):
            other = replace(masked, response_ids=(*masked.response_ids[:-1], last))
            pair.append(update_of(trainer, [replace(results[0], samples=(other,)), *results[1:]])[1])
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


# ── whole steps ──────────────────────────────────────────────────────────────────────────────────────────────────────


def weights_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._learner.saved().items()}


MIXED = {
    "gspo in two epochs": {"algorithm": "gspo", "epochs": 2},
    "ppo with k1 and importance": ALGORITHMS["ppo, k1"] | {"importance_cap": 1.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_resumed_run_ends_where_a_whole_one_does(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """To the last bit, the critic and its optimizer too; what each step tells is the same."""
    own = MIXED[name]
    with opened(model_folder("qwen3"), deterministic=True, **own) as whole:
        told = list(whole.steps())
        expected = weights_of(whole)
    with opened(model_folder("qwen3"), deterministic=True, **own) as first:
        next(first.steps())
        first.save(tmp_path / "checkpoint")
    with opened(model_folder("qwen3"), deterministic=True, **own) as second:
        second.restore(tmp_path / "checkpoint")
        again = list(second.steps())
        after = weights_of(second)
    assert expected.keys() == after.keys()
    assert all(torch.equal(expected[key], after[key]) for key in expected)
    assert [step.metrics["loss"] for step in again] == [step.metrics["loss"] for step in told[1:]]
    assert [step.advantages for step in again] == [step.advantages for step in told[1:]]


def test_a_resumed_run_takes_the_rates_that_are_set_now(model_folder: Folder, tmp_path: Path) -> None:
    """What the optimizer has learned of the gradients is kept, and nothing that was set anew is ignored."""
    with opened(model_folder("qwen3"), algorithm="ppo") as first:
        next(first.steps())
        first.save(tmp_path / "checkpoint")
    now = {"value_learning_rate": 0.5, "weight_decay": 0.25, "beta1": 0.5}
    with opened(model_folder("qwen3"), algorithm="ppo", **now) as second:
        second.restore(tmp_path / "checkpoint")
        optimizer = second._learner.optimizer
        assert optimizer.param_groups[1]["lr"] == 0.5
        assert {(group["weight_decay"], group["betas"]) for group in optimizer.param_groups} == {(0.25, (0.5, 0.95))}
        assert all(float(state["step"]) == 2 for state in optimizer.state.values())


def test_ppo_learns_and_tells_each_tokens_advantage(model_folder: Folder) -> None:
    """Advantages are whitened over a step's trained tokens and differ within a rollout once the critic has learned."""
    with opened(model_folder("qwen3"), algorithm="ppo", steps=8, learning_rate=3e-2, group_size=8) as trainer:
        done = list(trainer.steps())
    assert done[-1].metrics["reward"] > done[0].metrics["reward"] + 0.15
    assert done[0].metrics["value_mean"] == 0
    assert done[-1].metrics["value_mean"] == pytest.approx(done[-2].metrics["reward"], abs=0.35)
    numbers = [a for row in done[-1].advantages for a in row]
    assert len(numbers) == 4 * 8 * 6
    assert sum(numbers) / len(numbers) == pytest.approx(0, abs=1e-5)
    assert sum(a * a for a in numbers) / len(numbers) == pytest.approx(1, abs=1e-4)
    assert len(set(done[-1].advantages[0])) > 1
    assert max(step.metrics["logprob_gap_max"] for step in done) < 2e-5


def test_a_critic_needs_no_siblings(model_folder: Folder) -> None:
    """Groups of one, and of equal rewards, are trained."""

    def equal(engine: Any, requests: Sequence[RolloutRequest], on_done: Any) -> list[RolloutResult]:
        return [
            replace(r, rollout=replace(r.rollout, reward=Reward(score=1.0, parts=())))
            for r in bandit(engine, requests, on_done)
        ]

    with opened(model_folder("qwen3"), equal, algorithm="ppo", steps=1, group_size=1) as trainer:
        (step,) = trainer.steps()
    assert len(step.trained_rollout_ids) == 4
    assert (step.metrics["groups_trained"], step.metrics["groups_equal"]) == (4, 0)


def test_in_its_warm_up_only_the_critic_learns(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), algorithm="ppo", steps=2, critic_warmup_steps=1) as trainer:
        before = weights_of(trainer)
        steps = trainer.steps()
        next(steps)
        first = weights_of(trainer)
        next(steps)
        second = weights_of(trainer)
    changed = {name for name in before if not torch.equal(before[name], first[name])}
    assert changed == {name for name in before if name.startswith("value_head.")}
    assert any(not torch.equal(first[name], second[name]) for name in before if not name.startswith("value_head."))


def test_an_interrupted_update_leaves_the_critic_as_it_was(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), algorithm="ppo", steps=2) as trainer:
        next(trainer.steps())
        before = weights_of(trainer)

        def stopped(step: Any) -> float:
            raise KeyboardInterrupt

        clipped_norm, calls = trainer._learner._clipped_norm, iter([trainer._learner._clipped_norm, stopped])
        trainer._learner._clipped_norm = lambda step: next(calls)(step)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(trainer.steps())
        after = weights_of(trainer)
        trainer._learner._clipped_norm = clipped_norm  # type: ignore[method-assign]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_epochs_train_a_rollout_twice_and_count_it_once(model_folder: Folder) -> None:
    with opened(model_folder("qwen3"), steps=1, epochs=2, minibatches=3) as trainer:
        (step,) = trainer.steps()
    assert step.metrics["updates"] == 6
    assert step.metrics["tokens_trained"] == 6 * step.metrics["rollouts_trained"]
    ids = [sample.extra_fields["rollout_id"] for sample in step.samples]
    assert len(ids) == len(set(ids)) == len(step.trained_rollout_ids)


@pytest.mark.slow
def test_distance_and_correction_are_told(model_folder: Folder) -> None:
    """At the run's start the policy is its own reference; engine and trainer agree, so that no weight is capped."""
    with opened(model_folder("qwen3"), kl_coefficient=0.01, importance_cap=1.5) as trainer:
        done = list(trainer.steps())
    distances = [step.metrics["kl_mean"] for step in done]
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances[2] > distances[1] > 1e-4
    assert all(step.metrics["importance_mean"] == pytest.approx(1, abs=1e-4) for step in done)
    assert all(step.metrics["importance_capped"] == 0 for step in done)


def test_k1_is_taken_from_rewards_and_k3_from_the_loss(model_folder: Folder, plain_model: Callable[[str], Any]) -> None:
    """k1 changes advantages; k3 leaves them, and its gradient alone pulls back to the reference."""
    results = rollouts(plain_model("qwen3"))
    told = {}
    for kl, coefficient in (("k3", 0.0), ("k3", 0.5), ("k1", 0.5)):
        with opened(model_folder("qwen3"), algorithm="rloo", kl=kl, kl_coefficient=coefficient) as trainer:
            moved(trainer)
            taught, _ = trainer._measured(trainer._lessons(results), results)
            told[kl, coefficient] = [lesson.advantage for lesson in taught.kept]
    assert told["k3", 0.0] == told["k3", 0.5] != told["k1", 0.5]
    assert sum(told["k1", 0.5][:3]) == pytest.approx(0, abs=1e-6)


def test_a_checkpoint_with_and_without_a_critic_are_not_exchanged(model_folder: Folder, tmp_path: Path) -> None:
    with opened(model_folder("qwen3")) as trainer:
        trainer.save(tmp_path / "plain")
    with opened(model_folder("qwen3"), algorithm="ppo") as trainer:
        with pytest.raises(RunError, match="critic None, and this run has value head"):
            trainer.restore(tmp_path / "plain")
        assert trainer._learner.critic is not None
        with pytest.raises(ModelError, match=r"'inner\.weight' is missing"):
            trainer._learner.critic.restore({}, where="here")


def test_what_does_not_go_together_is_refused(model_folder: Folder) -> None:
    with (
        pytest.raises(ConfigError, match="whose advantages come from a critic"),
        opened(model_folder("qwen3"), algorithm="ppo", advantage="group"),
    ):
        pass


def test_a_lesson_without_measurements_tells_its_advantage_for_each_trained_token() -> None:
    request = RolloutRequest(task=TASKS[0], phase="train", step=1)
    lesson = Lesson(result=result_of(request, [([1], [2, 3], [0, 1], [-1.0, -1.0])], 1.0), advantage=0.5)
    assert lesson.token_advantages == ((0.0, 0.5),)
