"""The embedded engine and trainer under the name "local", and the advantage estimators of groups.

Imports nothing heavy until a run opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agenttrain.markers import hookimpl
from agenttrain.trainer.advantage import (
    centered_advantages,
    group_advantages,
    leave_one_out_advantages,
    own_rewards,
)

if TYPE_CHECKING:
    from agenttrain.hookspecs import RegisterTrainer
    from agenttrain.protocols import (
        AdvantageEstimator,
        Engine,
        EngineContext,
        EngineFactory,
        Forecast,
        ForecastContext,
        Trainer,
        TrainerContext,
    )


@hookimpl
def agenttrain_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    register("local", make_engine)


@hookimpl
def agenttrain_register_trainers(register: RegisterTrainer) -> None:
    register("local", make_trainer, forecast=forecast)


@hookimpl
def agenttrain_register_advantages(register: Callable[[str, AdvantageEstimator], None]) -> None:
    register("group", group_advantages)
    register("centered", centered_advantages)
    register("leave-one-out", leave_one_out_advantages)
    register("reward", own_rewards)


def make_engine(context: EngineContext) -> Engine:
    """In a process of its own, unless `engine.process` is "shared"."""
    if context.config.engine.process == "own":
        from agenttrain.local.process import ProcessEngine

        return ProcessEngine(context)
    from agenttrain.local.engine import LocalEngine

    return LocalEngine.from_context(context)


def make_trainer(context: TrainerContext) -> Trainer:
    from agenttrain.local.trainer import LocalTrainer

    return LocalTrainer(context)


def forecast(context: ForecastContext) -> Forecast:
    """What a fit by the local trainer will need."""
    from agenttrain.local import forecast as local

    return local.forecast(context)
