"""`agenttrain promote --status` and `--rollback`: what the ledger says, and its way back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agenttrain.commands.arguments import RUNS, print_json
from agenttrain.errors import ConfigError, RunError
from agenttrain.promotion_record import BASE, LedgerEntry

if TYPE_CHECKING:
    from agenttrain.promotion.ledger import Ledger

LAST = 10
"""Lines of the ledger that `--status` shows."""
IN_WORDS = {
    "promoted": "promoted",
    "canary": "canary",
    "taken_back": "taken back",
    "rolled_back": "serves again",
}


def show_status(name: str | None, *, as_json: bool) -> None:
    """Who serves, since when and why; a canary and its outcomes; the last lines."""
    from agenttrain.promotion.ledger import canary_now, serving_now

    ledger = _ledger(name)
    entries = ledger.entries() if ledger is not None else ()
    serving, canary = serving_now(entries), canary_now(entries)
    found = {
        "ledger": str(ledger.file) if ledger is not None else None,
        "graph": entries[0].graph if entries else None,
        "serving": _with_standing(serving) if serving is not None else {"run_id": BASE},
        "canary": {**_with_standing(canary), **_canary_dict(ledger, canary)}
        if ledger is not None and canary is not None
        else None,
        "entries": [_entry_dict(entry) for entry in entries[-LAST:]],
        "note": ledger.unfinished() if ledger is not None else "",
    }
    print_json(found) if as_json else typer.echo(_status_text(found))


def roll_back(run: str | None, name: str | None, why: str | None, *, as_json: bool) -> None:
    """Let what was accepted before serve again; of a canary that is named, end that alone."""
    from agenttrain.gate.way_back import canary_ended, rolled_back
    from agenttrain.promotion.ledger import canary_now, serving_now

    named, ledger = _run_named(run, name)
    entries, why = ledger.entries(), why or "by hand"
    canary, now = canary_now(entries), serving_now(entries)
    if named is not None and canary is not None and named == canary.run_id:
        written = [canary_ended(ledger, entries, why=why)]
    elif named is not None and (now is None or named != now.run_id):
        raise ConfigError(
            f"{named} neither serves nor is a canary, so there is nothing of it to take back. Who serves: agenttrain "
            "promote --status."
        )
    else:
        written = rolled_back(ledger, why=why)
    serving = serving_now(ledger.entries())
    run_id = serving.run_id if serving is not None else BASE
    if as_json:
        print_json({"serving": run_id, "ledger": str(ledger.file), "written": [_entry_dict(each) for each in written]})
    else:
        typer.echo("\n".join([*map(_line, map(_entry_dict, written)), f"{_name(run_id)} serves."]))


def _run_named(run: str | None, name: str | None) -> tuple[str | None, Ledger]:
    """(id of the run that was named or None, the ledger of its graph, or that of the name).

    A run that a ledger here tells of needs no folder any more.

    Raises:
        ConfigError: nothing was promoted there.
    """
    from agenttrain.run_folder import find_run

    if run is None:
        ledger = _ledger(name)
        if ledger is None:
            raise ConfigError(f"Nothing was promoted under {Path.cwd()}: there is nothing to go back from.")
        return None, ledger
    try:
        folder = find_run(run, RUNS)
    except RunError:
        told = [each for each in _known() if name in (None, each) and _tells_of(run, _of_name(each))]
        if len(told) != 1:
            raise
        return Path(run).name, _of_name(told[0])
    of_graph = Path(str(folder.read_config()[1].get("graph", ""))).parent.name
    return folder.id, _of_name(name or of_graph)


def _ledger(name: str | None) -> Ledger | None:
    """That of the name, or the only one; None where nothing was ever promoted.

    Raises:
        ConfigError: no such name, or several and none is named.
    """
    known = _known()
    if name is not None:
        return _of_name(name)
    if len(known) > 1:
        raise ConfigError(f"Several graphs have a ledger here. Name one of these with --name: {', '.join(known)}.")
    return _of_name(known[0]) if known else None


def _of_name(name: str) -> Ledger:
    """A ledger that is there.

    Raises:
        ConfigError: it isn't, with those that are.
    """
    from agenttrain.promotion.ledger import Ledger, ledger_folder

    ledger = Ledger(ledger_folder(Path(), name))
    if not ledger.file.is_file():
        raise ConfigError(
            f"{ledger.file} isn't there: nothing was promoted. Ledgers here: {', '.join(_known()) or 'none'}."
        )
    return ledger


def _known() -> list[str]:
    """Names of the ledgers in the current directory."""
    from agenttrain.promotion.ledger import PROMOTIONS

    return sorted(path.parent.name for path in PROMOTIONS.glob("*/ledger.jsonl"))


def _tells_of(run: str, ledger: Ledger) -> bool:
    return any(entry.run_id == Path(run).name for entry in ledger.entries())


def _entry_dict(entry: LedgerEntry) -> dict[str, Any]:
    """A line of the ledger, without the figures of its rules."""
    return {
        "number": entry.number,
        "at": entry.at,
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at)),
        "deed": entry.deed,
        "run_id": entry.run_id,
        "policy": entry.policy,
        "weights": entry.weights,
        "why": entry.why,
        "by": entry.by,
        "incumbent": entry.incumbent,
        "share": entry.share,
    }


def _with_standing(entry: LedgerEntry) -> dict[str, Any]:
    """The line of what serves or is tried, and what became of its policy's folder."""
    from agenttrain.promotion.accepted_policy import standing

    found = standing(entry)
    return {**_entry_dict(entry), "state": found.state, "fault": found.fault}


def _canary_dict(ledger: Ledger, canary: LedgerEntry) -> dict[str, Any]:
    """A canary with what came of its conversations, and of the incumbent's meanwhile."""
    from agenttrain.promotion.outcomes import Outcomes

    outcomes = Outcomes(ledger.folder)
    try:
        arms = outcomes.counts(canary.hash)
        answered = outcomes.conversations(canary.hash)
    finally:
        outcomes.close()
    of_arms = [
        {"conversations": n, "outcomes": arm.n, "successes": arm.n_success}
        for n, arm in zip(answered, arms, strict=True)
    ]
    return {**_entry_dict(canary), "of_canary": of_arms[0], "of_incumbent": of_arms[1]}


def _status_text(found: dict[str, Any]) -> str:
    if found["ledger"] is None:
        return "Nothing was promoted here: the base serves."
    serving, canary = found["serving"], found["canary"]
    lines = [f"{found['ledger']}, of {found['graph']}", ""]
    if "since" in serving:
        said = f"serves since {serving['since']}: {serving['why']} ({serving['by']})"
        lines += [f"{_name(serving['run_id'])} {said}", *_told(serving)]
    else:
        lines.append("The base serves: nothing was promoted yet.")
    if canary is not None:
        lines.append(
            f"{canary['run_id']} is tried by {100 * canary['share']:g} % of the conversations since {canary['since']}: "
            f"{_arm(canary['of_canary'])}; the incumbent meanwhile: {_arm(canary['of_incumbent'])}"
        )
        lines += _told(canary)
    return "\n".join([*lines, "", *map(_line, found["entries"]), *([found["note"]] if found["note"] else [])])


def _told(entry: dict[str, Any]) -> list[str]:
    """The fault of an entry's policy, marked with the state of its folder."""
    return [f"{entry['state'].upper()}: {entry['fault']}"] if entry["fault"] else []


def _arm(arm: dict[str, int]) -> str:
    return f"{arm['successes']} successes of {arm['outcomes']} outcomes in {arm['conversations']} conversations"


def _line(entry: dict[str, Any]) -> str:
    share = f", {100 * entry['share']:g} %" if entry["share"] is not None else ""
    return (
        f"{entry['number']:>3}  {entry['since']}  {_name(entry['run_id'])}: {IN_WORDS[entry['deed']]}{share}, "
        f"{entry['why']} ({entry['by']})"
    )


def _name(run_id: str) -> str:
    return "The base" if run_id == BASE else run_id
