"""What agenttrain finds by the entry point "example": every hook that this package implements.

It is imported whenever the command line starts, so it imports nothing heavy: numpy and torch come with the engine and
the trainer, when a run opens them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from agenttrain import hookimpl
from agenttrain_example_plugin.ranks import rank_advantages

if TYPE_CHECKING:
    from agenttrain.protocols import (
        AdvantageEstimator,
        Engine,
        EngineContext,
        EngineFactory,
        Trainer,
        TrainerContext,
        TrainerFactory,
    )
    from agenttrain.records import RolloutResult, Turn

SLOW_S = 30.0
"""A model call that takes longer is told of."""
REPEATS = 32
"""So often the same id in a row, and a rollout is not trained."""

log = logging.getLogger(__name__)


@hookimpl
def agenttrain_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    register("shallow", open_engine)


@hookimpl
def agenttrain_register_trainers(register: Callable[[str, TrainerFactory], None]) -> None:
    register("reinforce", open_trainer)


@hookimpl
def agenttrain_register_advantages(register: Callable[[str, AdvantageEstimator], None]) -> None:
    register("ranks", rank_advantages)


@hookimpl
def agenttrain_register_commands(app: typer.Typer) -> None:
    app.command("longest", short_help="The rollouts of a run that sampled most (example plugin).")(longest)


@hookimpl
def agenttrain_admit(result: RolloutResult) -> str | None:
    """Keep out what only repeats itself: it would teach the policy to go on with that."""
    longest_run = max((_longest_run(turn.response_ids) for turn in result.turns), default=0)
    return f"one id {longest_run} times in a row" if longest_run >= REPEATS else None


@hookimpl
def agenttrain_turn_recorded(turn: Turn) -> None:
    """Tell of calls that hold a rollout up."""
    seconds = turn.ended_at - turn.started_at
    if seconds > SLOW_S:
        log.warning("Call %s took %.0f s for %d tokens.", turn.id, seconds, len(turn.response_ids))


def open_engine(context: EngineContext) -> Engine:
    from agenttrain_example_plugin.shallow import ShallowEngine

    return ShallowEngine(context.weights_from or context.model)


def open_trainer(context: TrainerContext) -> Trainer:
    from agenttrain_example_plugin.reinforce import ReinforceTrainer

    return ReinforceTrainer(context)


def longest(
    run: Annotated[str, typer.Argument(help="Id or path of a run.", metavar="RUN")],
    limit: Annotated[int, typer.Option("--limit", help="Rollouts listed.", min=1)] = 5,
    json: Annotated[bool, typer.Option("--json", help="Standard output holds exactly one JSON object.")] = False,
) -> None:
    """List the rollouts of a run that sampled most tokens."""
    from json import dumps
    from pathlib import Path

    from agenttrain.capture.store import read_store
    from agenttrain.run_folder import find_run

    rollouts = read_store(find_run(run, Path("runs")).rollouts).rollouts()
    chosen = sorted(rollouts, key=lambda rollout: -rollout.n_sampled_ids)[:limit]
    if json:
        typer.echo(dumps({"rollouts": [{"id": r.id, "tokens": r.n_sampled_ids} for r in chosen]}))
        return
    for rollout in chosen:
        typer.echo(f"{rollout.n_sampled_ids:>7} tokens  {rollout.id}  {rollout.status}")


def _longest_run(ids: tuple[int, ...]) -> int:
    longest_run = n = 0
    for before, id in zip((None, *ids), ids, strict=False):
        n = n + 1 if id == before else 1
        longest_run = max(longest_run, n)
    return longest_run
