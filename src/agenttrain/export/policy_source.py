"""What people call a policy becomes its folder, and all that is known of it: "RUN", a path, or "promoted"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenttrain.errors import PromotionError, RunError
from agenttrain.folder_hash import file_hashes, hash_of_files
from agenttrain.promotion.accepted_policy import refuse_changed
from agenttrain.promotion.ledger import PROMOTIONS, Ledger, serving_now
from agenttrain.promotion_record import BASE, LedgerEntry
from agenttrain.run_folder import RunFolder, find_run

PROMOTED = "promoted"
"""In place of a run: what serves by the ledger; "promoted:NAME" where there are several, or its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """A policy's folder and where it is from."""

    folder: Path
    run: RunFolder | None = None
    """None: it is of no run."""
    report: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration of the run."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the run."""

    @property
    def name(self) -> str:
        return self.run.id if self.run is not None else self.folder.name

    @property
    def base(self) -> str:
        """Hub id or folder of what it was trained from; of no run: the folder itself."""
        model = str(self.tables.get("model") or self.folder)
        return str(Path(model).resolve()) if Path(model).is_dir() else model


def find_policy(name: str, *, runs: Path) -> PolicySource:
    """The policy that a RUN, a path or "promoted" names.

    Args:
        runs: the folder that runs are in; promotions/ stands beside it.

    Raises:
        RunError: no such run, or one without a policy.
        PromotionError: nothing was promoted, or not as it lies there now.
    """
    if name == PROMOTED or name.startswith(f"{PROMOTED}:"):
        name = _promoted(_ledger(name.partition(":")[2], runs.parent / PROMOTIONS))
    elif Ledger(Path(name)).file.is_file():
        name = _promoted(Ledger(Path(name)))
    path = Path(name).resolve()
    of_run = path.name == "policy" and (path.parent / "config.toml").is_file()
    if (path / "config.json").is_file() and not of_run:
        return PolicySource(folder=path)
    return _of_run(RunFolder(path.parent) if of_run else find_run(name, runs))


def ledger_lines(run: RunFolder) -> tuple[LedgerEntry, ...]:
    """What the ledgers beside the run's folder say of it.

    Raises:
        PromotionError: a ledger is damaged.
    """
    folders = sorted((run.path.parent.parent / PROMOTIONS).glob("*/"))
    return tuple(entry for folder in folders for entry in Ledger(folder).entries() if entry.run_id == run.id)


def changed_since_fit(run: RunFolder, report: Mapping[str, Any]) -> str:
    """What of policy/ is not as fit exported it, in words; empty when all is.

    Raises:
        OSError: a file can't be read.
    """
    noted = report.get("policy")
    if not noted:
        return f"{run.report_json} names no hash of policy/: an older agenttrain wrote it, so nobody knows what it was."
    seen = file_hashes(run.policy)
    if hash_of_files(seen) == noted["hash"]:
        return ""
    written: Mapping[str, str] = noted["files"]
    changed = sorted(name for name in {*seen, *written} if seen.get(name) != written.get(name))
    said = ", ".join(f"{name} ({_how(seen.get(name), written.get(name))})" for name in changed[:3])
    return (
        f"policy/ of {run.id} has hash {hash_of_files(seen)[:16]}, and fit exported {noted['hash'][:16]}: {said}"
        f"{' and more' if len(changed) > 3 else ''}."
    )


def _how(seen: str | None, written: str | None) -> str:
    if seen is None:
        return "is gone"
    return "was not there" if written is None else "has other bytes"


def _of_run(run: RunFolder) -> PolicySource:
    if not run.policy.is_dir():
        raise RunError(
            f"Run {run.id} holds no policy: it has not ended, or was an evaluation. Finish it with agenttrain fit "
            f"--resume {run.id}, or name another run or the folder of a model."
        )
    report = run.read_report()
    if report is None or "trained" not in report:
        raise RunError(f"Run {run.id} has no report of a fit yet. Finish it with agenttrain fit --resume {run.id}.")
    tables, made_by = run.read_config()
    return PolicySource(folder=run.policy, run=run, report=report, tables=tables, made_by=made_by)


def _ledger(name: str, promotions: Path) -> Ledger:
    """Of that name; of none, the only one."""
    ledgers = {file.parent.name: Ledger(file.parent) for file in sorted(promotions.glob("*/ledger.jsonl"))}
    if name in ledgers:
        return ledgers[name]
    if not name and len(ledgers) == 1:
        return next(iter(ledgers.values()))
    if not ledgers:
        raise PromotionError(
            f"Nothing was promoted here: {promotions.absolute()} holds no ledger. agenttrain promote RUN begins one."
        )
    seen = f"No ledger is named {name!r}" if name else "There are several ledgers"
    raise PromotionError(f"{seen} in {promotions.absolute()}: {', '.join(ledgers)}. Say which: promoted:NAME.")


def _promoted(ledger: Ledger) -> str:
    """The folder of what serves, as it was promoted."""
    entry = serving_now(ledger.entries())
    if entry is None or entry.run_id == BASE:
        raise PromotionError(f"By {ledger.file} the base serves. Promote a run first, or name one.")
    refuse_changed(entry)
    return entry.policy
