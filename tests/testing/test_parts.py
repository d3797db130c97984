"""The small real parts: a model made in a second, a project that trains, strategies of whole records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from agenttrain import testing
from agenttrain.capture.render import open_renderer
from agenttrain.local.policy import read_weights
from agenttrain.records import RolloutResult, Sample, Trajectory, Turn
from agenttrain.reward.status import is_rewarded
from agenttrain.sample.account import token_account
from agenttrain.testing import strategies, tiny_model, toy_project

FEW = settings(max_examples=30, deadline=None)


def test_a_tiny_model_is_the_same_each_time(tmp_path: Path) -> None:
    """By its seed; its template is admitted as it stands."""
    first, second, other = (tiny_model(tmp_path / str(i), seed=i // 2) for i in range(3))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert sum(tensor.numel() for tensor in read_weights(first).values()) == 9824
    renderer = open_renderer(str(first), family="default")
    ids = renderer.render([{"role": "user", "content": "Hi"}], ())
    assert renderer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tiny_mixture_has_a_dense_layer_among_those_that_route(tmp_path: Path) -> None:
    weights = read_weights(tiny_model(tmp_path / "mixture", layers=3, experts=8))
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert routers == ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]
    assert weights[routers[0]].shape == (8, 16)
    assert "model.layers.1.mlp.gate_proj.weight" in weights


def test_a_toy_project_trains(tmp_path: Path) -> None:
    """A whole run in process: every sampled token is accounted for, and its rollouts can be read."""
    run = toy_project(tmp_path / "toy").fit(trainer={"group_size": 4})
    tokens = run.report["tokens"]
    assert run.report["steps"] == 1
    assert tokens["sampled"] == tokens["trained"] + tokens["frozen"] + tokens["dropped"] > 0
    assert tokens["drifted"] == 0
    assert sum(rollout.phase == "train" for rollout in run.store.rollouts()) == 2 * 4
    assert (run.folder.policy / "model.safetensors").is_file()


@FEW
@given(strategies.turns())
def test_turns_are_whole(turn: Turn) -> None:
    """Ids only where the policy answered."""
    assert (turn.role == "auxiliary") == (turn.sampling is None)
    assert bool(turn.response_ids) == (turn.role != "auxiliary")


@FEW
@given(strategies.trajectories())
def test_trajectories_are_paths_of_turns(path: Trajectory) -> None:
    """Every masked-in position lies in a span that is trained."""
    inside = {i for span in path.spans if span.trained for i in range(span.start, span.end)}
    assert {i for i, trained in enumerate(path.response_mask) if trained} == inside


@FEW
@given(strategies.results())
def test_results_hold_together(result: RolloutResult) -> None:
    """A reward exactly where the status gives one, samples only then, and every sampled id counted."""
    assert (result.rollout.reward is not None) == is_rewarded(result.rollout.status)
    assert all(sample.extra_fields["rollout_id"] == result.rollout.id for sample in result.samples)
    account = token_account([result], result.samples)
    assert account.sampled == sum(len(turn.response_ids) for turn in result.turns)


@pytest.mark.slow
@FEW
@given(strategies.samples())
def test_samples_hold_a_trained_token(sample: Sample) -> None:
    """As those of a rollout do."""
    assert any(sample.response_mask)


def test_every_public_name_is_there_and_explained() -> None:
    """By its docstring; an unknown one is answered with those there are."""
    for name in testing.__all__:
        assert getattr(testing, name).__doc__
    with pytest.raises(AttributeError, match=r"has no attribute 'Fake'\. It has EngineContract, "):
        _ = testing.Fake


def test_what_is_not_installed_is_named() -> None:
    """In an interpreter that has no Hypothesis, the strategies say what to install, and the rest works."""
    code = """
import sys
sys.modules["hypothesis"] = None
from agenttrain import testing
assert testing.tiny_model
try:
    testing.strategies
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "agenttrain.testing.strategies needs hypothesis, which is not installed. pip install 'hypothesis>=6.130'\n"
    )
