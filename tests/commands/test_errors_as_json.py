"""With --json an error is one object on standard output too, beside its line on standard error; the code stays."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("fit", "grph.py"), "GraphError", "grph.py is not a file"),
        (("fit", "graph.py", "--set", "trainer.stebs=1"), "ConfigError", "Did you mean 'trainer.steps'?"),
        (("fit",), "ConfigError", "fit needs a graph"),
        (("eval", "graph.py", "--model", "nowhere"), "ModelError", "'nowhere' is no folder"),
        (("inspect", "no-run"), "RunError", "No run is named 'no-run'"),
        (("plugins", "--hooks", "nothing"), "PluginError", "There is no hook 'nothing'"),
        (("fit", "graph.py", "--stebs", "1"), "UsageError", "No such option"),
        (("eval",), "UsageError", "Missing argument"),
        (("nothing",), "UsageError", "No such command"),
    ],
)
def test_what_is_refused(project: Any, command: Any, arguments: tuple[str, ...], kind: str, message: str) -> None:
    """Before anything starts: exit 2 either way, and without --json nothing on standard output."""
    plain, told = command(*arguments), command(*arguments, "--json")
    assert (plain.code, plain.out) == (2, "")
    assert told.code == 2
    assert told.err == plain.err
    assert told.json.keys() == {"error"}
    assert told.json["error"]["type"] == kind
    assert message in told.json["error"]["message"]
    assert message in told.err


def test_what_ends_the_work(new_project: Any, command: Any) -> None:
    """A run that can learn nothing ends with 1."""
    new_project(
        decorated="""
def broken(task, state):
    raise ValueError("no")
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=broken)
"""
    )
    done = command("fit", "graph.py", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "TrainerError"
    assert "None of the 3 baseline rollouts has a reward" in done.json["error"]["message"]
    assert done.json["error"]["message"] in done.err


def test_what_stops_at_an_alarm(new_project: Any, command: Any) -> None:
    """Saved, and the object says how to go on."""
    project = new_project(
        decorated="""
def equal(task, state):
    return 0.5
graph = trainable(builder, model=POLICY, tasks="tasks.jsonl", verifier=equal)
"""
    )
    done = command("fit", "graph.py", "--stop-on-alarm", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "StoppedByAlarm"
    assert f"agenttrain fit --resume {project.run.id}" in done.json["error"]["message"]
