"""Which rollouts of a step are trained where veRL got no row of one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agenttrain.records import RolloutResult
from agenttrain.trainer.advantage import group_advantages
from agenttrain.trainer.batches import TOO_FEW
from parity_samples import made_up

from agenttrain_verl.rows import Row


def row(result: RolloutResult) -> Row:
    return Row(
        key=result.rollout.id,
        rollout_id=result.rollout.id,
        group_id=result.rollout.group_id,
        trajectory=0,
        n_ids=9,
        n_trained=2,
        reward=result.rollout.reward.score if result.rollout.reward else 0.0,
        oldest_version=0,
    )


def group(model: Path, n: int) -> list[RolloutResult]:
    """n siblings with rewards 0, 1, …"""
    results = made_up(model, n_groups=1, n_siblings=n, temperature=1.0)
    return [
        replace(each, rollout=replace(each.rollout, reward=replace(each.rollout.reward, score=float(i))))
        for i, each in enumerate(results)
    ]


def taught(results: list[RolloutResult], rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> Any:
    from agenttrain_verl import controller

    refused = {results[0].rollout.id: "it is too long"}
    workers = SimpleNamespace(take_group=lambda uid: SimpleNamespace(results=results, refused=refused))
    cleared: list[str] = []
    monkeypatch.setattr(controller, "rows_of", lambda batch: rows)
    monkeypatch.setattr(controller.tq, "kv_clear", lambda keys, partition_id: cleared.extend(keys))
    made = controller.Stepwise()
    made.workers = workers
    made.plan = SimpleNamespace(algorithm=SimpleNamespace(critic=False))
    made.group_advantages = group_advantages
    batch = controller.KVBatchMeta(
        keys=[each.key for each in rows], tags=[{} for _ in rows], partition_id=controller.TRAIN
    )
    batch, outcome = made._taught(batch, ["uid"])
    return batch, outcome, cleared


def test_one_that_is_left_alone_teaches_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """veRL takes its whole reward for its advantage (core_algos.py, compute_grpo_outcome_advantage, 0.9.1)."""
    results = group(model, 2)
    batch, outcome, cleared = taught(results, [row(results[1])], monkeypatch)
    assert outcome.lessons.dropped == {results[0].rollout.id: "it is too long", results[1].rollout.id: TOO_FEW}
    assert (outcome.rows, len(batch), cleared) == ((), 0, [results[1].rollout.id])
    assert (outcome.lessons.n_groups, outcome.lessons.n_trained) == (1, 0)


def test_the_others_are_compared_without_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = group(model, 3)
    batch, outcome, cleared = taught(results, [row(each) for each in results[1:]], monkeypatch)
    assert outcome.lessons.dropped == {results[0].rollout.id: "it is too long"}
    assert [lesson.advantage for lesson in outcome.lessons.kept] == pytest.approx([-1.0, 1.0])
    assert (len(outcome.rows), len(batch), cleared) == (2, 2, [])
