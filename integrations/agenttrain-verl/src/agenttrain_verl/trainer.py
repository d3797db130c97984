"""protocols.Trainer over veRL's own trainer on Ray.

What becomes what: a run's context becomes a cluster, rollout workers and veRL's trainer, which do what `fit` asks; what
goes wrong in any process of theirs becomes one error that says where. Invariants: evaluation and training use the same
workers and the same replicas; the weight version is veRL's global step; all that was started is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.errors import AgenttrainError, ConfigError, EngineError, RunError, TrainerError
from agenttrain.exporters import exported
from agenttrain.prepare import n_parameters
from agenttrain.protocols import OnDone, TrainerContext
from agenttrain.records import RolloutRequest, RolloutResult, RolloutSpec, StepResult

from agenttrain_verl.exporting import described, export_checkpoint
from agenttrain_verl.plan import Plan, plan_of
from agenttrain_verl.server_spec import ServerSpec
from agenttrain_verl.shipping import runtime_env

STATE = "agenttrain.json"
NOTICED_IN_S = 3.0
"""How long after an error it may take until a process that died is known."""
T = TypeVar("T")


class VerlTrainer:
    """veRL's trainer, driven from this process."""

    name = "verl"

    def __init__(self, context: TrainerContext) -> None:
        """Start or join Ray, the trainer's ranks, the replicas and the rollout workers.

        Raises:
            ConfigError: no tasks.
            TrainerError: something of it didn't start.
        """
        if not context.tasks:
            raise ConfigError('There are no training tasks. Give tasks with split "train", or leave `split` out.')
        if context.elsewhere is None:
            raise TrainerError("The trainer 'verl' makes rollouts in other processes, and this caller can't take them.")
        self._context, self._config = context, context.config
        self._plan = plan_of(context.config, context.spec.model, n_tasks=len(context.tasks))
        self._run_dir = Path(context.spec.run_dir)
        self.n_parameters = n_parameters(Path(context.spec.model))
        self._cluster: Any = None
        self._controller: Any = None
        self._workers: Any = None
        self._watch: Any = None
        self._close = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._keep_logs()
            self.close()
            raise

    def _open(self) -> None:
        from agenttrain_verl.compose import environment_variables

        self._close.enter_context(_environment(environment_variables(self._plan, run_dir=self._run_dir)))
        self._close.enter_context(_stdout_kept_clean(self._run_dir / "verl" / "driver.log"))
        env, spec = runtime_env(
            self._plan, self._context.spec, joined=self._plan.settings.address is not None, run_dir=self._run_dir
        )
        self._plan = replace(self._plan, model=Path(spec.model))  # as the nodes see it
        self._cluster = _opened_cluster(self._plan, self._run_dir, env)
        self._controller = self._told(lambda: self._opened_controller(spec))
        facts = self._told(self._replica_facts)
        self.engine_name, self.takes_seeds = facts["name"], facts["takes_seeds"]
        self._workers = self._told(lambda: self._opened_workers(spec, facts))
        self._watch = self._watched()
        self._cluster.note_processes()
        self.adapter, n_of_adapter = described(self._plan)
        self.n_trained_parameters = n_of_adapter if self.adapter is not None else self.n_parameters

    def _opened_controller(self, spec: RolloutSpec) -> Any:
        from omegaconf import OmegaConf

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # veRL tells of each of its training engines that isn't installed
            from agenttrain_verl.compose import compose
            from agenttrain_verl.controller import open_controller
            from agenttrain_verl.in_every_process import took_effect

        if (fault := took_effect()) is not None:
            raise TrainerError(f"agenttrain could not make itself known to veRL in this process: {fault}")
        assert self._context.elsewhere is not None
        config = compose(self._plan, run_dir=self._run_dir)
        servers = ServerSpec(rollout=spec, run=self._run_dir.name, device=self._plan.device, exported=exported())
        OmegaConf.update(config, "actor_rollout_ref.rollout.custom", servers.as_custom(), force_add=True)
        return open_controller(
            config,
            self._plan,
            tasks=self._context.tasks,
            elsewhere=self._context.elsewhere,
            group_advantages=self._context.advantages,
        )

    def _replica_facts(self) -> Mapping[str, Any]:
        import ray

        if self._plan.settings.rollout == "stock":
            return {"name": "sglang", "takes_seeds": None, "max_length": self._plan.max_length}
        return asdict(ray.get(self._servers()[0].facts.remote()))

    def _opened_workers(self, spec: RolloutSpec, facts: Mapping[str, Any]) -> Any:
        from agenttrain_verl.host import HostSpec
        from agenttrain_verl.rollout_workers import RolloutWorkers
        from agenttrain_verl.turn_client import TurnClient

        assert self._context.elsewhere is not None
        n_workers = self._plan.n_rollout_workers or self._cluster.n_nodes
        host = HostSpec(
            rollout=spec,
            node_id=self._cluster.node_id,
            max_length=min(facts["max_length"], self._plan.max_length),
            takes_seeds=facts["takes_seeds"],
            engine_name=self.engine_name,
            stock=self._plan.settings.rollout == "stock",
            concurrency=-(-self._config.engine.concurrency // n_workers),
            with_experts=self._plan.is_mixture and self._plan.settings.strategy == "megatron",
            exported=exported(),
        )
        workers = RolloutWorkers(
            config=self._controller.config,
            llm_client=self._managers()[-1].get_client(client_cls=TurnClient),
            host=host,
            n_workers=n_workers,
            elsewhere=self._context.elsewhere,
            restarts=self._plan.settings.worker_restarts,
            silence_s=self._plan.settings.silence_s,
        )
        workers.open()
        self._controller.begin(workers)
        return workers

    def _watched(self) -> Any:
        """A watch on all that no run can replace."""
        from agenttrain_verl.process_watch import ProcessWatch, vital_of

        vital = vital_of(self._controller)
        vital |= {f"the engine of replica {n}": server for n, server in enumerate(self._servers())}
        return ProcessWatch(vital, next_step=self._next_step, died=self._workers.give_up)

    @property
    def _next_step(self) -> str:
        return f"Checkpoints stand: agenttrain fit --resume {self._run_dir.name}."

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def weight_version(self) -> int:
        return int(self._controller.train_dataloader.trained)  # veRL counts a step from its begin

    def evaluate(self, requests: Sequence[RolloutRequest], on_done: OnDone | None = None) -> list[RolloutResult]:
        """Roll out in the workers and on the replicas that serve training, at the weights of now."""
        results: list[RolloutResult] = self._told(lambda: self._workers.evaluate(requests))
        for result in results:
            if on_done is not None:
                on_done(result)
        return results

    def steps(self) -> Iterator[StepResult]:
        """Train, one result a step, from where it stands to `trainer.steps`."""
        from agenttrain_verl.reporting import step_result

        while self._controller.global_steps < self._config.trainer.steps:
            outcome = self._told(self._controller.one_step)
            if outcome.step == self._config.trainer.steps:
                self._told(self._controller.end)
            yield step_result(outcome)

    def save(self, folder: Path) -> None:
        """veRL's checkpoint in `global_step_N/`, with our data cursor in its data.pt."""
        self._told(lambda: self._controller.save(folder))
        (folder / STATE).write_text(json.dumps(self._state(), indent=1))

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote, with its weights on the replicas.

        Raises:
            RunError: the checkpoint is of another run (seed, tasks, ranks … differ).
        """
        saved = json.loads((folder / STATE).read_text())
        for key, here in self._state().items():
            if saved.get(key) != here:
                raise RunError(
                    f"The checkpoint {folder} was written with {key} {saved.get(key)}, and this run has {here}. Resume "
                    "with the run's own configuration, tasks and cluster."
                )
        self._told(lambda: self._controller.restore(folder))

    def _state(self) -> dict[str, Any]:
        return {
            "seed": self._config.seed,
            "n_tasks": len(self._context.tasks),
            "ranks": self._plan.n_ranks,
            "strategy": self._plan.settings.strategy,
            "adapter": self.adapter,
        }

    def export(self, folder: Path) -> None:
        """The weights of now as a Hugging Face folder, in float32, with the base's tokenizer files."""
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(dir=self._run_dir, prefix=".export-") as aside:
            self._told(lambda: self._controller.save(Path(aside)))
            actor = next(Path(aside).glob("global_step_*")) / "actor"
            export_checkpoint(actor, base=Path(self._context.spec.model), folder=folder, plan=self._plan)

    # ── what is asked of it beside ───────────────────────────────────────────────────────────────────────────────

    def engine_stats(self) -> Mapping[str, float]:
        """The replicas' counters, summed, and what Ray's processes took."""
        import ray

        totals: dict[str, float] = {}
        if self._plan.settings.rollout == "engine":
            for stats in self._told(lambda: ray.get([server.stats.remote() for server in self._servers()])):
                totals |= {name: totals.get(name, 0.0) + value for name, value in stats.items()}
        n_gpus = float(self._plan.n_devices if self._plan.device == "cuda" else 0)
        return {**totals, "cpu_s": totals.get("cpu_s", 0.0) + self._cluster.cpu_s(), "gpus": n_gpus}

    def news(self) -> Sequence[str]:
        """What happened to workers and replicas since this was last asked."""
        import ray

        told = list(self._workers.news())
        if self._plan.settings.rollout == "engine":
            for news in self._told(lambda: ray.get([server.news.remote() for server in self._servers()])):
                told += news
        return told

    def close(self) -> None:
        """End workers, replicas, ranks and the cluster that was started. Safe to call twice."""
        watch, self._watch = self._watch, None
        workers, self._workers = self._workers, None
        controller, self._controller = self._controller, None
        cluster, self._cluster = self._cluster, None
        try:
            if watch is not None:
                watch.close()
            if workers is not None:
                workers.close()
            if controller is not None:
                _finish(controller)
        finally:
            try:
                if cluster is not None:
                    cluster.close()
            finally:
                self._close.close()

    def _managers(self) -> list[Any]:
        return list(self._controller._rollout_server_managers())

    def _servers(self) -> list[Any]:
        """The actors that hold the engines."""
        return [handle for manager in self._managers() for handle in manager.server_handles]

    def _told(self, work: Callable[[], T]) -> T:
        """What it gives; what Ray or veRL raises becomes one error that says where.

        Raises:
            AgenttrainError: as it is, from whatever process.
            TrainerError: anything else.
        """
        try:
            return work()
        except Exception as error:
            is_told = isinstance(error, AgenttrainError) and not isinstance(error, EngineError)
            failure = error if is_told else self._of_a_death(within_s=NOTICED_IN_S) or self._failure(error)
            self._keep_logs()
            if failure is error:
                raise
            raise failure from error

    def _of_a_death(self, *, within_s: float) -> TrainerError | None:
        """What the watch noticed: a dead process shows in many ways, and is told in one."""
        return self._watch.trouble(within_s=within_s) if self._watch is not None else None

    def _failure(self, error: Exception) -> AgenttrainError:
        from agenttrain_verl.worker_logs import worker_trouble

        trouble = worker_trouble(error)
        if isinstance(trouble, AgenttrainError):
            return trouble
        return TrainerError(f"veRL's trainer failed: {trouble}. {self._next_step}")

    def _keep_logs(self) -> None:
        if self._cluster is not None:
            with contextlib.suppress(OSError):  # a full disk, perhaps what the error is of
                self._cluster.keep_logs()


def _opened_cluster(plan: Plan, run_dir: Path, env: Mapping[str, Any]) -> Any:
    from agenttrain_verl.cluster import Cluster

    return Cluster.open(plan, run_dir=run_dir, runtime_env=env)


def _finish(controller: Any) -> None:
    """Close veRL's loggers, and the transfer queue that this process opened."""
    import transfer_queue as tq

    with contextlib.suppress(Exception):  # Ray may be gone; what was logged is written
        logger = getattr(controller, "logger", None)
        if logger is not None:
            logger.finish(exit_code=0)
    with contextlib.suppress(Exception):
        tq.close()


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables that veRL reads in this process, while it is in use."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _stdout_kept_clean(log: Path) -> Iterator[None]:
    """What veRL and Ray print goes to a file: standard output is the command's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        sys.stdout.flush()
        yield
