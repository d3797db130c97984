"""The engine "sglang" and `agenttrain sglang …`. Imports nothing heavy until they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agenttrain.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer
    from agenttrain.config import Table
    from agenttrain.hookspecs import RegisterEngine
    from agenttrain.protocols import Engine, EngineContext, ForecastContext, MemoryPart


@hookimpl
def agenttrain_register_engines(register: RegisterEngine) -> None:
    register("sglang", make_engine, settings=settings, check=check, forecast=forecast)


@hookimpl
def agenttrain_register_commands(app: typer.Typer) -> None:
    from agenttrain_sglang.commands import register

    register(app)


def settings() -> type[Table]:
    from agenttrain_sglang.settings import SglangTable

    return SglangTable


def check(context: EngineContext) -> Sequence[str]:
    """What would keep the servers from working is told before anything starts."""
    from agenttrain_sglang.plan import check_plan, plan_of

    return check_plan(plan_of(context))


def forecast(context: ForecastContext) -> Sequence[MemoryPart]:
    """What the servers will hold on this machine."""
    from agenttrain_sglang import forecast as of_servers

    return of_servers.forecast(context)


def make_engine(context: EngineContext) -> Engine:
    from agenttrain_sglang.engine import SglangEngine
    from agenttrain_sglang.plan import plan_of

    return SglangEngine(plan_of(context))
