"""Arguments that several commands share, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from agenttrain.config import parse_assignments
from agenttrain.errors import AgenttrainError, ConfigError, EngineError, RunError, TrainerError

RUNS = Path("runs")
FAILED, STOPPED = 1, 130

Graph = Annotated[
    str, typer.Argument(help="graph.py, graph.py:attribute, or a name in langgraph.json.", metavar="GRAPH")
]
Model = Annotated[str | None, typer.Option("--model", help="Folder or hub id of the policy.")]
Engine = Annotated[str | None, typer.Option("--engine", help="What answers token ids: local, or a plugin's.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the whole run.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value over the configuration.", metavar="KEY=VALUE")]
Json = Annotated[bool, typer.Option("--json", help="Standard output holds exactly one JSON object.")]


def flag_tables(assignments: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Tables from `--set` and from flags named after keys; a flag wins over `--set`.

    Example: flag_tables(["seed=1"], trainer__name="local", seed=None) -> {"seed": 1, "trainer": {"name": "local"}}
    """
    tables = parse_assignments(assignments or [])
    for path, value in flags.items():
        if value is None:
            continue
        *parents, leaf = path.split("__")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        table[leaf] = value
    return tables


def check_choice(option: str, given: str | None, accepted: Sequence[str]) -> None:
    """Refuse a value that an option doesn't take.

    Raises:
        ConfigError: with what it takes.
    """
    if given is not None and given not in accepted:
        raise ConfigError(f"{option} is {given!r}; it takes {', '.join(accepted)}.")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    import json

    typer.echo(json.dumps(value))


def print_error(error: AgenttrainError) -> None:
    """One line on standard error: what kind, and its message."""
    typer.echo(f"{type(error).__name__}: {error}", err=True)


class CommandEnded(Exception):
    """A command has ended early and said why on standard error; the command line makes an exit code of it."""

    def __init__(self, code: int, kind: str, message: str) -> None:
        super().__init__(code, kind, message)
        self.code, self.kind, self.message = code, kind, message


@contextmanager
def work() -> Iterator[None]:
    """What is done once all is checked: its own failures end the command with 1, Ctrl-C with 130.

    A configuration that only the work shows to be wrong, such as a selector that matches no call, is left to the
    caller like any other.
    """
    try:
        yield
    except (EngineError, TrainerError, RunError) as error:
        print_error(error)
        raise CommandEnded(FAILED, type(error).__name__, str(error)) from None
    except KeyboardInterrupt:
        typer.echo("Stopped by Ctrl-C.", err=True)
        raise CommandEnded(STOPPED, "RunStopped", "Stopped by Ctrl-C.") from None
