"""The trainer "verl". Imports nothing heavy until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agenttrain.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agenttrain.config import Table
    from agenttrain.hookspecs import RegisterTrainer
    from agenttrain.protocols import Trainer, TrainerCheckContext, TrainerContext


@hookimpl
def agenttrain_register_trainers(register: RegisterTrainer) -> None:
    register("verl", make_trainer, settings=settings, check=check)


@hookimpl
def agenttrain_checkpoint_written(step: int, folder: Path) -> None:
    """veRL's own folder of a checkpoint is found under the name that veRL's tools look for."""
    name = f"global_step_{step}"
    link = folder.parent / name
    if (folder / name).is_dir() and not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(f"{folder.name}/{name}", target_is_directory=True)


def settings() -> type[Table]:
    from agenttrain_verl.settings import VerlTable

    return VerlTable


def check(context: TrainerCheckContext) -> Sequence[str]:
    """What would keep veRL from working is told before Ray starts."""
    from agenttrain_verl.plan import check_plan, plan_of

    return check_plan(plan_of(context.config, context.model, n_tasks=context.n_tasks))


def make_trainer(context: TrainerContext) -> Trainer:
    from agenttrain_verl.trainer import VerlTrainer

    return VerlTrainer(context)
