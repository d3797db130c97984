"""The run of a fit becomes a candidate: its graph loaded as it is today, with the rules that are declared today.

What the run was made with and what is here now stand side by side; which of it differs, the gate says. Nothing is
written and no rollout is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agenttrain.config import find_file, read_file, resolve
from agenttrain.errors import ConfigError
from agenttrain.graph.load import place_of, source_files
from agenttrain.prepare import Job, prepare, provenance
from agenttrain.run_folder import MOST_TOLD, RunFolder, moved_tables, newest_runs

DECLARED_TODAY = ("promotion", "cost", "canary")
"""Tables that are taken from today's file and flags: how a run is judged, not how it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fit that wants to serve."""

    run: RunFolder
    job: Job
    """Of the run's graph and configuration, with the tables of `DECLARED_TODAY`."""
    report: Mapping[str, Any] | None
    """None: the run has not ended."""
    hashes_then: Mapping[str, str | None]
    """Of what the run was made with, by name, and of its configuration."""
    hashes_now: Mapping[str, str | None]
    """Of the same as it is here now; without the configuration, which is the run's own."""
    versions: Mapping[str, str]
    """Of what the run was made with."""
    written_since: tuple[str, ...] = ()
    """Files of the graph, and its tasks, that were written after the run was made."""
    settings: tuple[str, ...] = ()
    """Where today's rules are not those of the run's config.toml, in words."""

    @property
    def graph(self) -> str:
        """As the ledger has it: "/path/of/graph.py:graph"."""
        return f"{self.job.loaded.file}:{self.job.loaded.attribute}"


def candidate_of(
    run: RunFolder, *, graph: str | None, cwd: Path, flags: Mapping[str, Any], share: float | None = None
) -> Candidate:
    """Load and check what a run is to be judged by.

    Args:
        graph: where its graph is now. None: where it was.
        flags: tables of the command line, of `DECLARED_TODAY`.
        share: of the conversations that try it as a canary, asked for this once: nothing to tell of. None: as declared.

    Raises:
        ConfigError: the run is no fit, its graph isn't where it was, or a rule can't be as it is declared.
        AgenttrainError: the graph, its tasks or its base can't be used.
    """
    tables, made_by = run.read_config()
    if "life" not in made_by:
        raise ConfigError(
            f"{run.id} is no fit and has no policy. Name the run of a fit. {_newest_fits(run.path.parent)}"
        )
    file = Path(str(made_by["graph"]))
    if graph is None and not file.is_file():
        raise ConfigError(
            f"{run.id} was made with {file}, which isn't there any more. Say where it is now: agenttrain promote "
            f"{run.id} GRAPH."
        )
    target = graph or f"{file}:{made_by['attribute']}"
    place = place_of(target, cwd).file
    today, settings = _declared_today(place, tables, flags)
    if share is not None:
        today["canary"] = {**today.get("canary", {}), "share": share}
    job = prepare(target, cwd=cwd, flags=today, saved=moved_tables(tables, file.parent, place.parent))
    then = {**made_by.get("hashes", {}), "configuration": _hash(tables)}
    return Candidate(
        run=run,
        job=job,
        report=run.read_report(),
        hashes_then=then,
        hashes_now=provenance(job)["hashes"],
        versions={**made_by.get("versions", {}), "python": str(made_by.get("python", ""))},
        written_since=tuple(_written_since(run, job)),
        settings=tuple(settings),
    )


def _newest_fits(runs: Path) -> str:
    fits = (each.id for each in newest_runs(runs) if "life" in each.read_config()[1])
    newest = ", ".join(islice(fits, MOST_TOLD))
    return f"Newest fits there: {newest}." if newest else "There is none: agenttrain fit GRAPH makes one."


def _written_since(run: RunFolder, job: Job) -> Iterator[str]:
    """By the files' times, so not each of them needs to have changed."""
    begun, folder = (run.path / "config.toml").stat().st_mtime, job.loaded.file.parent
    for file in dict.fromkeys([*source_files(job.loaded), *([Path(job.config.tasks)] if job.config.tasks else [])]):
        if file.is_file() and file.stat().st_mtime > begun:
            yield str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def _declared_today(
    graph_file: Path, tables: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """(tables of today's file and flags, what of them is not as in the run's, in words).

    Raises:
        ConfigError: a key or value that can't be, with the layer that wrote it; a flag of another table.
    """
    for name in flags:
        if name not in DECLARED_TODAY:
            raise ConfigError(
                f"--set {name}… has no say in a promotion: the run keeps what it was made with. Accepted are "
                f"{', '.join(f'{each}.KEY' for each in DECLARED_TODAY)}."
            )
    file = find_file(graph_file.parent)
    written = read_file(file) if file is not None else {}
    layers = [(str(file), {name: written[name] for name in DECLARED_TODAY if name in written}), ("--set", flags)]
    resolve(*layers)
    today: dict[str, Any] = {}
    told: dict[str, str] = {}
    for where, layer in layers:
        for name, table in layer.items():
            today[name] = {**today.get(name, {}), **table}
            told |= dict(_unlike(name, table, tables.get(name, {}), where))
    return today, list(told.values())


def _unlike(name: str, table: Mapping[str, Any], of_run: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """(key, what is said of it) of each that the run has otherwise."""
    for key, value in table.items():
        if of_run.get(key) != value:
            before = f"the run was made with {of_run[key]}" if key in of_run else "not declared when the run was made"
            yield f"{name}.{key}", f"{name}.{key} = {value}, from {where} ({before})"


def _hash(tables: Mapping[str, Any]) -> str:
    """Of a configuration, SHA-256, hexadecimal."""
    return hashlib.sha256(json.dumps(tables, sort_keys=True, default=str).encode()).hexdigest()
