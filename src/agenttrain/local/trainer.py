"""Tasks to rollouts to updates: GRPO in this process, with the weights published to whatever engine serves it.

A step rolls out a group for each of its tasks, waits for all of them, trains the groups that teach in a fixed order
and publishes. Invariants: every rollout of a step is trained or has a reason why not; the samples a step reports are
those the loss saw; before a step's first update the log probabilities recorded in sampling are compared with the
trainer's own; the weight version goes up exactly when weights were published. Knows nothing of graphs or rewards.

Gradients come from one Python thread per core with one operation thread each, and are summed in the order of the
micro-batches: on a busy machine this is several times faster than the same number of OpenMP threads.
"""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agenttrain import telemetry
from agenttrain.errors import ConfigError, RunError, TrainerError
from agenttrain.local import policy
from agenttrain.local.shared_prefix import logits_after, works
from agenttrain.protocols import TrainerContext
from agenttrain.records import RolloutRequest, RolloutResult, StepResult, Task
from agenttrain.trainer import checkpoint
from agenttrain.trainer.advantage import centered_advantages, group_advantages
from agenttrain.trainer.batches import Lesson, Lessons, MicroBatch, lessons, micro_batches, minibatches
from agenttrain.trainer.loss import policy_loss

ADVANTAGES: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "group": group_advantages,
    "centered": centered_advantages,
}
SHORTEST_PREFIX = 16
"""Ids that the rows of a pass must begin with alike for that beginning to be read once."""
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Weight files of the base; an export writes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where in the shuffled tasks training stands."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one micro-batch gives."""

    grads: tuple[torch.Tensor, ...]
    """In the order of the parameters; empty when only log probabilities were wanted."""
    loss: float
    n_clipped: int
    gap_sum: float
    """Of |trainer - recorded| log probability over fresh tokens."""
    gap_max: float
    n_fresh: int
    nll_sum: float
    """Of the recorded log probabilities, negated."""
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the updates of one step came to."""

    loss: float
    grad_norm: float
    gap_mean: float
    gap_max: float
    clip_fraction: float
    nll: float
    n_tokens: int


class LocalTrainer:
    """protocols.Trainer for one Hugging Face folder, on the CPU or on CUDA."""

    name = "local"

    def __init__(self, context: TrainerContext) -> None:
        """Load the policy and open the engine.

        Raises:
            ConfigError: no tasks, or an advantage estimator that nobody registered.
            ModelError: the policy's folder can't be loaded.
        """
        self._context = context
        self._config = context.config
        self._settings = context.config.trainer
        if not context.tasks:
            raise ConfigError('There are no training tasks. Give tasks with split "train", or leave `split` out.')
        self._advantages = context.advantages or _own_advantages(self._settings.advantage)
        self._engine = context.open_engine()  # first: it may load in a process of its own meanwhile
        self.engine_name = self._engine.name
        self._device = policy.choose_device()
        self._model = policy.load_model(context.spec.model, device=self._device).requires_grad_(True)
        self._logits = policy.Logits(self._model)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self.n_parameters = sum(p.numel() for p in self._parameters)
        self._padding_id = _padding_id(self._model.config)
        shares = works(
            self._logits,
            n_vocabulary=policy.vocabulary_size(self._model),
            max_length=policy.max_length(self._model.config),
        )
        self._shortest_prefix = SHORTEST_PREFIX if shares else None
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._settings.learning_rate,
            betas=(self._settings.beta1, self._settings.beta2),
            weight_decay=self._settings.weight_decay,
        )
        self._n_workers = 1 if self._device.type == "cuda" else min(8, len(os.sched_getaffinity(0)))
        self._workers = ThreadPoolExecutor(
            self._n_workers, thread_name_prefix="agenttrain-gradient", initializer=lambda: torch.set_num_threads(1)
        )
        self._step = 0
        self._cursor = Cursor()
        self.weight_version = 0
        self._engine_is_behind = False
        """An update was undone after the engine may have taken its weights."""

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
        if self._engine_is_behind:
            self._publish(self.weight_version)
        tasks, cursor = tasks_at(self._context.tasks, self._cursor, self._settings.tasks_per_step, self._config.seed)
        step = self._step + 1
        began = time.perf_counter()
        results = self._context.run_rollouts(self._engine, self._requests(tasks, step), None)
        rolled_out = time.perf_counter()
        taught = lessons(results, self._advantages)
        learning_rate = learning_rate_at(
            step,
            steps=self._settings.steps,
            peak=self._settings.learning_rate,
            warmup=self._settings.warmup_steps,
            final=self._settings.final_learning_rate,
        )
        training, train_s, sync_s = None, 0.0, 0.0
        if taught.kept:
            with self._whole_or_undone():
                training = self._train(taught.kept, step, learning_rate)
                train_s = time.perf_counter() - rolled_out
                self._publish(self.weight_version + 1)
                sync_s = time.perf_counter() - rolled_out - train_s
        self._step, self._cursor = step, cursor
        metrics = _metrics(results, taught, training, learning_rate) | {
            "rollout_s": rolled_out - began,
            "train_s": train_s,
            "sync_s": sync_s,
            "tokens_per_s": _n_sampled(results) / max(1e-9, rolled_out - began),
        }
        return StepResult(
            step=step,
            weight_version=self.weight_version,
            metrics=metrics,
            trained_rollout_ids=tuple(lesson.rollout_id for lesson in taught.kept),
            dropped=taught.dropped,
            samples=tuple(sample for lesson in taught.kept for sample in lesson.samples),
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

    # ── one step's updates ───────────────────────────────────────────────────────────────────────────────────────

    def _train(self, kept: Sequence[Lesson], step: int, learning_rate: float) -> Training:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [
            micro_batches(
                part,
                mean=self._settings.loss,
                max_tokens=self._settings.micro_batch_tokens,
                n_workers=self._n_workers,
                weight_version=self.weight_version,
                padding_id=self._padding_id,
                shortest_prefix=self._shortest_prefix,
            )
            for part in minibatches(kept, self._settings.minibatches, seed=f"{self._config.seed}-{step}")
        ]
        # The first part's own passes see the weights that sampled it; the others' gaps are measured before any update.
        gaps = [p for part in parts[1:] for p in self._workers.map(self._measured, part)]
        losses, norms, passes = [], [], []
        for part in parts:
            done, norm = self._update(part, step)
            losses.append(sum(p.loss for p in done))
            norms.append(norm)
            passes += done
            if part is parts[0]:
                gaps += done
        n_fresh, n_tokens = sum(p.n_fresh for p in gaps), sum(p.n_tokens for p in passes)
        return Training(
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            gap_mean=sum(p.gap_sum for p in gaps) / max(1, n_fresh),
            gap_max=max(p.gap_max for p in gaps),
            clip_fraction=sum(p.n_clipped for p in passes) / n_tokens,
            nll=sum(p.nll_sum for p in passes) / n_tokens,
            n_tokens=n_tokens,
        )

    def _update(self, part: Sequence[MicroBatch], step: int) -> tuple[list[PassResult], float]:
        """One optimizer step over micro-batches; gives their results without gradients, and the gradient's norm."""
        grads: list[torch.Tensor] | None = None
        done: list[PassResult] = []
        for start in range(0, len(part), self._n_workers):
            for result in self._workers.map(self._differentiated, part[start : start + self._n_workers]):
                if grads is None:
                    grads = list(result.grads)
                else:
                    torch._foreach_add_(grads, list(result.grads))
                done.append(_without_grads(result))
        assert grads is not None
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainerError(
                f"The gradient of step {step} is {norm}, and an update needs a finite one. Lower "
                "trainer.learning_rate, and look at this step's rewards with `agenttrain inspect`."
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return done, norm

    def _differentiated(self, batch: MicroBatch) -> PassResult:
        batch = batch.to(self._device)
        logprobs = self._log_probabilities(batch)
        policy_ = policy_loss(
            logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            weights=batch.weights,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        grads = torch.autograd.grad(policy_.loss, self._parameters, allow_unused=True, materialize_grads=True)
        return _pass_result(
            batch, logprobs.detach(), grads=grads, loss=float(policy_.loss.detach()), n_clipped=policy_.n_clipped
        )

    def _measured(self, batch: MicroBatch) -> PassResult:
        batch = batch.to(self._device)
        with torch.no_grad():
            return _pass_result(batch, self._log_probabilities(batch), grads=(), loss=0.0, n_clipped=0)

    def _log_probabilities(self, batch: MicroBatch) -> torch.Tensor:
        """[N] of the trained tokens, at the temperature of sampling.

        Rows are padded on the right and attention is causal, so that no real position sees padding and no mask is
        needed; models with recurrent layers are right for the same reason.
        """
        if len(batch.prefix):
            logits = logits_after(self._logits, batch.prefix, batch.flat, batch.input_ids)
        else:
            logits = self._logits.at(batch.flat, batch.input_ids, use_cache=False)
        logits = logits / self._config.sampling.temperature
        return -torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")

    @contextmanager
    def _whole_or_undone(self) -> Iterator[None]:
        """Undo a step's updates when anything ends it, Ctrl-C too: what is saved then is the state before the step.

        Holds a copy of the weights and the optimizer's state meanwhile.
        """
        weights = [p.detach().clone() for p in self._parameters]
        optimizer, version = copy.deepcopy(self._optimizer.state_dict()), self.weight_version
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, before in zip(self._parameters, weights, strict=True):
                    parameter.copy_(before)
                    parameter.grad = None
            self._optimizer.load_state_dict(optimizer)
            self.weight_version, self._engine_is_behind = version, True
            raise

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, version: int) -> None:
        with telemetry.publish_span(version):
            self._engine.update_weights(unique_weights(self._model).items(), version)
        self.weight_version, self._engine_is_behind = version, False

    def save(self, folder: Path) -> None:
        """Resumable state into an empty folder: weights, optimizer, schedule, seed, data cursor."""
        state = {
            "step": self._step,
            "steps": self._settings.steps,
            "weight_version": self.weight_version,
            "seed": self._config.seed,
            "cursor": {"epoch": self._cursor.epoch, "offset": self._cursor.offset},
            "n_tasks": len(self._context.tasks),
        }
        checkpoint.save(
            folder,
            checkpoint.TrainingState(
                weights=unique_weights(self._model), optimizer=self._optimizer.state_dict(), state=state
            ),
        )

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote, and publish its weights to the engine.

        Raises:
            RunError: the checkpoint is damaged, or of another run (seed or tasks differ).
        """
        saved = checkpoint.load(folder)
        state = saved.state
        for key, here in (("seed", self._config.seed), ("n_tasks", len(self._context.tasks))):
            if state[key] != here:
                raise RunError(
                    f"The checkpoint {folder} was written with {key} {state[key]}, and this run has {here}. Resume "
                    "with the run's own configuration and tasks."
                )
        policy.load_weights(self._model, dict(saved.weights), where=str(folder))
        self._optimizer.load_state_dict(dict(saved.optimizer))
        self._step = int(state["step"])
        self._cursor = Cursor(epoch=int(state["cursor"]["epoch"]), offset=int(state["cursor"]["offset"]))
        self._publish(int(state["weight_version"]))

    def export(self, folder: Path) -> None:
        """The weights of now as a Hugging Face folder, in float32, with the base's tokenizer files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with policy.quietly():
            self._model.save_pretrained(folder)
        for file in Path(self._context.spec.model).iterdir():
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, folder / file.name)

    def engine_stats(self) -> Mapping[str, float]:
        """The engine's own counters."""
        return self._engine.stats()

    def close(self) -> None:
        """End the workers and the engine."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._engine.close()


def tasks_at(tasks: Sequence[Task], cursor: Cursor, n: int, seed: int) -> tuple[list[Task], Cursor]:
    """The tasks of one step, all different, and where the next step goes on.

    Each epoch is shuffled by (seed, epoch); what an epoch has left over when it can't fill a step is skipped.

    Example: 5 tasks and n = 2 make two steps an epoch; n = 8 takes all 5 in each step.
    """
    n = min(n, len(tasks))
    if cursor.offset + n > len(tasks):
        cursor = Cursor(epoch=cursor.epoch + 1)
    order = list(range(len(tasks)))
    random.Random(f"{seed}-{cursor.epoch}").shuffle(order)
    chosen = [tasks[i] for i in order[cursor.offset : cursor.offset + n]]
    return chosen, Cursor(epoch=cursor.epoch, offset=cursor.offset + n)


def learning_rate_at(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """Linear warm-up times linear decay.

    Args:
        step: from 1.
        steps: of the whole run.
        final: share of the peak that the decay would reach after the last step.

    Example: steps 10, peak 1, warmup 2, final 0.1: step 1 -> 0.5, step 2 -> 0.91, step 6 -> 0.55.
    """
    rise = min(1.0, step / warmup) if warmup else 1.0
    return peak * rise * (1.0 - (1.0 - final) * (step - 1) / steps)


def unique_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model with each storage once: tied weights appear under their first name."""
    weights: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen or tensor.numel() == 0:
            weights[name] = tensor
            seen.add(key)
    return weights


def _own_advantages(name: str) -> Callable[[Sequence[float]], list[float]]:
    if name not in ADVANTAGES:
        raise ConfigError(
            f"trainer.advantage is {name!r}, and the local trainer has {', '.join(ADVANTAGES)}. Take one of these, or "
            "register an estimator in a plugin."
        )
    return ADVANTAGES[name]


def _padding_id(config: Any) -> int:
    """An id to pad with that is not the model's own padding id: some models warn when they see theirs unmasked."""
    return 1 if config.pad_token_id == 0 else 0


def _pass_result(
    batch: MicroBatch, logprobs: torch.Tensor, *, grads: tuple[torch.Tensor, ...], loss: float, n_clipped: int
) -> PassResult:
    gaps = (logprobs - batch.old_logprobs).abs()[batch.fresh]
    return PassResult(
        grads=grads,
        loss=loss,
        n_clipped=n_clipped,
        gap_sum=float(gaps.sum()),
        gap_max=float(gaps.max()) if gaps.numel() else 0.0,
        n_fresh=gaps.numel(),
        nll_sum=float(-batch.old_logprobs.sum()),
        n_tokens=batch.targets.numel(),
    )


def _without_grads(result: PassResult) -> PassResult:
    return PassResult(
        grads=(),
        loss=result.loss,
        n_clipped=result.n_clipped,
        gap_sum=result.gap_sum,
        gap_max=result.gap_max,
        n_fresh=result.n_fresh,
        nll_sum=result.nll_sum,
        n_tokens=result.n_tokens,
    )


def _n_sampled(results: Sequence[RolloutResult]) -> int:
    return sum(result.rollout.n_sampled_ids for result in results)


def _metrics(
    results: Sequence[RolloutResult], taught: Lessons, training: Training | None, learning_rate: float
) -> dict[str, float]:
    """The numbers of a step; those of an update are left out when there was none."""
    rewards = [r.rollout.reward.score for r in results if r.rollout.reward is not None]
    metrics: dict[str, float] = {
        "groups": taught.n_groups,
        "groups_trained": taught.n_trained,
        "groups_equal": taught.n_equal,
        "rollouts": len(results),
        "rollouts_trained": len(taught.kept),
        "learning_rate": learning_rate,
        "tokens_sampled": _n_sampled(results),
        "tokens_trained": training.n_tokens if training else 0,
    }
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["reward"] = mean
        metrics["reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    if training is not None:
        metrics |= {
            "loss": training.loss,
            "grad_norm": training.grad_norm,
            "logprob_gap_mean": training.gap_mean,
            "logprob_gap_max": training.gap_max,
            "clip_fraction": training.clip_fraction,
            "nll": training.nll,
        }
    return metrics
