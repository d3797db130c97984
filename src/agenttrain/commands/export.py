"""`agenttrain export`: a run's policy as a folder for other people, held against what was measured of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import (
    FAILED,
    RUNS,
    Json,
    Set,
    check_choice,
    flag_tables,
    print_json,
    work,
)
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.export.exporting import Exported

EXPORTS = Path("exports")


def export_command(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's id or path, the folder of a policy, or promoted; with --check an exported folder.",
            metavar="RUN",
        ),
    ],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; exports/RUN if it is left out.")] = None,
    form: Annotated[str, typer.Option("--form", help="merged, or adapter (of a run that trained one).")] = "merged",
    engine: Annotated[
        str | None, typer.Option("--engine", help="Whose answers are checked beside those of transformers.")
    ] = None,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Greedy turns of the fixed set.")] = 32,
    prompts: Annotated[
        str, typer.Option("--prompts", help="Of the fixed set: held_out (tasks), or synthetic (of no task).")
    ] = "held_out",
    base: Annotated[Path | None, typer.Option("--base", help="Folder of the model that an adapter is of.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: check an exported folder by its own fixed set.")
    ] = False,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Write a policy as a Hugging Face folder with a model card, and prove that it answers as it was measured."""
    from agenttrain.config import environment
    from agenttrain.export.exporting import Wanted, check_export, export_policy
    from agenttrain.export.policy_source import find_policy
    from agenttrain.plugins import Plugins

    check_choice("--form", form, ("merged", "adapter"))
    check_choice("--prompts", prompts, ("held_out", "synthetic"))
    if base is not None and not (base / "config.json").is_file():
        raise ConfigError(f"--base is {base}, which holds no config.json. Name the folder of a Hugging Face model.")
    wanted = Wanted(
        plugins=Plugins.load(only=environment("AGENTTRAIN_PLUGINS")),
        form=form,  # type: ignore[arg-type]
        n_turns=turns,
        prompts=prompts,  # type: ignore[arg-type]
        engine=engine,
        base=base,
        flags=flag_tables(set_),
    )
    if engine is not None:
        wanted.plugins.engine(engine)  # a wrong name ends it before anything is read
    if check:
        with work():
            done = check_export(Path(run), wanted=wanted)
    else:
        source = find_policy(run, runs=RUNS)
        target = to or EXPORTS / (source.name if form == "merged" else f"{source.name}-adapter")
        with work():
            done = export_policy(source, target.absolute(), wanted=wanted)
    if json:
        print_json(_as_json(done))
    else:
        _print(done, checked=check)
    if done.faults:
        raise typer.Exit(FAILED)


def _as_json(done: Exported) -> dict[str, Any]:
    fixed = done.fixed
    return {
        "run_id": fixed.run_id or None,
        "folder": str(done.folder),
        "form": fixed.form,
        "verified": not done.faults,
        "faults": list(done.faults),
        "turns": len(fixed.turns),
        "source": fixed.source,
        "agreements": [dict(agreed) for agreed in fixed.agreements],
        "weights": fixed.weights,
    }


def _print(done: Exported, *, checked: bool) -> None:
    for agreed in done.fixed.agreements:
        ties = f", near ties {agreed['n_near_ties']} of {agreed['n_tokens']} tokens" if agreed["n_near_ties"] else ""
        gap = "no number" if agreed["max_gap"] is None else f"{agreed['max_gap']:.1e}"
        typer.echo(
            f"{agreed['by']}: {agreed['n_same_turns']} of {agreed['n_turns']} turns the same token by token{ties}; "
            f"log probabilities within {gap}"
        )
    for fault in done.faults:
        typer.echo(f"differs: {fault}", err=True)
    if not done.faults:
        typer.echo(f"{'Verified' if checked else 'Exported and verified'}: {done.folder}")
    elif not checked:
        typer.echo(f"Nothing was exported to {done.folder}.", err=True)
