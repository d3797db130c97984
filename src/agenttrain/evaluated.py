"""The run folder of a fit or an eval becomes the evaluations it holds, read back from its store.

A fit has two: the baseline, and the held-out tasks after training; an eval has one. Knows nothing of how they were
made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agenttrain.capture.store import read_store
from agenttrain.errors import RunError
from agenttrain.promotion.measures import Evaluation
from agenttrain.promotion.summary import last_attempts
from agenttrain.records import Phase
from agenttrain.run_folder import RunFolder, find_run
from agenttrain.tasks import read_tasks

BASELINE = ":baseline"
"""After a fit's id: its evaluation before training."""


def find_evaluation(name: str, root: Path) -> Evaluation:
    """The evaluation that RUN, or RUN:baseline, names.

    Args:
        name: a run's id under `root`, or its path. A fit's id alone means its held-out tasks after training.

    Raises:
        RunError: no such run, one that has not ended, or one without that evaluation.
    """
    wants_baseline = name.endswith(BASELINE)
    folder = find_run(name.removesuffix(BASELINE), root)
    return read_evaluation(folder, baseline=wants_baseline)


def read_evaluation(folder: RunFolder, *, baseline: bool = False) -> Evaluation:
    """The evaluation of an ended run; of a fit the one after training, or its baseline.

    Raises:
        RunError: the run has not ended, or holds no such evaluation.
    """
    tables, made_by = folder.read_config()
    is_fit = "life" in made_by
    if baseline and not is_fit:
        raise RunError(f"{folder.id} is no fit and has no baseline. Name it without {BASELINE}.")
    if folder.read_report() is not None and not folder.evaluated_tasks.is_file():
        raise RunError(
            f"{folder.id} has no {folder.evaluated_tasks.relative_to(folder.path)}: it was a check, or an older "
            "agenttrain made it. Run fit or eval again to compare it."
        )
    if folder.read_report() is None:
        raise RunError(
            f"{folder.id} holds no ended evaluation: it was stopped or is under way. "
            f"{f'agenttrain fit --resume {folder.id} ends it.' if is_fit else 'Run agenttrain eval again.'}"
        )
    phase: Phase = ("baseline" if baseline else "held_out") if is_fit else "eval"
    rollouts = [each for each in read_store(folder.rollouts).rollouts() if each.phase == phase]
    table = tables.get("eval", {})
    return Evaluation(
        name=f"{folder.id}{BASELINE}" if baseline else folder.id,
        run_id=folder.id,
        phase=phase,
        tasks=read_tasks(folder.evaluated_tasks),
        repeats=table.get("repeats", 1),
        temperature=table.get("temperature", 0.0),
        seed=tables.get("seed", 0),
        rollouts=tuple(last_attempts(rollouts)),
        answered_by=made_by.get("answered_by", "policy"),
        policy=_policy(folder, tables, made_by, phase),
        hashes=made_by.get("hashes", {}),
        tables=tables,
    )


def _policy(folder: RunFolder, tables: dict[str, Any], made_by: dict[str, Any], phase: Phase) -> str:
    """Whose weights, or which model."""
    if phase == "held_out":
        return str(folder.policy)
    return str(made_by.get("policy") or tables.get("model", ""))
