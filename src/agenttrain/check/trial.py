"""A few tasks with a few siblings each, rolled out as a fit would: what happened, and what would have ended the run.

Everything is the real thing: engine, gate, renderer, verifiers, store. What differs: nothing is made again, and what
ends a fit (an escape, a call that can't be answered, a second model) is noted, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from agenttrain.check.roles import TrialRoles, UndeclaredModel
from agenttrain.errors import EscapeError, GraphError
from agenttrain.evaluation import Watcher, opened, rolled_out
from agenttrain.graph.models import models_of, nodes_of
from agenttrain.graph.roles import Identity
from agenttrain.prepare import Job
from agenttrain.protocols import EngineContext
from agenttrain.records import RolloutRequest, RolloutResult, Status, Task
from agenttrain.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial gave."""

    results: tuple[RolloutResult, ...]
    siblings: int
    escapes: tuple[str, ...]
    """Model, node, thread and line of calls that got past the gate, where one of them differs."""
    n_escapes: int
    escapes_allowed: bool
    refusals: tuple[GraphError, ...]
    """What else would have ended a fit, once for each rollout."""
    second_models: tuple[UndeclaredModel, ...]
    """Of which nothing was declared."""
    one_model: Identity | None
    """The one that is trained. None: no call was made to any."""
    unmatched: tuple[str, ...]
    """One sentence a selector that matched no call."""
    wall_s: float


def trial_tasks(tasks: Sequence[Task], n: int) -> tuple[Task, ...]:
    """At most n of them, from all over the file.

    Example: of 10 tasks and n = 4 those at 0, 2, 5 and 7
    """
    n = min(n, len(tasks))
    return tuple(tasks[i * len(tasks) // n] for i in range(n))


def tried(job: Job, run: RunFolder, *, tasks: Sequence[Task], siblings: int, watcher: Watcher) -> Trial:
    """Roll these tasks out; blocks.

    Raises:
        EngineError: the engine has failed.
        KeyboardInterrupt: Ctrl-C; what was made stands in the run folder.
    """
    config, noted = job.config, job.loaded.trainable
    requests = [
        RolloutRequest(
            task=task, phase="check", sibling=sibling, temperature=config.sampling.temperature, seed=config.seed
        )
        for task in tasks
        for sibling in range(siblings)
    ]
    roles, refusals = TrialRoles(noted), list[GraphError]()
    with opened(job, run) as (store, runner, pool):
        context = EngineContext(config=config, model=str(job.model), run_dir=run.path)
        if noted is not None and (noted.frozen or noted.auxiliary):
            roles.see(nodes=nodes_of(runner.graph), models=models_of(runner.graph))
        with closing(job.plugins.engine(config.engine.name)(context)) as engine:
            runner.roles, runner.refusals, pool.following = roles, refusals, _stands
            engine.stats()  # it is ready when this returns
            watcher.began("check", len(requests))
            began = time.perf_counter()
            results = rolled_out(pool, engine, requests, watcher.rollout_done)
            wall_s = time.perf_counter() - began
        store.flush()
        return Trial(
            results=tuple(results),
            siblings=siblings,
            escapes=tuple(runner.gate.places),
            n_escapes=runner.gate.n_escapes,
            escapes_allowed=runner.gate.allow_escapes,
            refusals=tuple(each for each in refusals if not isinstance(each, EscapeError)),
            second_models=roles.second_models(),
            one_model=roles.one_model,
            unmatched=tuple(roles.unmatched()),
            wall_s=wall_s,
        )


def _stands(request: RolloutRequest, status: Status) -> Any:
    """Nothing is made again: a check looks at what happens at first."""
    return None
