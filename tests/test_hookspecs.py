"""hookspecs.py: every plugin point says what it is, has an example that loads and runs, and a test."""

from __future__ import annotations

import inspect
import textwrap
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from agenttrain import hookimpl, hookspecs
from agenttrain.plugins import Plugins, hook_names
from agenttrain.promotion_record import BASE, Promotion
from agenttrain.records import CallSite, Rollout, RolloutRequest, RolloutResult, StepResult, Task, Turn

FIELDS = ("Shape:", "When:", "Exception:", "Example:")


def example_of(name: str) -> str:
    """The code under Example: in a hook's docstring."""
    docstring = inspect.getdoc(getattr(hookspecs, name)) or ""
    return textwrap.dedent(docstring.partition("Example:\n")[2])


def plugins_with(name: str) -> Plugins:
    """Plugins of a graph.py that holds nothing but the example of one hook."""
    module = ModuleType("graph_of_test")
    vars(module).update(
        hookimpl=hookimpl,
        MyEngine=str,
        MyTrainer=str,
        MyBackend=list,
        shutil=SimpleNamespace(copytree=copied),
        date=SimpleNamespace(today=lambda: today),
    )
    exec(example_of(name), vars(module))
    return Plugins.load(only="", graph_module=module)


copies: list[tuple[Path, str]] = []
today = date(2026, 11, 27)
"""A Friday."""


def copied(source: Path, target: str) -> None:
    copies.append((source, target))


def result_of(n_turns: int) -> RolloutResult:
    request = RolloutRequest(task=Task(id="t", input={}), phase="train", step=1)
    rollout = Rollout(
        id=request.rollout_id,
        task_id="t",
        phase="train",
        step=1,
        sibling=0,
        attempt=0,
        status="completed",
        n_turns=n_turns,
    )
    return RolloutResult(request=request, rollout=rollout, turns=(), trajectories=(), samples=())


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_says_shape_time_exception_and_example(name: str) -> None:
    docstring = inspect.getdoc(getattr(hookspecs, name)) or ""
    assert [field for field in FIELDS if field in docstring] == list(FIELDS)
    shape = docstring.partition("Shape: ")[2].partition(".")[0]
    assert shape in ("register", "decide", "observe", "veto")
    assert f"def {name}(" in example_of(name)


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_has_a_test_of_its_example(name: str) -> None:
    """A new hook fails here until a function test_example_of_<hook> stands in this file."""
    assert f"test_example_of_{name}" in globals()


@pytest.mark.parametrize("name", hook_names())
def test_every_name_has_the_prefix_and_typed_arguments(name: str) -> None:
    assert name.startswith("agenttrain_")
    signature = inspect.signature(getattr(hookspecs, name))
    assert all(argument.annotation is not argument.empty for argument in signature.parameters.values())


def test_there_are_about_a_dozen() -> None:
    assert 8 <= len(hook_names()) <= 16


def test_example_of_agenttrain_register_engines() -> None:
    engine: Any = plugins_with("agenttrain_register_engines").engine("mine")
    assert engine(SimpleNamespace(model="folder")) == "folder"


def test_example_of_agenttrain_register_trainers() -> None:
    trainer: Any = plugins_with("agenttrain_register_trainers").trainer("mine")
    assert trainer("context") == "context"


def test_example_of_agenttrain_register_advantages() -> None:
    assert plugins_with("agenttrain_register_advantages").advantage("sign")([0.5, 0.0]) == [1.0, -1.0]


def test_example_of_agenttrain_register_sandboxes() -> None:
    plugins = plugins_with("agenttrain_register_sandboxes")
    first: Any = plugins.sandbox("mine")
    assert first == []
    assert plugins.sandbox("mine") is not first


def test_example_of_agenttrain_register_commands() -> None:
    app = typer.Typer()
    plugins_with("agenttrain_register_commands").register_commands(app)
    assert [command.name for command in app.registered_commands] == ["hello"]


def test_example_of_agenttrain_role() -> None:
    plugins = plugins_with("agenttrain_role")
    assert plugins.decide_role(CallSite(node="draft")) == ("frozen", "drafts are not trained")
    assert plugins.decide_role(CallSite(node="answer")) is None


def test_example_of_agenttrain_admit() -> None:
    plugins = plugins_with("agenttrain_admit")
    assert plugins.admit(result_of(21)) == "too long"
    assert plugins.admit(result_of(20)) is None


def test_example_of_agenttrain_veto_promotion() -> None:
    promotion = Promotion(
        graph="graph.py:graph", run_id="r", policy=Path("policy"), incumbent=BASE, report={}, results=()
    )
    assert plugins_with("agenttrain_veto_promotion").vetoes(promotion) == ("graph.py: not on a Friday",)


def test_example_of_agenttrain_turn_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turn(
        id="u1",
        rollout_id="r",
        index=0,
        role="trained",
        role_reason="",
        site=CallSite(),
        response_ids=(1, 2),
        response_logprobs=(0.0, 0.0),
        weight_versions=(0, 0),
    )
    plugins_with("agenttrain_turn_recorded").observe("agenttrain_turn_recorded", turn=turn)
    assert capsys.readouterr().out == "u1 2\n"


def test_example_of_agenttrain_rollout_finished(capsys: pytest.CaptureFixture[str]) -> None:
    plugins_with("agenttrain_rollout_finished").observe("agenttrain_rollout_finished", result=result_of(1))
    assert capsys.readouterr().out == "train-1-t-0-0 completed\n"


def test_example_of_agenttrain_update_done(capsys: pytest.CaptureFixture[str]) -> None:
    step = StepResult(step=2, weight_version=2, metrics={"reward": 0.5}, trained_rollout_ids=(), dropped={})
    plugins_with("agenttrain_update_done").observe("agenttrain_update_done", step_result=step)
    assert capsys.readouterr().out == "2 0.5\n"


def test_example_of_agenttrain_checkpoint_written() -> None:
    copies.clear()
    plugins = plugins_with("agenttrain_checkpoint_written")
    plugins.observe("agenttrain_checkpoint_written", step=3, folder=Path("step-3"))
    assert copies == [(Path("step-3"), "/backup/3")]
    assert plugins.observer_errors == {}
