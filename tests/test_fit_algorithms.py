"""Whole runs by other algorithms: what they decide stands in the run's files, and every token is accounted for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agenttrain.errors import ConfigError
from agenttrain.testing import toy_project

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": "ppo", "epochs": 2, "kl_coefficient": 0.01, "kl": "k1", "importance_cap": 2.0},
    "gspo": {"algorithm": "gspo", "epochs": 2, "kl_coefficient": 0.01},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_shows_what_it_was_trained_by(name: str, tmp_path: Path) -> None:
    """Each rollout is handed over once though it is trained twice; the advantages stored are those of the loss."""
    run = toy_project(tmp_path / "toy").fit(trainer={"group_size": 4, "learning_rate": 1e-3, **SETTINGS[name]})
    shown = tomllib.loads((run.folder.path / "config.toml").read_text())["trainer"]
    assert (shown["algorithm"], shown["epochs"]) == (name, 2)
    assert (shown["loss"], shown["clip_low"]) == {"ppo": ("token-mean", 0.2), "gspo": ("rollout-mean", 3e-4)}[name]
    assert ("gae_lambda" in shown) == (name == "ppo")
    tokens = run.report["tokens"]
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"] > 0
    assert tokens["drifted"] == 0
    (row,) = run.folder.metrics()
    assert row["tokens_trained"] == tokens["trained"] > 0
    assert row["updates"] == 2 * 2
    assert abs(row["kl_mean"]) < 1e-5
    assert ("value_explained" in row) == (name == "ppo")


def test_a_combination_that_cannot_be_right_ends_before_anything_starts(tmp_path: Path) -> None:
    project = toy_project(tmp_path / "toy")
    with pytest.raises(ConfigError, match="whose advantages come from a critic"):
        project.fit(trainer={"algorithm": "ppo", "advantage": "leave-one-out"})
    assert not list((tmp_path / "toy").glob("runs/*"))
