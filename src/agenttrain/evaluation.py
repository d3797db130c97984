"""Tasks rolled out once and summed up: what an evaluation makes, inside a fit or as a run of its own.

`opened` gives what every rollout of a run goes through; `evaluate` is the whole of `agenttrain eval`.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol

from agenttrain import telemetry
from agenttrain.alarms import Alarm, engine_alarms, escape_alarms, evaluation_alarms, plugin_alarms
from agenttrain.capture.store import SqliteStore, read_store
from agenttrain.errors import RoleError, TrainerError
from agenttrain.figures import cpu_seconds, external_calls, replaced_model
from agenttrain.part import Part
from agenttrain.pool import RolloutPool
from agenttrain.prepare import Job, n_parameters, provenance
from agenttrain.promotion.parts import reward_parts
from agenttrain.promotion.summary import last_attempts, summarize
from agenttrain.protocols import Engine, EngineContext, OnDone
from agenttrain.records import Phase, RolloutRequest, RolloutResult, Task
from agenttrain.report import RunFacts, eval_report, eval_text
from agenttrain.rollout import Runner, open_runner
from agenttrain.run_folder import RunFolder

UNREACHED = re.compile(r"\w*(Connect(ion)?Error|APITimeoutError|AuthenticationError|PermissionDeniedError): ")
"""Begins the cause of a rollout whose model nobody answered for, or whose key was refused, by its client's class."""
N_UNREACHED = 3
"""Rollouts, the attempts of one place included, that show by themselves that the user's own models can't be reached."""


class Watcher(Protocol):
    """Who shows progress; `commands.progress` is one."""

    def began(self, phase: str, total: int) -> None: ...

    def rollout_done(self, result: RolloutResult) -> None: ...

    def ended(self, phase: str, summary: Mapping[str, Any]) -> None: ...

    def step_done(self, row: Mapping[str, Any], n_steps: int, seconds_left: float) -> None: ...

    def alarm(self, alarm: Alarm) -> None: ...


def evaluate(job: Job, run: RunFolder, *, watcher: Watcher) -> dict[str, Any]:
    """Roll out the job's tasks once more and report: at the job's policy, or with what answers in its place."""
    started = time.perf_counter()
    config = job.config
    run.write_config(config.model_dump(), {**provenance(job), **answered_by(job)})
    run.write_tasks(run.evaluated_tasks, job.held_out)
    span = telemetry.run_span("evaluation", run_id=run.id, graph=job.loaded.name)
    with span, opened(job, run) as (store, runner, pool), ExitStack() as stack:
        engine = None
        if job.model is not None:
            context = EngineContext(config=config, model=str(job.model), run_dir=run.path)
            engine = job.plugins.engine(config.engine.name)(context)
            stack.callback(engine.close)
        requests = evaluation_requests(job.held_out, "eval", config.eval.repeats, config.eval.temperature, config.seed)
        watcher.began("eval", len(requests))
        with telemetry.phase_span("eval"):
            results = rolled_out(pool, engine, requests, _noticing(job, watcher.rollout_done))
        store.flush()
        temperature = config.eval.temperature
        rollouts, verifiers = [result.rollout for result in results], declared_verifiers(job)
        summary = summarize(rollouts, job.held_out, config.eval.repeats, temperature=temperature, verifiers=verifiers)
        summary["reward_parts"] = reward_parts(verifiers, last_attempts(rollouts))[0]
        if not all(rollout.tokens_told for rollout in last_attempts(rollouts)):
            summary["tokens"] = None
        if _kind(job) == "own models":
            summary["temperature"] = None  # each has its own
        watcher.ended("eval", summary)
        refuse_without_reward(results, "evaluation", "nothing was measured")
        refuse_unmatched(runner)
        alarms = evaluation_alarms(results) + plugin_alarms(job.plugins.observer_errors) + engine_alarms(engine, step=0)
        alarms += escape_alarms(*runner.gate.escaped(), step=0)
        for alarm in alarms:
            watcher.alarm(alarm)
        stats = engine.stats() if engine is not None else {}
        wall_s = time.perf_counter() - started
        report = eval_report(
            _facts(job, run, engine),
            result=summary,
            wall_s=wall_s,
            cpu_hours=cpu_seconds(stats) / 3600,
            gpu_hours=stats.get("gpus", 0.0) * wall_s / 3600,
            alarms=[alarm.as_dict() for alarm in alarms],
        )
    run.write_report(report, eval_text(report))
    return report


def answered_by(job: Job) -> dict[str, str]:
    """Who answers the trained calls of an evaluation, for its provenance: as `promotion.measures.Evaluation` has it."""
    return {"answered_by": _kind(job), "policy": _answers(job)}


def _kind(job: Job) -> str:
    if job.in_place is None:
        return "policy"
    return "own models" if job.in_place.model is None else "chat model"


def _answers(job: Job) -> str:
    """The policy's folder, or the name of what answers in its place."""
    return str(job.model) if job.in_place is None else job.in_place.name


def _facts(job: Job, run: RunFolder, engine: Engine | None) -> RunFacts:
    view = read_store(run.rollouts)
    return RunFacts(
        run_id=run.id,
        graph=job.loaded.name,
        trainer="none",
        engine=engine.name if engine is not None else "as-is" if _kind(job) == "own models" else _kind(job),
        seed=job.config.seed,
        base=_answers(job),
        n_parameters=n_parameters(job.model) if job.model is not None else 0,
        replaces=replaced_model(view),
        n_train=len(job.train),
        n_held_out=len(job.held_out),
        external_calls=external_calls(view, job.tools),
    )


def declared_verifiers(job: Job) -> Mapping[str, Part]:
    """Those of the graph."""
    return job.loaded.trainable.verifiers if job.loaded.trainable is not None else {}


def rolled_out(
    pool: RolloutPool, engine: Engine | None, requests: Sequence[RolloutRequest], on_done: OnDone | None
) -> list[RolloutResult]:
    """The pool's results, of an engine that is ready before and whole after.

    Raises:
        EngineError: the engine has failed; else its rollouts would look like a failing environment.
        ModelError: it can't load its model.
    """
    if engine is not None:
        engine.stats()
    results = pool.run(engine, requests, on_done)
    if engine is not None:
        engine.stats()
    return results


def refuse_without_reward(results: Sequence[RolloutResult], what: str, so: str) -> None:
    """End a run in which every rollout failed by its environment, before that is taken for a policy that fails.

    Args:
        what: the rollouts are of, such as "baseline".
        so: what follows from it, in words.

    Raises:
        TrainerError: no rollout has a reward; it tells the commonest cause.
    """
    lost = [result.rollout for result in results if result.rollout.reward is None]
    causes = Counter(rollout.cause.replace(repr(rollout.task_id), "…") for rollout in lost)
    if results and sum(causes.values()) == len(results):
        cause, n = causes.most_common(1)[0]
        raise TrainerError(
            f"None of the {len(results)} {what} rollouts has a reward, so {so}. "
            f"The commonest cause ({n} of them): {cause.rstrip('.')}. {_next_step(cause)}"
        )


def _noticing(job: Job, on_done: OnDone) -> OnDone:
    """The same; where the user's own models answer, it ends the run when the first rollouts reach none of them."""
    if _kind(job) != "own models":
        return on_done
    done: list[RolloutResult] = []

    def noticing(result: RolloutResult) -> None:
        on_done(result)
        if len(done) < N_UNREACHED:
            done.append(result)
            if len(done) == N_UNREACHED and all(UNREACHED.match(each.rollout.cause) for each in done):
                refuse_without_reward(done, "first evaluation", "the evaluation was ended")

    return noticing


def _next_step(cause: str) -> str:
    """What to do about why rollouts have no reward."""
    if UNREACHED.match(cause):
        return (
            "See that the model's server runs, and that its address and key are in the environment "
            "(OPENAI_BASE_URL and OPENAI_API_KEY where ChatOpenAI asks). Then start again."
        )
    return "Mend what this says, then start again."


def refuse_unmatched(runner: Runner) -> None:
    """Refuse selectors that no call of a whole evaluation matched.

    Raises:
        RoleError: with the names seen.
    """
    unmatched = runner.roles.unmatched()
    if unmatched:
        raise RoleError(" ".join(unmatched))


@contextmanager
def opened(
    job: Job, run: RunFolder, *, must_stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[SqliteStore, Runner, RolloutPool]]:
    """Store, gate and graph, and the pool: opened in this order, closed in the other.

    Args:
        must_stop: asked while rollouts are made; True ends them as Ctrl-C does.
    """
    config = job.config
    with ExitStack() as stack:
        store = SqliteStore(run.rollouts)
        stack.callback(store.close)
        runner = stack.enter_context(
            open_runner(
                config,
                job.loaded,
                renderer=job.renderer,
                store=store,
                plugins=job.plugins,
                model_name=job.model.name if job.model is not None else _answers(job),
                in_place=job.in_place,
                run_id=run.id,
            )
        )
        stop = stack.enter_context(ctrl_c_flag())
        pool = RolloutPool(
            runner=runner,
            concurrency=config.engine.concurrency,
            seconds=config.limits.seconds,
            should_stop=lambda: stop.is_set() or must_stop(),
        )
        stack.callback(pool.close)
        yield store, runner, pool


@contextmanager
def ctrl_c_flag() -> Iterator[threading.Event]:
    """The first Ctrl-C only sets a flag, so that no update is cut in half; the second one interrupts at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.set()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def evaluation_requests(
    tasks: Sequence[Task], phase: Phase, repeats: int, temperature: float, seed: int
) -> list[RolloutRequest]:
    """[tasks × repeats] one request each, the repeats of a task together."""
    return [
        RolloutRequest(task=task, phase=phase, sibling=repeat, temperature=temperature, seed=seed)
        for task in tasks
        for repeat in range(repeats)
    ]
