"""The plugin is found by its entry point, and each of its hooks does its work in agenttrain."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import typer
from agenttrain_example_plugin.plugin import REPEATS
from agenttrain_example_plugin.ranks import rank_advantages
from typer.testing import CliRunner

from agenttrain.plugins import Plugins
from agenttrain.records import CallSite, Rollout, RolloutRequest, RolloutResult, Task, Turn
from agenttrain.testing import toy_project


@pytest.fixture
def plugins() -> Plugins:
    """Ours and agenttrain's own, found as they are installed."""
    return Plugins.load(only="local,example", named=("example",))


def turn(ids: tuple[int, ...], *, seconds: float = 1.0) -> Turn:
    return Turn(
        id="rollout#0",
        rollout_id="rollout",
        index=0,
        role="trained",
        role_reason="",
        site=CallSite(),
        prompt_ids=(1,),
        response_ids=ids,
        response_logprobs=(-1.0,) * len(ids),
        weight_versions=(0,) * len(ids),
        started_at=100.0,
        ended_at=100.0 + seconds,
    )


def result(ids: tuple[int, ...]) -> RolloutResult:
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    rollout = Rollout(
        id="rollout", task_id="t", phase="train", step=1, sibling=0, attempt=0, status="completed", n_turns=1
    )
    return RolloutResult(request=request, rollout=rollout, turns=(turn(ids),), trajectories=(), samples=())


def test_what_it_registers(plugins: Plugins) -> None:
    """One of each kind, beside agenttrain's own."""
    assert plugins.problems == []
    assert "shallow" in plugins.engines
    assert "reinforce" in plugins.trainers
    assert "ranks" in plugins.advantages


def test_ranks_by_hand() -> None:
    """Places between -1 and 1; equal rewards share theirs."""
    assert rank_advantages([0.1, 100.0, 0.2]) == [-1.0, 1.0, 0.0]
    assert rank_advantages([1.0, 0.0, 1.0, 0.0, 0.0]) == [0.75, -0.5, 0.75, -0.5, -0.5]
    assert rank_advantages([3.0, 3.0]) == [0.0, 0.0]
    assert rank_advantages([3.0]) == [0.0]


def test_what_repeats_itself_is_not_admitted(plugins: Plugins) -> None:
    """From so many times in a row on."""
    assert plugins.admit(result((4, *[7] * REPEATS, 5))) == f"one id {REPEATS} times in a row"
    assert plugins.admit(result((*[7] * (REPEATS - 1), 8, 7))) is None


def test_slow_calls_are_told_of(plugins: Plugins, caplog: pytest.LogCaptureFixture) -> None:
    """With what they took, and no others."""
    with caplog.at_level(logging.WARNING):
        plugins.observe("agenttrain_turn_recorded", turn=turn((1, 2), seconds=1.0))
        plugins.observe("agenttrain_turn_recorded", turn=turn((1, 2), seconds=40.0))
    assert caplog.messages == ["Call rollout#0 took 40 s for 2 tokens."]
    assert plugins.observer_errors == {}


def test_a_whole_run_with_trainer_engine_and_command(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer learns on what the embedded engine samples; on the shallow engine an alarm says they differ."""
    project = toy_project(tmp_path / "toy")
    run = project.fit(trainer={"name": "reinforce", "advantage": "ranks", "group_size": 4})
    assert run.report["trainer"] == "reinforce"
    assert run.report["tokens"]["trained"] > 0
    assert run.report["tokens"]["drifted"] == 0
    assert run.report["logprob_gap"]["max"] < 1e-3

    shallow = project.fit(trainer={"name": "reinforce", "group_size": 4}, engine={"name": "shallow"})
    assert shallow.report["engine"] == "shallow"
    assert "logprob_gap" in [alarm["code"] for alarm in shallow.report["alarms"]]

    app = typer.Typer()
    app.callback()(lambda: None)
    plugins.register_commands(app)
    monkeypatch.chdir(project.folder)
    said = CliRunner().invoke(app, ["longest", run.folder.id, "--limit", "2"])
    assert said.exit_code == 0
    assert [line.split()[0] for line in said.output.splitlines()] == ["6", "6"]
