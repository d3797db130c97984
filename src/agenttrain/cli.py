"""The command line: which commands there are, and how an error becomes a message and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the arguments or the set-up are wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agenttrain import __version__
from agenttrain.commands.arguments import CommandEnded, print_error, print_json
from agenttrain.commands.cases import cases_app
from agenttrain.commands.check import check_command
from agenttrain.commands.compare import compare_command
from agenttrain.commands.doctor import doctor_command
from agenttrain.commands.eval import eval_command
from agenttrain.commands.export import export_command
from agenttrain.commands.fit import fit_command
from agenttrain.commands.inspect import inspect_command
from agenttrain.commands.plugins import plugins_command
from agenttrain.commands.promote import PromoteCommand, promote_command
from agenttrain.commands.serve import serve_command
from agenttrain.errors import AgenttrainError, PluginError

WRONG_USE = 2
UsageError: Any = typer.BadParameter.__base__
"""What Typer raises for arguments that it can't take; it shows itself."""
EXIT_WAIT_S = 3.0
"""How long the process waits at its end for threads of the user's graphs."""

app = typer.Typer(
    name="agenttrain",
    help="Reinforcement-learning training for the LangGraph agents you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("check", short_help="Try a graph before it is trained.")(check_command)
app.command("fit", short_help="Measure a baseline, train, measure again.")(fit_command)
app.command("eval", short_help="Roll out tasks once more, and report.")(eval_command)
app.command("compare", short_help="Hold evaluations against each other, with intervals.")(compare_command)
app.command("inspect", short_help="Look at a run's rollouts, token by token.")(inspect_command)
app.command("export", short_help="A policy as a Hugging Face folder, with proof of its answers.")(export_command)
app.command("promote", cls=PromoteCommand, short_help="Let a policy serve, if it passes every rule; the way back.")(
    promote_command
)
app.add_typer(cases_app, name="cases", short_help="The regression set: add, list, remove.")
app.command("serve", short_help="An OpenAI-compatible address over a policy.")(serve_command)
app.command("plugins", short_help="List plugins, and why some were left out.")(plugins_command)
app.command("doctor", short_help="Check that versions, machine and model fit together.")(doctor_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agenttrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement-learning training for the LangGraph agents you already have."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        args: None for those of this process, which then ends in any case.
    """
    code = _exit_code(args)
    if args is None:
        _end_in_any_case(code)
    sys.exit(code)


def _exit_code(args: list[str] | None) -> int:
    """Run a command; what ended it early is told on standard error, and with --json as one object on standard output.

    Returns:
        The exit code.
    """
    given = sys.argv[1:] if args is None else list(args)
    try:
        _register_plugin_commands(app, given)
        code = app(given, prog_name="agenttrain", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except CommandEnded as ended:
        code, kind, message = ended.code, ended.kind, ended.message
    except AgenttrainError as error:
        print_error(error)
        code, kind, message = WRONG_USE, type(error).__name__, str(error)
    except UsageError as error:
        error.show()
        code, kind, message = WRONG_USE, "UsageError", error.format_message()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    if "--json" in given:
        print_json({"error": {"type": kind, "message": message}})
    return code


def _end_in_any_case(code: int) -> None:
    """End the process soon, even where a tool of the user's hangs in a thread that Python would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()

    def end() -> None:
        time.sleep(EXIT_WAIT_S)
        os._exit(code)

    threading.Thread(target=end, name="agenttrain-exit", daemon=True).start()


def _register_plugin_commands(into: Any, args: Sequence[str]) -> None:
    """Commands of installed plugins; a broken plugin is told of by `agenttrain plugins`, and stops nothing here.

    Raises:
        PluginError: two plugins that register one name, or a wrong AGENTTRAIN_PLUGINS. The doctor goes on and tells it.
    """
    from agenttrain.config import environment
    from agenttrain.plugins import Plugins

    try:
        Plugins.load(only=environment("AGENTTRAIN_PLUGINS")).register_commands(into)
    except PluginError:
        if "doctor" not in args[:1]:
            raise
