"""`agenttrain sglang …`: the commands of this plugin.

Imports nothing heavy, so that `agenttrain --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from agenttrain.commands.arguments import Json, check_choice, print_json, work

if TYPE_CHECKING:
    from agenttrain_sglang.environment import Device

sglang_app = typer.Typer(
    name="sglang",
    help="SGLang servers for rollouts.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


def register(app: typer.Typer) -> None:
    """Add `agenttrain sglang`."""
    app.add_typer(sglang_app, name="sglang", short_help="Make SGLang ready for --engine sglang.")


@sglang_app.callback()
def _root() -> None:
    """SGLang servers for rollouts."""


@sglang_app.command("setup", short_help="Install SGLang into an environment of its own.")
def setup_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. Without it: cuda if a GPU is seen, else cpu.", metavar="DEVICE")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to. Without it: the user's cache folder, where `fit` finds it.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="A Python 3.11 or 3.12 to make it of. Without it: the running one.")
    ] = None,
    json: Json = False,
) -> None:
    """Install SGLang into a virtual environment of its own and try it; done twice, nothing happens."""
    check_choice("--device", device, ("cpu", "cuda"))
    from time import monotonic

    from agenttrain_sglang.environment import detected_device, make_environment

    chosen: Device = "cuda" if (device or detected_device()) == "cuda" else "cpu"
    began = monotonic()
    with work():
        found, made = make_environment(folder, chosen, tell=lambda line: typer.echo(line, err=True), python=python)
    seconds = round(monotonic() - began, 1)
    if json:
        told = {"folder": str(found.folder), "device": found.device, "sglang": found.version}
        print_json(told | {"made": made, "seconds": seconds})
    elif made:
        typer.echo(f"SGLang {found.version} for {found.device} is ready in {found.folder} ({seconds:.0f} s).")
    else:
        typer.echo(f"SGLang {found.version} for {found.device} was ready already in {found.folder}.")
    if folder is not None and not json:
        typer.echo(f'Name it in agenttrain.toml: [sglang] environment = "{found.folder}"')
