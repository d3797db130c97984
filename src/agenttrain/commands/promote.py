"""`agenttrain promote`: the gate; `--rollback` and `--status` are of the ledger alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from agenttrain.commands.arguments import (
    FAILED,
    RUNS,
    CommandEnded,
    Json,
    Set,
    flag_tables,
    print_error,
    print_json,
    work,
)
from agenttrain.errors import AgenttrainError, ConfigError

if TYPE_CHECKING:
    from agenttrain.gate.candidate import Candidate
    from agenttrain.gate.verdict import GateWatcher
    from agenttrain.promotion.ledger import Ledger

CANARY = "--canary"
DECLARED = "declared"
"""In place of a share: that of [canary]."""


class PromoteCommand(TyperCommand):
    """`--canary` stands with a share or without one, which Typer's options (0.29) can't."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        n = args.index(CANARY) + 1 if CANARY in args else None
        if n is not None and not (n < len(args) and _is_number(args[n])):
            args = [*args[:n], DECLARED, *args[n:]]
        return super().parse_args(ctx, args)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def promote_command(
    run: Annotated[
        str | None, typer.Argument(help="Id or path of a fit; may be left out with --status and --rollback.")
    ] = None,
    graph: Annotated[
        str | None, typer.Argument(help="Where its graph is now, if that was moved.", metavar="[GRAPH]")
    ] = None,
    canary: Annotated[
        str | None,
        typer.Option(CANARY, help="A share of the conversations tries it first.", metavar="[SHARE]"),
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check every rule, and change nothing.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="What was accepted before serves again.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Who serves, since when and why.")] = False,
    why: Annotated[str | None, typer.Option("--why", help="Kept in the ledger.", metavar="TEXT")] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Folder under promotions/, with --status and --rollback.", metavar="NAME"),
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Let a fit's policy serve, if it passes every rule: exits with 0 only then, else with the code of the rule."""
    from agenttrain.commands.promotion_ledger import roll_back, show_status

    given = {"--canary": canary is not None, "--check-only": check_only, "--rollback": rollback, "--status": status}
    _refuse_together([option for option, is_given in given.items() if is_given])
    if status:
        show_status(name, as_json=json)
    elif rollback:
        roll_back(run, name, why, as_json=json)
    elif run is None or name is not None:
        raise ConfigError(
            "promote takes a run, whose graph says under which name it serves: agenttrain promote RUN. Who serves: "
            "agenttrain promote --status."
        )
    else:
        share = _share(canary)
        _promote(
            run,
            graph,
            flag_tables(set_),
            why,
            is_canary=canary is not None,
            share=share,
            check_only=check_only,
            as_json=json,
        )


def _refuse_together(options: Sequence[str]) -> None:
    if len(options) > 1:
        raise ConfigError(f"{' and '.join(options)} are two things to do. Keep one.")


def _share(canary: str | None) -> float | None:
    """What `--canary` says of it. None: what [canary] declares.

    Raises:
        ConfigError: it is no number, or out of the range of canary.share.
    """
    from pydantic import ValidationError

    from agenttrain.config import CanaryTable

    if canary in (None, DECLARED):
        return None
    if not _is_number(str(canary)):
        raise ConfigError(f"{CANARY} is {canary!r}, and a share of the conversations is a number: {CANARY} 0.1.")
    share = float(str(canary))
    try:
        CanaryTable(share=share)
    except ValidationError:
        meant = f" For {share:g} % write {CANARY} {share / 100:g}." if 1 <= share <= 50 else ""
        raise ConfigError(
            f"{CANARY} is {share:g}, and the share of the conversations is above 0 and at most 0.5.{meant}"
        ) from None
    return share


def _promote(
    run: str,
    graph: str | None,
    flags: dict[str, Any],
    why: str | None,
    *,
    is_canary: bool,
    share: float | None,
    check_only: bool,
    as_json: bool,
) -> None:
    from agenttrain.commands.promotion_text import GateProgress, decision_text
    from agenttrain.exporters import exporting, wanted_exporter
    from agenttrain.gate.candidate import candidate_of
    from agenttrain.promotion.ledger import Ledger, ledger_folder
    from agenttrain.run_folder import find_run

    candidate = candidate_of(find_run(run, RUNS), graph=graph, cwd=Path.cwd(), flags=flags, share=share)
    ledger = Ledger(ledger_folder(Path(), candidate.job.name))
    if _serves_already(candidate, ledger, check_only=check_only):
        said = f"{candidate.run.id} serves already. Nothing was changed."
        _tell({"run_id": candidate.run.id, "deed": "none", "exit_code": 0, "rules": []}, said, as_json=as_json)
        return
    tried_by = candidate.job.config.canary.share if is_canary else None
    exporter, progress = wanted_exporter(), GateProgress(candidate.job)
    progress.starts_gate(candidate)
    with exporting(exporter, candidate.run.id), _gate_work():
        decision = _decided(candidate, ledger, progress, share=tried_by, why=why, check_only=check_only)
    progress.close()
    _tell(decision, decision_text(decision), as_json=as_json)
    raise typer.Exit(decision["exit_code"])


def _serves_already(candidate: Candidate, ledger: Ledger, *, check_only: bool) -> bool:
    """Whether the candidate itself serves by the ledger.

    Raises:
        PromotionError: the ledger is of another graph, another run's canary is under way, or what serves is not as it
            was accepted.
    """
    from agenttrain.gate.accept import refuse_other_canary
    from agenttrain.gate.verdict import refuse_foreign
    from agenttrain.promotion.accepted_policy import refuse_changed
    from agenttrain.promotion.ledger import serving_now

    entries = ledger.entries()
    refuse_foreign(ledger, entries, candidate)
    if not check_only:
        refuse_other_canary(entries, candidate.run.id)
    now = serving_now(entries)
    if now is None or Path(now.policy) != candidate.run.policy:
        return False
    refuse_changed(now)
    return True


def _decided(
    candidate: Candidate,
    ledger: Ledger,
    watcher: GateWatcher,
    *,
    share: float | None,
    why: str | None,
    check_only: bool,
) -> dict[str, Any]:
    """The gate, and what comes of it; the run's promotion.json holds the same."""
    from agenttrain.gate.accept import accepted, as_dict, held_to_it, taken_back, write_decision
    from agenttrain.gate.verdict import Gate

    verdict = Gate(candidate=candidate, ledger=ledger, runs=RUNS, watcher=watcher).verdict()
    if not verdict.passed or check_only:
        deed = "checked" if verdict.passed else "refused"
        return write_decision(candidate, as_dict(candidate, verdict, deed=deed))
    entry = accepted(candidate, verdict, ledger, why=why or "every rule holds", share=share)
    try:
        write_decision(candidate, as_dict(candidate, verdict, deed=entry.deed, entry=entry))
    except BaseException as error:
        taken_back(ledger, entry, why=f"the decision could not be kept: {error}")
        raise
    try:
        replayed = held_to_it(candidate, verdict, ledger, entry, runs=RUNS, watcher=watcher)
    except BaseException:
        write_decision(candidate, as_dict(candidate, verdict, deed="taken_back", entry=entry))
        raise
    deed = entry.deed if replayed.passed else "taken_back"
    return write_decision(candidate, as_dict(candidate, replayed, deed=deed, entry=entry))


@contextmanager
def _gate_work() -> Iterator[None]:
    """Whatever can't be checked ends the command with 1, never with the code of a rule."""
    with work():
        try:
            yield
        except AgenttrainError as error:
            print_error(error)
            raise CommandEnded(FAILED, type(error).__name__, str(error)) from None


def _tell(answer: dict[str, Any], text: str, *, as_json: bool) -> None:
    print_json(answer) if as_json else typer.echo(text)
