"""`agenttrain plugins`: what is installed, what it brings, and what failed to load."""

from __future__ import annotations

from agenttrain.commands.arguments import Json, print_json


def plugins_command(json: Json = False) -> None:
    """List installed plugins, and those that were left out with the reason."""
    from rich.console import Console
    from rich.table import Table

    from agenttrain.config import environment
    from agenttrain.plugins import Plugins

    plugins = Plugins.load(only=environment("AGENTTRAIN_PLUGINS"))
    if json:
        print_json(
            {
                "loaded": [
                    {"name": p.name, "version": p.version, "distribution": p.distribution} for p in plugins.loaded
                ],
                "problems": [{"name": p.name, "reason": p.reason} for p in plugins.problems],
                "engines": sorted(plugins.engines),
                "trainers": sorted(plugins.trainers),
                "advantages": sorted(plugins.advantages),
            }
        )
        return
    table = Table("plugin", "version", "distribution")
    for plugin in plugins.loaded:
        table.add_row(plugin.name, plugin.version, plugin.distribution)
    console = Console()
    console.print(table)
    console.print(f"engines: {', '.join(sorted(plugins.engines))}")
    console.print(f"trainers: {', '.join(sorted(plugins.trainers))}")
    console.print(f"advantage estimators: {', '.join(sorted(plugins.advantages))}")
    for problem in plugins.problems:
        console.print(f"left out: {problem.name}: {problem.reason}", style="red", markup=False)
