"""Rollouts that both trainers learn from: made up with all that is hard, and real ones of the order desk."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from agenttrain.local.policy import load_model
from agenttrain.records import (
    CallSite,
    Credit,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutResult,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
)
from agenttrain.sample.build import build_samples

NOISE = 0.3
"""Deviation of the recorded log probabilities from the model's: ratios that are clipped on both sides."""


def made_up(
    model: Path, *, n_groups: int = 5, n_siblings: int = 4, temperature: float, seed: int = 0, noise: float = NOISE
) -> list[RolloutResult]:
    """Rollouts of 1 to 3 trajectories of ragged lengths, with context and frozen spans in the middle of responses."""
    draw = random.Random(seed)
    drafts = [
        _drawn(draw, task=f"t{group}", sibling=sibling, n_vocabulary=_vocabulary(model))
        for group in range(n_groups)
        for sibling in range(n_siblings)
    ]
    return list(_with_logprobs(drafts, model, temperature, torch.Generator().manual_seed(seed), noise))


def with_credit(results: Sequence[RolloutResult], *, seed: int = 0) -> list[RolloutResult]:
    """The same rollouts, their turns in two nodes, and half of them credited by node and turn; the last group stays."""
    draw = random.Random(seed)
    return [each if each.rollout.task_id == results[-1].rollout.task_id else _credited(each, draw) for each in results]


def _credited(result: RolloutResult, draw: random.Random) -> RolloutResult:
    reward, turns = result.rollout.reward, result.turns
    assert reward is not None
    if draw.random() < 0.5:
        trained = draw.choice([turn.index for turn in turns if turn.role == "trained"])
        by_node = {"planner": draw.uniform(-1, 1), "worker": draw.uniform(-1, 1)}
        reward = replace(reward, credit=Credit(by_node=by_node, by_turn={trained: draw.uniform(-1, 1)}))
    placed = tuple(replace(turn, site=CallSite(node=("planner", "worker")[turn.index % 2])) for turn in turns)
    return replace(result, rollout=replace(result.rollout, reward=reward), turns=placed)


def _vocabulary(model: Path) -> int:
    import json

    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def _drawn(draw: random.Random, *, task: str, sibling: int, n_vocabulary: int) -> RolloutResult:
    request = RolloutRequest(task=Task(id=task, input={}), phase="train", step=1, sibling=sibling)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(1, n_vocabulary) for _ in range(draw.randint(low, high))]

    trajectories, turns = [], []
    for index in range(1 + (sibling + int(task[1:])) % 3):
        prompt, response, mask, spans = ids(3, 60), [], [], []
        for n in range(draw.randint(1, 4)):
            if n:
                context = ids(1, 20)
                response, mask = response + context, mask + [0] * len(context)
            sampled, trained = ids(1, 25), n == 0 or draw.random() < 0.7
            turn = Turn(
                id=f"{request.rollout_id}-{index}-{n}",
                rollout_id=request.rollout_id,
                index=3 * n + index,  # trajectories take turns, so that a walk goes back and forth between rows
                role="trained" if trained else "frozen",
                role_reason="",
                site=CallSite(),
            )
            span = TurnSpan(
                turn_id=turn.id,
                start=len(response),
                end=len(response) + len(sampled),
                trained=trained,
                reason="" if trained else "frozen: a summary",
            )
            turns.append(turn)
            spans.append(span)
            response, mask = response + sampled, mask + [int(trained)] * len(sampled)
        trajectories.append(
            Trajectory(
                rollout_id=request.rollout_id,
                index=index,
                prompt_ids=tuple(prompt),
                response_ids=tuple(response),
                response_mask=tuple(mask),
                response_logprobs=(0.0,) * len(mask),
                weight_versions=tuple(0 if m else -1 for m in mask),
                spans=tuple(spans),
                break_cause="first_turn" if index == 0 else "history_rewritten",
            )
        )
    rollout = Rollout(
        id=request.rollout_id,
        task_id=task,
        phase="train",
        step=1,
        sibling=sibling,
        attempt=0,
        status="completed",
        reward=Reward(score=round(draw.random(), 3), parts=()),
    )
    return RolloutResult(
        request=request, rollout=rollout, turns=tuple(turns), trajectories=tuple(trajectories), samples=()
    )


def _with_logprobs(
    drafts: Sequence[RolloutResult], folder: Path, temperature: float, generator: torch.Generator, noise: float
) -> Iterator[RolloutResult]:
    model = load_model(folder, device=torch.device("cpu"))
    for draft in drafts:
        trajectories = []
        for each in draft.trajectories:
            ids = torch.tensor([[*each.prompt_ids, *each.response_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(each.prompt_ids) - 1 : -1] / temperature
            own = logits.log_softmax(-1).gather(1, torch.tensor(each.response_ids)[:, None])[:, 0]
            told = own + noise * torch.randn(len(own), generator=generator)
            logprobs = tuple((told * torch.tensor(each.response_mask)).tolist())
            trajectories.append(replace(each, response_logprobs=logprobs))
        samples = build_samples(draft.rollout, trajectories)
        yield replace(draft, trajectories=tuple(trajectories), samples=samples)


def real(graph: Path, folder: Path, *, n_tasks: int, n_siblings: int, flags: dict[str, Any]) -> list[RolloutResult]:
    """Rollouts of a graph's first training step, by the local engine."""
    from agenttrain.capture.store import SqliteStore
    from agenttrain.pool import RolloutPool
    from agenttrain.prepare import prepare
    from agenttrain.protocols import EngineContext
    from agenttrain.rollout import open_runner
    from agenttrain.trainer.schedule import Cursor, tasks_at

    job = prepare(str(graph), cwd=folder, flags=flags)
    tasks, _ = tasks_at(job.train, Cursor(), n_tasks, job.config.seed)
    requests = [
        RolloutRequest(
            task=task,
            phase="train",
            step=1,
            sibling=sibling,
            temperature=job.config.sampling.temperature,
            seed=job.config.seed,
        )
        for task in tasks
        for sibling in range(n_siblings)
    ]
    store = SqliteStore(folder / "rollouts")
    engine = job.plugins.engine("local")(EngineContext(config=job.config, model=str(job.model)))
    try:
        with open_runner(
            job.config, job.loaded, renderer=job.renderer, store=store, plugins=job.plugins, model_name="order-desk"
        ) as runner:
            pool = RolloutPool(runner=runner, concurrency=32, seconds=job.config.limits.seconds)
            results = pool.run(engine, requests)
            pool.close()
    finally:
        engine.close()
        store.close()
    return results
