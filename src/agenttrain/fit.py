"""THE RUN: baseline, training, the same held-out tasks again, report.

What becomes what: a Job and a RunFolder become a report. All that the report says is computed from what stands in
the run folder (the store, metrics.jsonl), so that a resumed run tells of its whole life. `fit` knows no engine: the
trainer owns the engines that serve it, and evaluates on them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agenttrain import telemetry
from agenttrain.alarms import (
    Alarm,
    changed_alarms,
    engine_alarms,
    escape_alarms,
    evaluation_alarms,
    memory_alarms,
    part_alarms,
    plugin_alarms,
    resume_alarms,
    safety_alarms,
    safety_rise_alarms,
    step_alarms,
    tampering_alarms,
    verifier_alarms,
    world_alarms,
)
from agenttrain.capture.store import SqliteStore, StoreView, read_store
from agenttrain.checkpoint_folder import Checkpoint, write_checkpoint
from agenttrain.disk import disk_trouble, empty_folder, replace_folder
from agenttrain.earlier_lives import KeptRollouts, describe_unfinished, kept_rollouts, newest_whole
from agenttrain.elsewhere import RunElsewhere
from agenttrain.errors import AgenttrainError, EngineError, PluginError, RunError, TrainerError
from agenttrain.evaluation import (
    Watcher,
    declared_verifiers,
    evaluation_requests,
    opened,
    refuse_unmatched,
    refuse_without_reward,
    rolled_out,
)
from agenttrain.figures import (
    external_calls,
    replaced_model,
    rollout_metrics,
    summed,
    token_table,
    wall_seconds,
)
from agenttrain.folder_hash import file_hashes, hash_of_files
from agenttrain.life import LifeAccount
from agenttrain.memory import MIB, MemoryWatch
from agenttrain.pool import RolloutPool
from agenttrain.prepare import Job, provenance
from agenttrain.promotion.comparison import compared
from agenttrain.promotion.measures import Evaluation
from agenttrain.promotion.parts import reward_parts
from agenttrain.promotion.summary import last_attempts, summarize
from agenttrain.protocols import Engine, EngineContext, OnDone, Trainer, TrainerContext
from agenttrain.records import Phase, RolloutRequest, RolloutResult, RolloutSpec, StepResult
from agenttrain.report import RunFacts, fit_report, fit_text
from agenttrain.rollout import Runner
from agenttrain.run_folder import RunFolder
from agenttrain.sample.staleness import staleness_metrics, step_staleness
from agenttrain.trace_join import trained_by_group
from agenttrain.trainer.advantage import own_rewards
from agenttrain.trainer.algorithms import algorithm_name, chosen

SEEDS = {
    True: "per token",
    False: "none: the engine draws by itself",
    None: "per call, where the engine takes one",
}
"""How a rollout's seed reaches the engine, by `takes_seeds`."""


class RunStopped(Exception):
    """The run was stopped before its end, and saved: `--resume` goes on."""

    def __init__(self, run_id: str, why: str) -> None:
        super().__init__(run_id, why)
        self.run_id, self.why = run_id, why


class StoppedByAlarm(RunStopped):
    """The same, at a loud alarm with `stop_on_alarm`."""


class StoppedByMemory(RunStopped):
    """The same, before the kernel ends the process for its memory."""


@dataclass(slots=True)
class Fit:
    """One run under way."""

    job: Job
    run: RunFolder
    watcher: Watcher
    stop_on_alarm: bool
    store: SqliteStore
    runner: Runner
    pool: RolloutPool
    memory: MemoryWatch
    kept: KeptRollouts
    life: int
    """How often the run has been started: 0, then one more per resume."""
    resumed_from: Checkpoint | None = None
    trainer: Trainer = field(init=False)
    engine: Engine | None = None
    """The one that the trainer opened last. None: it has engines of its own."""
    account: LifeAccount = field(init=False)
    first_version: int = 0
    """Of the weights that this life began to train."""
    rollouts_by_step: dict[int, list[RolloutResult]] = field(default_factory=dict)
    """Results of each step that isn't trained yet, every attempt, and of an evaluation at 0; any thread adds to it."""
    evaluation_alarms: list[Alarm] = field(default_factory=list)

    def report(self, notes: Sequence[Alarm] = ()) -> dict[str, Any]:
        """Do the whole run; the report is written when this returns.

        Args:
            notes: what going on with the run gave reason to say.
        """
        began = time.monotonic()
        self.trainer = self._open_trainer()
        self.account = LifeAccount(self.run, self.life, self.trainer.engine_stats, began, list(notes))
        try:
            return self._reported()
        except EngineError as error:
            raise EngineError(f"{error} Checkpoints stand: agenttrain fit --resume {self.run.id}.") from error
        finally:
            self.trainer.close()

    def _reported(self) -> dict[str, Any]:
        """Baseline, training, evaluation, report, by a trainer that is open."""
        with self._saved_when_stopped():
            baseline = self._evaluate("baseline")
        self._refuse_unmatched_selectors()
        if self.resumed_from is not None:
            self.trainer.restore(self.resumed_from.folder)
        self.first_version = self.trainer.weight_version
        with telemetry.phase_span("train"):
            self._train(baseline)
        with self._saved_when_stopped():
            trained = self._evaluate("held_out")
        for alarm in safety_rise_alarms(baseline, trained):
            self.evaluation_alarms.append(alarm)
            self.watcher.alarm(alarm)
        self._export()
        return self._write_report(baseline, trained)

    def _open_trainer(self) -> Trainer:
        job, config = self.job, self.job.config
        name = chosen(config.trainer).advantage
        context = TrainerContext(
            config=config,
            spec=spec_of(job, self.run),
            tasks=job.train,
            open_engine=self._open_engine,
            run_rollouts=self._run_rollouts,
            advantages=own_rewards if name is None else self._estimator(name),
            elsewhere=RunElsewhere(
                run=self.run,
                life=self.life,
                store=self.store,
                kept=self.kept,
                roles=self.runner.roles,
                note=self._noted_elsewhere,
                is_of_these_weights=self._is_of_these_weights,
                should_stop=self.pool.should_stop,
            ),
        )
        return job.plugins.trainer(config.trainer.name)(context)

    def _estimator(self, name: str) -> Callable[[Sequence[float]], list[float]]:
        """The advantage estimator of that name; what it raises is told as its own."""
        estimator = self.job.plugins.advantage(name)

        def advantages(rewards: Sequence[float]) -> list[float]:
            try:
                return estimator(rewards)
            except Exception as error:
                raise PluginError(
                    f"The advantage estimator {name!r} raised {type(error).__name__}: {error}. Mend it there, then "
                    f"agenttrain fit --resume {self.run.id}."
                ) from error

        return advantages

    def _open_engine(self) -> Engine:
        job = self.job
        context = EngineContext(config=job.config, model=str(job.model), run_dir=self.run.path)
        self.engine = job.plugins.engine(job.config.engine.name)(context)
        return self.engine

    @property
    def _serving(self) -> Engine | Trainer:
        """Who can tell of what serves training: the engine, or a trainer that has engines of its own."""
        return self.engine if self.engine is not None else self.trainer

    def _run_rollouts(
        self, engine: Engine, requests: Sequence[RolloutRequest], on_done: OnDone | None
    ) -> list[RolloutResult]:
        """What a trainer calls: the pool, with every attempt noted for the step's figures."""

        def noted(result: RolloutResult) -> None:
            self._note(result)
            self.account.write_when_due()
            if on_done is not None:
                on_done(result)

        def made(still: list[RolloutRequest]) -> list[RolloutResult]:
            self.account.write_when_due()  # before the first of them: a life that is killed in it has an entry
            return rolled_out(self.pool, engine, still, noted)

        return self._completed(requests, made)

    def _noted_elsewhere(self, result: RolloutResult) -> None:
        self._note(result)
        self.account.write_when_due()

    def _note(self, result: RolloutResult) -> None:
        self.rollouts_by_step.setdefault(result.request.step, []).append(result)
        self.watcher.rollout_done(result)

    def _completed(
        self, requests: Sequence[RolloutRequest], make: Callable[[list[RolloutRequest]], list[RolloutResult]]
    ) -> list[RolloutResult]:
        """The results in the order of the requests: from the store where an earlier life made them, else made."""
        gone_on = self.kept.go_on(requests, self._is_of_these_weights)
        for result in gone_on.earlier:
            self._note(result)
        still = [replace(request, life=self.life) for request in gone_on.open.values()]
        return gone_on.completed(make(still) if still else [])

    def _is_of_these_weights(self, result: RolloutResult) -> bool:
        """Whether a rollout of an earlier life was sampled from the weights of now, and not from some that were lost.

        The base's weights are the same in every life. Those of a checkpoint came with the life that wrote it, and
        are these until this life publishes others. A rollout to train may be of weights on the way to them: how old it
        may be is bounded by when it is begun.
        """
        version, phase = self.trainer.weight_version, result.rollout.phase
        versions = {seen for turn in result.turns for seen in turn.weight_versions}
        of_version = max(versions, default=version) <= version if phase == "train" else versions <= {version}
        if phase == "baseline":
            return of_version
        since = self.resumed_from.life if self.resumed_from is not None else 0
        return of_version and version == self.first_version and result.rollout.life >= since

    def _evaluate(self, phase: Phase) -> dict[str, Any]:
        """Greedy, unless set: the held-out tasks at the weights of now."""
        config, tasks = self.job.config, self.job.held_out
        requests = evaluation_requests(tasks, phase, config.eval.repeats, config.eval.temperature, config.seed)
        self.watcher.began(phase, len(requests))
        with self.account.evaluating(), telemetry.phase_span(phase):
            results = self._completed(requests, lambda still: self.trainer.evaluate(still, None))
        self.rollouts_by_step.pop(0, None)
        self.store.flush()
        self.account.write()
        summary = self._summary([result.rollout for result in results])
        self.watcher.ended(phase, summary)
        if phase == "baseline":
            refuse_without_reward(results, "baseline", "there is nothing to learn from")
        for alarm in evaluation_alarms(results):
            self.evaluation_alarms.append(alarm)
            self.watcher.alarm(alarm)
        for alarm in self._news(step=0):
            self.account.alarms.append(alarm)
            self.watcher.alarm(alarm)
        return summary

    def _news(self, step: int) -> list[Alarm]:
        """What happened since this was last asked, to engines and past the gate."""
        return engine_alarms(self._serving, step) + escape_alarms(*self.runner.gate.escaped(), step=step)

    def _summary(self, rollouts: Sequence[Any]) -> dict[str, Any]:
        config = self.job.config
        return summarize(
            rollouts,
            self.job.held_out,
            config.eval.repeats,
            temperature=config.eval.temperature,
            verifiers=declared_verifiers(self.job),
        )

    def _train(self, baseline: Mapping[str, Any]) -> None:
        config = self.job.config
        self.watcher.began("train", config.trainer.steps)
        steps = self.trainer.steps()
        while True:
            began = time.perf_counter()
            with self._saved_when_stopped():
                step = next(steps, None)
            if step is None:
                break
            alarms = self._after_step(step, baseline, time.perf_counter() - began)
            last = step.step == config.trainer.steps
            loud = self.stop_on_alarm and any(alarm.severity == "loud" for alarm in alarms)
            if last or loud or step.step % config.checkpoint.every == 0:
                self._save(step.step)
            if loud:
                raise StoppedByAlarm(self.run.id, "a loud alarm, and --stop-on-alarm was given")

    def _refuse_unmatched_selectors(self) -> None:
        """A selector that matched no call of a whole evaluation is a mistake, not a rarity."""
        if self.life == 0:
            refuse_unmatched(self.runner)

    def _after_step(self, step: StepResult, baseline: Mapping[str, Any], wall_s: float) -> list[Alarm]:
        """Store, figures, alarms, telemetry: all of it before the next step."""
        rollouts, ages = self.rollouts_by_step.pop(step.step, []), step_staleness(step)
        self.store.put_trained(step.step, self.life, step.samples, advantages=step.advantages, staleness=ages)
        self.store.flush()
        metrics = rollout_metrics(rollouts) | {**step.metrics, **staleness_metrics(ages), "wall_s": wall_s}
        left = self.job.config.trainer.steps - step.step
        merged = replace(step, metrics=metrics)
        alarms = step_alarms(merged, baseline_tool_calls=baseline["tool_calls"])
        alarms += verifier_alarms(rollouts, step.step)
        alarms += world_alarms(rollouts, step.step)
        alarms += tampering_alarms(rollouts, step.step)
        alarms += part_alarms(rollouts, step.step) + safety_alarms(rollouts, step.step, baseline=baseline)
        alarms += self._news(step.step)
        alarms += memory_alarms(self.memory.after_step(len(rollouts)), step.step, steps_to_go=left)
        row = {
            "step": step.step,
            "weight_version": step.weight_version,
            "life": self.life,
            "reward": None,
            **metrics,
            "alarms": [alarm.as_dict() for alarm in alarms],
            "dropped": dict(step.dropped),
        }
        self.run.append_metrics(row)
        telemetry.update_spans(step.step, step.weight_version, trained_by_group(step, rollouts), metrics)
        self.job.plugins.observe("agenttrain_update_done", step_result=merged)
        self.account.write()
        self.watcher.step_done(row, self.job.config.trainer.steps, left * self._mean_wall_s())
        for alarm in alarms:
            self.watcher.alarm(alarm)
        return alarms

    def _mean_wall_s(self) -> float:
        walls = [float(row["wall_s"]) for row in self.run.metrics()[-5:]]
        return sum(walls) / len(walls)

    def _save(self, step: int) -> None:
        target = self.run.checkpoints / f"step-{step:05d}"
        with self._written(f"The checkpoint of step {step}"):
            write_checkpoint(target, step=step, life=self.life, save=self.trainer.save)
        self.run.prune_checkpoints(self.job.config.checkpoint.keep)
        self.job.plugins.observe("agenttrain_checkpoint_written", step=step, folder=target)

    @contextmanager
    def _written(self, what: str) -> Iterator[None]:
        """Around a trainer's writing: a disk that refuses is told from a fault of the trainer.

        Raises:
            RunError: the disk refuses.
            TrainerError: the trainer raised something else.
        """
        try:
            yield
        except AgenttrainError:
            raise
        except Exception as error:
            why, resume = disk_trouble(error), f"agenttrain fit --resume {self.run.id}."
            if why is not None:
                raise RunError(
                    f"{what} can't be written: {why}. What was written before is whole: make room, then {resume}"
                ) from error
            raise TrainerError(
                f"{what} can't be made: the {self.trainer.name} trainer raised {type(error).__name__}: {error}. What "
                f"was written before is whole: mend the trainer, then {resume}"
            ) from error

    @contextmanager
    def _saved_when_stopped(self) -> Iterator[None]:
        """Ctrl-C, or too little memory, while rollouts are made: the weights of the last whole step are saved."""
        try:
            yield
        except KeyboardInterrupt:
            done = self.run.metrics()
            step = done[-1]["step"] if done else 0
            self.store.flush()
            if step not in [known for known, _ in self.run.checkpoint_folders()]:
                self._save(step)
            self.account.write()
            trouble = self.memory.trouble()
            if trouble is not None:
                raise StoppedByMemory(self.run.id, trouble) from None
            raise RunStopped(self.run.id, "stopped by Ctrl-C") from None

    def _export(self) -> None:
        """policy/: written aside and renamed, so that a folder of that name is whole."""
        with self._written(str(self.run.policy)), empty_folder(self.run.path / ".policy.part") as aside:
            self.trainer.export(aside)
            replace_folder(aside, self.run.policy)

    def _write_report(self, baseline: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
        self.account.alarms += plugin_alarms(self.job.plugins.observer_errors)
        self.account.write()
        rows, lives = self.run.metrics(), self.run.lives()
        view = read_store(self.run.rollouts)
        sides = [self._evaluation(view, phase) for phase in ("baseline", "held_out")]
        before, after = reward_parts(declared_verifiers(self.job), *(side.rollouts for side in sides))
        report = fit_report(
            self._facts(view),
            baseline={**baseline, "reward_parts": before},
            trained={**trained, "reward_parts": after},
            compared=compared(*sides),
            tokens=token_table(view, rows),
            steps=rows,
            wall_s=wall_seconds(rows, lives),
            cpu_hours=sum(life["cpu_s"] for life in lives) / 3600,
            gpu_hours=sum(life["gpu_s"] for life in lives) / 3600,
            lives=len(lives),
            alarms=[
                *(alarm for row in rows for alarm in row["alarms"]),
                *(alarm.as_dict() for alarm in self.evaluation_alarms),
                *(alarm for life in lives for alarm in life["alarms"]),
            ],
        )
        report["seeds"] = SEEDS[getattr(self._serving, "takes_seeds", None)]
        report["policy"] = _policy_files(self.run)
        report["engine_counts"] = summed(life.get("engine", {}) for life in lives)
        self.run.write_report(report, fit_text(report))
        return report

    def _evaluation(self, view: StoreView, phase: Phase) -> Evaluation:
        """What `evaluated.read_evaluation` will read of this run."""
        config = self.job.config
        return Evaluation(
            name=f"{self.run.id}:{phase}",
            run_id=self.run.id,
            phase=phase,
            tasks=tuple(self.job.held_out),
            repeats=config.eval.repeats,
            temperature=config.eval.temperature,
            seed=config.seed,
            rollouts=tuple(last_attempts(rollout for rollout in view.rollouts() if rollout.phase == phase)),
            verifiers=declared_verifiers(self.job),
            tables=config.model_dump(),
        )

    def _facts(self, view: StoreView) -> RunFacts:
        job = self.job
        return RunFacts(
            run_id=self.run.id,
            graph=job.loaded.name,
            trainer=self.trainer.name,
            algorithm=algorithm_name(job.config.trainer),
            engine=self.trainer.engine_name,
            seed=job.config.seed,
            base=str(job.model),
            n_parameters=self.trainer.n_parameters,
            n_trained_parameters=self.trainer.n_trained_parameters,
            adapter=self.trainer.adapter,
            replaces=replaced_model(view),
            n_train=len(job.train),
            n_held_out=len(job.held_out),
            external_calls=external_calls(view, job.tools),
        )


def fit(
    job: Job, run: RunFolder, *, watcher: Watcher, resume: bool = False, stop_on_alarm: bool = False
) -> dict[str, Any]:
    """Train, and prove on held-out tasks whether it helped.

    Args:
        run: a new folder, or with `resume` one that holds a checkpoint.

    Returns:
        report.json, which is written too, like report.md and policy/.

    Raises:
        RunStopped: Ctrl-C, or a loud alarm with `stop_on_alarm`; a checkpoint stands.
        AgenttrainError: what ended the run; earlier checkpoints stand.
    """
    limit = job.config.run.memory_mib
    memory = MemoryWatch(limit * MIB if limit is not None else None)
    with run.held(), ExitStack() as stack:
        made_by = provenance(job)
        checkpoint, life, notes = begun_again(run, made_by["hashes"]) if resume else (None, 0, [])
        for alarm in notes:
            watcher.alarm(alarm)
        run.write_config(job.config.model_dump(), {**made_by, "life": life})
        run.write_tasks(run.train_tasks, job.train)
        run.write_tasks(run.evaluated_tasks, job.held_out)
        stack.enter_context(telemetry.run_span("fit", run_id=run.id, graph=job.loaded.name, life=life))
        store, runner, pool = stack.enter_context(opened(job, run, must_stop=lambda: memory.trouble() is not None))
        kept = KeptRollouts()
        if resume:
            describe_unfinished(read_store(run.rollouts), store)
            kept = kept_rollouts(read_store(run.rollouts), checkpoint.step if checkpoint else 0)
        work = Fit(
            job=job,
            run=run,
            watcher=watcher,
            stop_on_alarm=stop_on_alarm,
            store=store,
            runner=runner,
            pool=pool,
            memory=memory,
            kept=kept,
            life=life,
            resumed_from=checkpoint,
        )
        return work.report(notes)


def _policy_files(run: RunFolder) -> dict[str, Any]:
    """What was exported, by which anybody can tell later that policy/ is still that."""
    files = file_hashes(run.policy)
    return {"hash": hash_of_files(files), "files": files}


def begun_again(run: RunFolder, hashes: Mapping[str, str | None]) -> tuple[Checkpoint | None, int, list[Alarm]]:
    """Take a run back to its newest whole checkpoint: that, the number of the new life, and what there is to say.

    Args:
        hashes: of what it goes on with, by name.

    Raises:
        RunError: a file of the store is damaged, or no checkpoint is whole.
    """
    read_store(run.rollouts).refuse_damaged()
    checkpoint, faults = newest_whole(run)
    made_by = run.read_config()[1]
    run.drop_metrics_after(checkpoint.step if checkpoint else 0)
    run.report_json.unlink(missing_ok=True)
    notes = resume_alarms(faults, checkpoint.step if checkpoint else 0)
    notes += changed_alarms(made_by.get("hashes", {}), hashes)
    return checkpoint, made_by.get("life", 0) + 1, notes


def spec_of(job: Job, run: RunFolder) -> RolloutSpec:
    """The picklable description that rebuilds this job's rollouts elsewhere."""
    return RolloutSpec(
        graph_file=str(job.loaded.file),
        attribute=job.loaded.attribute,
        config=json.loads(job.config.model_dump_json()),
        run_dir=str(run.path),
        model=str(job.model),
        trace_context=telemetry.trace_context(),
    )
