"""The trainer "sft": supervised fine-tuning on the base's own verified successes, the cheap alternative to RL.

Imports nothing heavy until a run opens it. What it can't do with a configuration, `trainer.algorithms.chosen` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agenttrain.local.plugin import forecast
from agenttrain.markers import hookimpl

if TYPE_CHECKING:
    from agenttrain.hookspecs import RegisterTrainer
    from agenttrain.protocols import Trainer, TrainerContext


@hookimpl
def agenttrain_register_trainers(register: RegisterTrainer) -> None:
    register("sft", make_trainer, forecast=forecast)


def make_trainer(context: TrainerContext) -> Trainer:
    from agenttrain.local.sft import SftTrainer

    return SftTrainer(context)
