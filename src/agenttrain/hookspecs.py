"""Every plugin point, by shape: register, decide, observe, veto.

    register   called once at load; a callback takes a name and a factory
    decide     asked in turn until one gives an answer that is not None; that answer stands
    observe    all are told, one at a time, and can change nothing
    veto       all are asked, any refusal wins, and every reason is kept

Hooks are called one at a time by `agenttrain.plugins`, last loaded first, `tryfirst` and `trylast` respected; wrappers
are not supported. An implementation may leave out arguments it doesn't need. Stages never call hooks: they are handed
what was registered or decided.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agenttrain.markers import hookspec
from agenttrain.promotion_record import Promotion
from agenttrain.protocols import (
    AdvantageEstimator,
    EngineCheck,
    EngineFactory,
    EngineForecaster,
    Forecaster,
    TrainerCheck,
    TrainerFactory,
)
from agenttrain.records import CallSite, Role, RolloutResult, StepResult, Turn
from agenttrain.sandbox_protocol import SandboxFactory

if TYPE_CHECKING:
    import typer

    from agenttrain.config import Table

Settings = Callable[[], "type[Table]"]
"""Gives the pydantic model of a plugin's own table; called when that is wanted, so that loading imports no pydantic."""

RegisterAdvantages = Callable[[str, AdvantageEstimator], None]
RegisterSandboxes = Callable[[str, SandboxFactory], None]


class RegisterEngine(Protocol):
    """Takes a name and a factory; what the plugin's table may hold; a check of what would keep it from working; and
    what it will hold in memory."""

    def __call__(
        self,
        name: str,
        factory: EngineFactory,
        *,
        settings: Settings | None = None,
        check: EngineCheck | None = None,
        forecast: EngineForecaster | None = None,
    ) -> None: ...


class RegisterTrainer(Protocol):
    """Takes a name and a factory; what the plugin's table may hold; a check of what would keep it from working; and a
    forecast of memory and disk."""

    def __call__(
        self,
        name: str,
        factory: TrainerFactory,
        *,
        settings: Settings | None = None,
        check: TrainerCheck | None = None,
        forecast: Forecaster | None = None,
    ) -> None: ...


@hookspec
def agenttrain_register_engines(register: RegisterEngine) -> None:
    """Register engines, the programs that answer token ids for the policy.

    With `settings=`, a function that gives a subclass of agenttrain.config.Table, the plugin's own table is checked as
    ours are, and `agenttrain.config.plugin_table` reads it in the factory. With `check=`, a function from EngineContext
    to notes, what would keep the engine from working is told before anything starts: it raises an error of
    agenttrain's. With `forecast=`, a function from ForecastContext to MemoryParts, what it will hold is added to what
    the trainer will.

    Shape: register.
    When: at load, once per process; the check is asked when a command that needs the engine begins.
    Exception: the plugin is left out with all it registered, and listed with the reason; an error at load for graph.py
        and for a plugin that the configuration names. A name that another plugin has is always an error.

    Example:
        @hookimpl
        def agenttrain_register_engines(register):
            register("mine", lambda context: MyEngine(context.model))
    """


@hookspec
def agenttrain_register_trainers(register: RegisterTrainer) -> None:
    """Register trainers, which turn groups of samples into updates and publish weights.

    `settings=` is what the plugin's table may hold, as for engines, and `check=`, a function from TrainerCheckContext
    to notes, tells what would keep the trainer from working before anything starts. With `forecast=`, a function from
    ForecastContext to Forecast, a fit that can't fit into memory is refused before it starts, with the figures; without
    it nothing is said of memory.

    Shape: register.
    When: at load, once per process; the forecast is asked before a fit starts, and for its plan.
    Exception: as for `agenttrain_register_engines`; one that the forecast raises ends the command with a PluginError
        that names the plugin, an error of agenttrain's own as it is.

    Example:
        @hookimpl
        def agenttrain_register_trainers(register):
            register("mine", lambda context: MyTrainer(context))
    """


@hookspec
def agenttrain_register_advantages(register: RegisterAdvantages) -> None:
    """Register advantage estimators, each from the rewards [G] of one group to its advantages [G].

    Shape: register.
    When: at load, once per process; the estimator that `trainer.advantage` names is called once per group,
        and once more for each turn of a group in which a verifier credits nodes or turns.
    Exception: as for `agenttrain_register_engines`; one that the estimator raises ends the run.

    Example:
        @hookimpl
        def agenttrain_register_advantages(register):
            register("sign", lambda rewards: [1.0 if r > 0 else -1.0 for r in rewards])
    """


@hookspec
def agenttrain_register_sandboxes(register: RegisterSandboxes) -> None:
    """Register backends that make sandboxes, each a factory without arguments of a SandboxBackend.

    Shape: register.
    When: at load, once per process; the factory is called when the first sandbox of its name is asked for.
    Exception: as for `agenttrain_register_engines`; one that the factory raises ends the command with a PluginError
        that names the plugin, an error of agenttrain's own as it is.

    Example:
        @hookimpl
        def agenttrain_register_sandboxes(register):
            register("mine", MyBackend)  # then: --set sandbox.backend=mine
    """


@hookspec
def agenttrain_register_commands(app: typer.Typer) -> None:
    """Add commands to the command line.

    Shape: register.
    When: each time the command line is built, before it is parsed; import nothing heavy here.
    Exception: the plugin's commands are missing, and it is listed with the reason.

    Example:
        @hookimpl
        def agenttrain_register_commands(app):
            app.command("hello")(lambda: print("hello"))
    """


@hookspec(firstresult=True)
def agenttrain_role(site: CallSite) -> tuple[Role, str] | None:
    """Decide who answers a model call and whether it is trained, with the reason; None leaves it to the others.

    Shape: decide. It wins over the selectors of `@trainable` and over what agenttrain would find by itself.
    When: at each model call inside a rollout, and where a policy serves, on the thread that makes it; be quick.
    Exception: the call fails with a PluginError that names the plugin, and so does an answer of another form; such a
        rollout is an environment failure.

    Example:
        @hookimpl
        def agenttrain_role(site):
            return ("frozen", "drafts are not trained") if site.node == "draft" else None
    """


@hookspec(firstresult=True)
def agenttrain_admit(result: RolloutResult) -> str | None:
    """Keep a rollout out of training by giving the reason; None lets it in.

    Shape: decide. It can't let in what its status keeps out.
    When: once per training rollout that may be trained, before its group is used.
    Exception: the run ends with a PluginError that names the plugin; so does an answer that is no text.

    Example:
        @hookimpl
        def agenttrain_admit(result):
            return "too long" if result.rollout.n_turns > 20 else None
    """


@hookspec
def agenttrain_veto_promotion(promotion: Promotion) -> str | None:
    """Keep a policy from serving by giving the reason; None has nothing against it.

    Shape: veto. All are asked, any reason keeps it out, and every reason is told and kept in the run's promotion.json.
    When: once per `agenttrain promote RUN`, after the rules were checked, whatever they came to; not of a run that has
        not ended.
    Exception: counts as a veto, with the exception as its reason; so does an answer that is no text.

    Example:
        @hookimpl
        def agenttrain_veto_promotion(promotion):
            return "not on a Friday" if date.today().weekday() == 4 else None
    """


@hookspec
def agenttrain_turn_recorded(turn: Turn) -> None:
    """A model call was answered and recorded.

    Shape: observe.
    When: once per turn, on a thread of its rollout; be quick.
    Exception: logged once per plugin and recorded; it never reaches the agent, and the other observers still run.

    Example:
        @hookimpl
        def agenttrain_turn_recorded(turn):
            print(turn.id, len(turn.response_ids))
    """


@hookspec
def agenttrain_rollout_finished(result: RolloutResult) -> None:
    """A rollout has ended, with its status and reward.

    Shape: observe.
    When: once per rollout and attempt, in evaluation too, on the thread that ran it.
    Exception: logged once per plugin and recorded; the other observers still run.

    Example:
        @hookimpl
        def agenttrain_rollout_finished(result):
            print(result.rollout.id, result.rollout.status)
    """


@hookspec
def agenttrain_update_done(step_result: StepResult) -> None:
    """A training step has ended and its weights are published.

    Shape: observe.
    When: once per training step, in order.
    Exception: logged once per plugin and recorded; the other observers still run.

    Example:
        @hookimpl
        def agenttrain_update_done(step_result):
            print(step_result.step, step_result.metrics["reward"])
    """


@hookspec
def agenttrain_checkpoint_written(step: int, folder: Path) -> None:
    """A checkpoint stands whole in its folder; copy it away here.

    Shape: observe.
    When: once per checkpoint, after it is durable, before an older one is removed.
    Exception: logged once per plugin and recorded; the other observers still run.

    Example:
        @hookimpl
        def agenttrain_checkpoint_written(step, folder):
            shutil.copytree(folder, f"/backup/{step}")
    """
