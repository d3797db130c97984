"""Every hook in one whole run: called when and as often as its docstring says, and its word counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agenttrain.commands.promotion_text import GateProgress
from agenttrain.gate.candidate import candidate_of
from agenttrain.gate.verdict import Gate, Verdict
from agenttrain.plugins import hook_names
from agenttrain.promotion.ledger import Ledger
from agenttrain.promotion.rules import EXIT_CODES
from agenttrain.testing import ToyRun, toy_project

HOOKS = """
import threading
from pathlib import Path

from agenttrain import hookimpl
from agenttrain.local.plugin import make_engine, make_trainer

CALLS = []
LOCK = threading.Lock()


def note(hook, **what):
    with LOCK:
        CALLS.append({"hook": hook, **what})


@hookimpl
def agenttrain_register_engines(register):
    note("agenttrain_register_engines")
    register("noted", make_engine)


@hookimpl
def agenttrain_register_trainers(register):
    note("agenttrain_register_trainers")
    register("noted", make_trainer)


@hookimpl
def agenttrain_register_advantages(register):
    note("agenttrain_register_advantages")

    def sign(rewards):
        note("sign", n=len(rewards))
        mean = sum(rewards) / len(rewards)
        return [float(reward > mean) - float(reward < mean) for reward in rewards]

    register("sign", sign)


@hookimpl
def agenttrain_register_sandboxes(register):
    note("agenttrain_register_sandboxes")


@hookimpl
def agenttrain_role(site):
    note("agenttrain_role", node=site.node)
    return ("trained", "the plugin says so")


@hookimpl
def agenttrain_admit(result):
    note("agenttrain_admit", id=result.rollout.id)
    return "the first sibling" if result.rollout.sibling == 0 else None


@hookimpl
def agenttrain_turn_recorded(turn):
    note("agenttrain_turn_recorded", id=turn.id, reason=turn.role_reason)
    raise ValueError("an observer that raises reaches nobody")


@hookimpl
def agenttrain_rollout_finished(result):
    note("agenttrain_rollout_finished", id=result.rollout.id)


@hookimpl
def agenttrain_update_done(step_result):
    note("agenttrain_update_done", step=step_result.step)


@hookimpl
def agenttrain_checkpoint_written(step, folder):
    note("agenttrain_checkpoint_written", step=step, files=sorted(p.name for p in Path(folder).iterdir()))


@hookimpl
def agenttrain_veto_promotion(promotion):
    note("agenttrain_veto_promotion", id=promotion.run_id, rules=[result.rule for result in promotion.results])
    return "the plugin says so"
"""


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyRun, dict[str, list[dict[str, Any]]]]:
    """A run of two steps, and its gate, whose graph.py implements every hook but commands; what these were called
    with."""
    project = toy_project(tmp_path_factory.mktemp("hooks") / "toy")
    project.graph.write_text(project.graph.read_text() + HOOKS)
    run = project.fit(
        engine={"name": "noted"},
        trainer={"name": "noted", "advantage": "sign", "steps": 2, "group_size": 4},
        checkpoint={"every": 1},
    )
    from agenttrain.graph.load import load_module

    said = load_module(project.graph).CALLS
    of_run = list(said)
    verdict = gate_of(run, project.folder)
    of_gate = [call for call in said[len(of_run) :] if call["hook"] == "agenttrain_veto_promotion"]
    calls: dict[str, list[dict[str, Any]]] = {}
    for call in (*of_run, *of_gate):
        calls.setdefault(call["hook"], []).append(call)
    calls["verdict"] = [asdict(result) for result in verdict.results]
    return run, calls


def gate_of(run: ToyRun, folder: Path) -> Verdict:
    """What `agenttrain promote --check-only` asks of a run."""
    candidate = candidate_of(run.folder, graph=None, cwd=folder, flags={})
    progress = GateProgress(candidate.job)
    return Gate(candidate=candidate, ledger=Ledger(folder / "promotions"), runs=folder, watcher=progress).verdict()


@pytest.mark.parametrize("name", [name for name in hook_names() if name != "agenttrain_register_commands"])
def test_every_hook_is_called(name: str, noted: Any) -> None:
    """Commands are added to a command line, and asked for by test_hookspecs.py and test_example_plugin.py."""
    assert noted[1][name]


def test_registered_once_and_used(noted: Any) -> None:
    """Each kind at load; engine and trainer are the run's, the estimator is asked once per group that is usable."""
    run, calls = noted
    for kind in ("engines", "trainers", "advantages"):
        assert len(calls[f"agenttrain_register_{kind}"]) == 1
    trained = Counter(r.group_id for r in run.store.rollouts() if r.phase == "train")
    assert 1 <= len(calls["sign"]) <= len(trained) == 4
    assert {call["n"] for call in calls["sign"]} == {3}


def test_observers_see_each_turn_and_rollout_once(noted: Any) -> None:
    """In evaluation too; one that raises stops nothing and stands in the report."""
    run, calls = noted
    rollouts = run.store.rollouts()
    turns = [turn.id for rollout in rollouts for turn in run.store.turns(rollout.id)]
    assert sorted(call["id"] for call in calls["agenttrain_turn_recorded"]) == sorted(turns)
    finished = [call["id"] for call in calls["agenttrain_rollout_finished"]]
    assert sorted(finished) == sorted(rollout.id for rollout in rollouts)
    (alarm,) = [alarm for alarm in run.report["alarms"] if alarm["code"] == "plugin_raised"]
    assert "agenttrain_turn_recorded: ValueError: an observer that raises reaches nobody" in alarm["message"]


def test_steps_and_checkpoints_are_told_in_order(noted: Any) -> None:
    """A checkpoint is whole when it is told of."""
    calls = noted[1]
    assert [call["step"] for call in calls["agenttrain_update_done"]] == [1, 2]
    assert [call["step"] for call in calls["agenttrain_checkpoint_written"]] == [1, 2]
    assert all(any("weights" in name for name in call["files"]) for call in calls["agenttrain_checkpoint_written"])


def test_the_role_is_the_plugins_word(noted: Any) -> None:
    """At each call, with its reason in the turn."""
    calls = noted[1]
    assert len(calls["agenttrain_role"]) >= len(calls["agenttrain_turn_recorded"])
    assert {call["node"] for call in calls["agenttrain_role"]} == {"agent"}
    assert all("the plugin says so" in call["reason"] for call in calls["agenttrain_turn_recorded"])


def test_what_is_not_admitted_is_dropped_with_the_reason(noted: Any) -> None:
    """Each training rollout is asked for once; the first of each group is out."""
    run, calls = noted
    asked = [call["id"] for call in calls["agenttrain_admit"]]
    assert len(asked) == len(set(asked)) == 2 * 2 * 4
    assert all(id.startswith("train-") for id in asked)
    rows = [json.loads(line) for line in (Path(run.folder.path) / "metrics.jsonl").read_text().splitlines()]
    dropped = {id: reason for row in rows for id, reason in row["dropped"].items()}
    first = [rollout.id for rollout in run.store.rollouts() if rollout.phase == "train" and rollout.sibling == 0]
    assert len(first) == 4
    assert {dropped[id] for id in first} == {"not admitted: the first sibling"}


def test_the_veto_is_asked_once_after_the_rules(noted: Any) -> None:
    """Whatever they came to: this fit learned nothing. Its reason stands among the rules."""
    run, calls = noted
    (call,) = calls["agenttrain_veto_promotion"]
    assert call["id"] == run.folder.id
    assert call["rules"] == [rule for rule in EXIT_CODES if rule not in ("veto", "replay")]
    assert calls["verdict"][-1]["figure"] == "graph.py: the plugin says so"
    assert not calls["verdict"][-1]["passed"]
