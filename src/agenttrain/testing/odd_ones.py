"""A world without a graph, for trainers: a rollout is one answer of the engine, worth the share of its odd ids.

The engine is real and its answers are sampled, so a trainer that works makes odd ids likelier. One rollout of each
group can be made to fail, as a broken environment would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.config import resolve
from agenttrain.protocols import AdvantageEstimator, Engine, EngineContext, EngineFactory, OnDone, TrainerContext
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
from agenttrain.trainer.advantage import centered_advantages

N_IDS = 6
"""Length of each answer."""


@dataclass(kw_only=True)
class OddOnes:
    """Tasks, and rollouts of them on any engine.

    Example: OddOnes(model=tiny_model(folder)).context(open_engine) is what a trainer factory takes.
    """

    model: Path
    n_tasks: int = 4
    failing_sibling: int | None = None
    """Place in each training group whose rollout has no reward and no sample. None: none fails."""
    made: list[RolloutResult] = field(default_factory=list)
    """Every result, in the order they were made."""
    engines: list[Engine] = field(default_factory=list)
    """Every engine that was opened."""

    @property
    def tasks(self) -> list[Task]:
        return [Task(id=str(i), input={"place": i}) for i in range(self.n_tasks)]

    def context(
        self,
        engine_factory: EngineFactory,
        *,
        advantages: AdvantageEstimator = centered_advantages,
        **tables: Any,
    ) -> TrainerContext:
        """What a trainer factory gets.

        Args:
            engine_factory: makes the engine that serves training.
            tables: of the configuration, such as trainer={"steps": 3}.
        """
        config = resolve(("OddOnes", {"model": str(self.model), **tables}))

        def open_engine() -> Engine:
            engine = engine_factory(EngineContext(config=config, model=str(self.model)))
            self.engines.append(engine)
            return engine

        return TrainerContext(
            config=config,
            spec=RolloutSpec(graph_file="", attribute=None, config={}, run_dir="", model=str(self.model)),
            tasks=self.tasks,
            open_engine=open_engine,
            run_rollouts=self.run,
            advantages=lambda rewards: list(advantages(rewards)),
        )

    def run(
        self, engine: Engine, requests: Sequence[RolloutRequest], on_done: OnDone | None = None
    ) -> list[RolloutResult]:
        """One answer each, all in flight together; results in the order of the requests."""
        asked = [engine.generate(self.prompt(r), self._sampling(r), session=r.rollout_id) for r in requests]
        results = []
        for request, future in zip(requests, asked, strict=True):
            result = self._result(request, future.result())
            engine.release(request.rollout_id)
            self.made.append(result)
            results.append(result)
            if on_done is not None:
                on_done(result)
        return results

    def prompt(self, request: RolloutRequest) -> Ids:
        """Three ids, the last one by the task."""
        return (5, 9, 20 + int(request.task.id))

    def _sampling(self, request: RolloutRequest) -> Sampling:
        seed = request.seed * 10**9 + request.step * 10**6 + int(request.task.id) * 1000 + request.sibling
        return Sampling(temperature=request.temperature, max_tokens=N_IDS, seed=seed, stop_ids=())

    def _result(self, request: RolloutRequest, answer: Generation) -> RolloutResult:
        fails = request.phase == "train" and request.sibling == self.failing_sibling
        score = sum(id % 2 for id in answer.token_ids) / len(answer.token_ids)
        rollout = Rollout(
            id=request.rollout_id,
            task_id=request.task.id,
            phase=request.phase,
            step=request.step,
            sibling=request.sibling,
            attempt=request.attempt,
            status="environment_failure" if fails else "completed",
            cause="this place of the group is made to fail" if fails else "",
            reward=None if fails else Reward(score=score, parts=()),
            success=not fails and score > 0.5,
            n_turns=1,
            n_sampled_ids=len(answer.token_ids),
        )
        samples = () if fails else (_sample(self.prompt(request), request, answer, score),)
        return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=samples)


def _sample(prompt: Ids, request: RolloutRequest, answer: Generation, score: float) -> Sample:
    return Sample(
        prompt_ids=prompt,
        response_ids=answer.token_ids,
        response_mask=(1,) * len(answer.token_ids),
        response_logprobs=answer.logprobs,
        reward_score=score,
        num_turns=1,
        metrics={},
        extra_fields={
            "rollout_id": request.rollout_id,
            "task_id": request.task.id,
            "trajectory": 0,
            "group_id": request.group_id,
            "min_global_steps": min(answer.weight_versions),
            "max_global_steps": max(answer.weight_versions),
            "status": "completed",
        },
    )
