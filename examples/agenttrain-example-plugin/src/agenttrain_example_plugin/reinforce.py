"""A trainer in its smallest form: REINFORCE with plain gradient descent, one update a step.

loss = -(sum over trained tokens of advantage × log probability) / number of trained tokens
Source: Williams 1992, with the group's advantages in place of the return.

It shows what a trainer owes agenttrain: it owns the loop and the engine, it says of each rollout whether it was trained
or why not, and it can be saved, restored and exported. It keeps no optimizer state, so a checkpoint is weights and two
numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agenttrain.protocols import OnDone, TrainerContext
from agenttrain.records import RolloutRequest, RolloutResult, Sample, StepResult, Task


class ReinforceTrainer:
    """agenttrain.protocols.Trainer for one Hugging Face folder, on the CPU."""

    name = "reinforce"

    def __init__(self, context: TrainerContext) -> None:
        self._context, self._settings = context, context.config.trainer
        self._engine = context.open_engine()
        self.engine_name = self._engine.name
        self._model = AutoModelForCausalLM.from_pretrained(context.spec.model, dtype=torch.float32).eval()
        self.n_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.n_trained_parameters = self.n_parameters
        self.adapter: Mapping[str, Any] | None = None
        self.weight_version = 0
        self._step = 0

    def steps(self) -> Iterator[StepResult]:
        """Train, one result a step, from where it stands to `trainer.steps`."""
        while self._step < self._settings.steps:
            yield self._one_step(self._step + 1)

    def evaluate(self, requests: Sequence[RolloutRequest], on_done: OnDone | None = None) -> list[RolloutResult]:
        """Roll out on the engine that serves training, at the weights of now."""
        return self._context.run_rollouts(self._engine, requests, on_done)

    def save(self, folder: Path) -> None:
        save_file(self._weights(), folder / "weights.safetensors")
        state = {"step": self._step, "weight_version": self.weight_version}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self._model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
        self._step = state["step"]
        self._publish(state["weight_version"])

    def export(self, folder: Path) -> None:
        """The model as transformers writes it, beside the base's tokenizer and template."""
        base = Path(self._context.spec.model)
        folder.mkdir(parents=True, exist_ok=True)
        for file in base.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
        self._model.save_pretrained(folder)

    def engine_stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()

    def _one_step(self, step: int) -> StepResult:
        results = self._context.run_rollouts(self._engine, self._requests(step), None)
        lessons, dropped = self._lessons(results)
        metrics = _figures(results)
        if lessons:
            metrics |= self._update(lessons)
            self._publish(self.weight_version + 1)
        self._step = step
        samples = [sample for sample, _ in lessons]
        return StepResult(
            step=step,
            weight_version=self.weight_version,
            metrics=metrics,
            trained_rollout_ids=tuple(dict.fromkeys(sample.extra_fields["rollout_id"] for sample in samples)),
            dropped=dropped,
            samples=tuple(samples),
            advantages=tuple(tuple(advantage * kept for kept in sample.response_mask) for sample, advantage in lessons),
        )

    def _requests(self, step: int) -> list[RolloutRequest]:
        """A group for each of the step's tasks, which follow one another in the order of the file."""
        settings, tasks = self._settings, self._context.tasks
        n = min(settings.tasks_per_step, len(tasks))
        chosen: list[Task] = [tasks[((step - 1) * n + i) % len(tasks)] for i in range(n)]
        return [
            RolloutRequest(
                task=task,
                phase="train",
                step=step,
                sibling=sibling,
                temperature=self._context.config.sampling.temperature,
                seed=self._context.config.seed,
            )
            for task in chosen
            for sibling in range(settings.group_size)
        ]

    def _lessons(self, results: Sequence[RolloutResult]) -> tuple[list[tuple[Sample, float]], dict[str, str]]:
        """(samples with their advantages, rollout id to why it is not trained)."""
        lessons: list[tuple[Sample, float]] = []
        dropped: dict[str, str] = {}
        for group in _by_task(results):
            usable = [result for result in group if result.samples and result.rollout.reward is not None]
            dropped |= {r.rollout.id: r.rollout.cause or "nothing to train" for r in group if r not in usable}
            if len(usable) < 2:
                dropped |= {r.rollout.id: "no sibling to compare with" for r in usable}
                continue
            advantages = self._context.advantages([r.rollout.reward.score for r in usable if r.rollout.reward])
            if not any(advantages):
                dropped |= {r.rollout.id: "all of the group did equally well" for r in usable}
                continue
            pairs = zip(usable, advantages, strict=True)
            lessons += [(sample, advantage) for result, advantage in pairs for sample in result.samples]
        return lessons, dropped

    def _update(self, lessons: Sequence[tuple[Sample, float]]) -> dict[str, float]:
        """One step down the gradient; the gap is between the engine's log probabilities and ours before it."""
        n_tokens = sum(sum(sample.response_mask) for sample, _ in lessons)
        total, gap = 0.0, 0.0
        for sample, advantage in lessons:
            logprobs, mask = self._logprobs(sample)
            loss = -(advantage * logprobs[mask]).sum() / n_tokens
            loss.backward()
            total += loss.item()
            gap = max(gap, float((logprobs.detach() - torch.tensor(sample.response_logprobs)).abs()[mask].max()))
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter -= self._settings.learning_rate * parameter.grad
                    parameter.grad = None
        return {"loss": total, "logprob_gap_max": gap, "tokens_trained": n_tokens}

    def _logprobs(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """([T] log probability of each response id, [T] where the mask is 1)."""
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        n = len(sample.response_ids)
        logits = self._model(ids).logits[0, -n - 1 : -1].float() / self._context.config.sampling.temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[0, -n:, None])[:, 0]
        return logprobs, torch.tensor(sample.response_mask, dtype=torch.bool)

    def _publish(self, version: int) -> None:
        self._engine.update_weights(self._weights().items(), version)
        self.weight_version = version

    def _weights(self) -> dict[str, torch.Tensor]:
        """Each tensor once: tied ones under their first name."""
        weights: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self._model.state_dict().items():
            weights.setdefault(tensor.data_ptr(), (name, tensor))
        return {name: tensor.clone() for name, tensor in weights.values()}


def _by_task(results: Sequence[RolloutResult]) -> list[list[RolloutResult]]:
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.request.task.id, []).append(result)
    return list(groups.values())


def _figures(results: Sequence[RolloutResult]) -> dict[str, Any]:
    rewards = [result.rollout.reward.score for result in results if result.rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    figures = {
        "rollouts": len(results),
        "groups": len(_by_task(results)),
        "tokens_sampled": sum(result.rollout.n_sampled_ids for result in results),
    }
    if rewards:
        spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        figures |= {"reward": mean, "reward_std": spread}
    return figures
