"""`agenttrain plugins`: what is installed, what it brings, what failed to load, and where a plugin can take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agenttrain.commands.arguments import Json, print_json
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.plugins import Plugins


def plugins_command(
    hook: Annotated[
        str | None, typer.Argument(help="With --hooks: only this plugin point.", metavar="[HOOK]", show_default=False)
    ] = None,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Every plugin point: shape, when, what an exception does, an example.")
    ] = False,
    json: Json = False,
) -> None:
    """List installed plugins, and those that were left out with the reason; or the plugin points."""
    if hooks:
        from agenttrain.commands.hooks import hooks as plugin_points
        from agenttrain.commands.hooks import print_hooks

        print_hooks(plugin_points(hook), as_json=json)
        return
    if hook is not None:
        raise ConfigError(f"{hook!r} stands without --hooks. Write agenttrain plugins --hooks {hook}.")
    from agenttrain.config import environment
    from agenttrain.plugins import Plugins

    plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"))
    if json:
        print_json(summary(plugins))
    else:
        _print(plugins)


def summary(plugins: Plugins) -> dict[str, object]:
    """What is loaded, what was left out and why, and what is registered, in plain data."""
    return {
        "loaded": [{"name": p.name, "version": p.version, "distribution": p.distribution} for p in plugins.loaded],
        "problems": [{"name": p.name, "reason": p.reason} for p in plugins.problems],
        "engines": sorted(plugins.engines),
        "trainers": sorted(plugins.trainers),
        "advantages": sorted(plugins.advantages),
        "sandboxes": sorted(plugins.sandboxes),
    }


def _print(plugins: Plugins) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("plugin", "version", "distribution")
    for plugin in plugins.loaded:
        table.add_row(plugin.name, plugin.version, plugin.distribution)
    console = Console()
    console.print(table)
    console.print(f"engines: {', '.join(sorted(plugins.engines))}")
    console.print(f"trainers: {', '.join(sorted(plugins.trainers))}")
    console.print(f"advantage estimators: {', '.join(sorted(plugins.advantages))}")
    console.print(f"sandbox backends: {', '.join(sorted(plugins.sandboxes))}")
    for problem in plugins.problems:
        console.print(f"left out: {problem.name}: {problem.reason}", style="red", markup=False)
