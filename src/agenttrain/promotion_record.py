"""The nouns of promotion: what a rule came to, who wants to serve in whose place, and a line of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

BASE = "base"
"""In place of a run's id: the policy before any training, which stands in where nothing was promoted."""
CASE_KEY = "case"
"""Of a row of a regression set: where it came from. No part of the task: whoever reads tasks passes it over."""
Deed = Literal["promoted", "canary", "taken_back", "rolled_back"]
"""promoted: it serves from now on; canary: a share of the conversations tries it; taken_back: that share goes to what
serves again, by itself; rolled_back: what served before serves again, by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """One rule of a promotion, held against a candidate."""

    rule: str
    """A name of `promotion.rules.EXIT_CODES`."""
    passed: bool
    figure: str
    """What was measured, in words, such as "+0.130 (95 % interval +0.130 to +0.202 on 500 tasks)"."""
    bound: str
    """What is accepted, in words, such as "above 0"."""
    asked: bool = True
    """False: it holds since nothing was declared, or is there, to hold the candidate against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A candidate against what serves now, as the gate and its vetoes see it."""

    graph: str
    """As in reports: "graph.py:graph"."""
    run_id: str
    """Of the candidate."""
    policy: Path
    """Folder of the candidate's weights."""
    incumbent: str
    """Run id of what serves now, or `BASE`."""
    report: Mapping[str, Any]
    """report.json of the candidate's run."""
    results: tuple[RuleResult, ...]
    """Of every rule, in the order of their exit codes."""

    @property
    def passed(self) -> bool:
        """Whether all rules hold."""
        return all(result.passed for result in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One line of the ledger: what was done, and everything that it was decided by."""

    number: int
    """From 1."""
    at: float
    """Unix seconds."""
    deed: Deed
    graph: str
    run_id: str
    """Of what the deed is about, or `BASE`: what serves after "promoted" and "rolled_back"."""
    policy: str
    """Absolute path of its folder."""
    weights: str
    """`folder_hash.policy_hash` of that folder, when the line was written."""
    base: str = ""
    """Absolute path of the folder that the run was trained from; empty: nobody said it."""
    why: str
    """In words."""
    by: str = ""
    """User and machine."""
    incumbent: str = BASE
    """Run id of what served before."""
    share: float | None = None
    """Of the conversations, for a canary."""
    results: tuple[RuleResult, ...] = ()
    hashes: Mapping[str, str | None] = field(default_factory=dict)
    """Of graph, tasks, verifier, renderer, model (the base) and configuration."""
    versions: Mapping[str, str] = field(default_factory=dict)
    previous: str = ""
    """Hash of the line before; empty for the first."""
    hash: str = ""
    """Of this line without this field: SHA-256, hexadecimal."""
