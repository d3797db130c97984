"""For authors of plugins: contracts to subclass in pytest, and small real parts to test with.

    EngineContract          ids in, ids and log probabilities out           engine_contract
    TrainerContract         steps, an account of every rollout, resume      trainer_contract
    VerifierContract        a score, the same twice, on any state           verifier_contract
    RendererContract        messages to ids, ids to messages                renderer_contract
    SandboxBackendContract  files, runs, limits, boundaries, leaks          sandbox_contract
    ScenarioContract        27 scenarios of agents on a user's own model    scenarios
    tiny_model              a Hugging Face folder, made in a second         small_model
    toy_project             graph.py, tasks.jsonl and agenttrain.toml       toy
    OddOnes                 a world without a graph, for trainers           odd_ones
    strategies              Hypothesis strategies of records                strategies

Nothing here is a mock: models sample, graphs run, weights move. Each name is imported at its first use, since pytest,
torch and Hypothesis are not there for everybody.

Example:
    from agenttrain.testing import EngineContract, tiny_model

    class TestMine(EngineContract):
        @pytest.fixture
        def engine(self, tmp_path):
            engine = MyEngine(tiny_model(tmp_path / "model"))
            yield engine
            engine.close()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agenttrain.testing import strategies
    from agenttrain.testing.engine_contract import EngineContract
    from agenttrain.testing.odd_ones import OddOnes
    from agenttrain.testing.renderer_contract import RendererContract
    from agenttrain.testing.sandbox_contract import SandboxBackendContract
    from agenttrain.testing.scenarios import ScenarioContract
    from agenttrain.testing.small_model import tiny_model
    from agenttrain.testing.toy import ToyProject, ToyRun, toy_project
    from agenttrain.testing.trainer_contract import TrainerContract
    from agenttrain.testing.verifier_contract import VerifierContract

__all__ = [
    "EngineContract",
    "OddOnes",
    "RendererContract",
    "SandboxBackendContract",
    "ScenarioContract",
    "ToyProject",
    "ToyRun",
    "TrainerContract",
    "VerifierContract",
    "strategies",
    "tiny_model",
    "toy_project",
]

_homes = {
    "EngineContract": "engine_contract",
    "OddOnes": "odd_ones",
    "RendererContract": "renderer_contract",
    "SandboxBackendContract": "sandbox_contract",
    "ScenarioContract": "scenarios",
    "ToyProject": "toy",
    "ToyRun": "toy",
    "TrainerContract": "trainer_contract",
    "VerifierContract": "verifier_contract",
    "tiny_model": "small_model",
    "toy_project": "toy",
}
_needs = {"pytest": "pytest>=8.3", "hypothesis": "hypothesis>=6.130"}
"""What the base installation lacks, and what to install for it."""


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'agenttrain.testing' has no attribute {name!r}. It has {', '.join(__all__)}.")
    home = f"agenttrain.testing.{_homes.get(name, name)}"
    try:
        if name.endswith("Contract"):
            _explain_failures_of(home)
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in _needs:
            raise
        raise ModuleNotFoundError(
            f"agenttrain.testing.{name} needs {error.name}, which is not installed. pip install '{_needs[error.name]}'",
            name=error.name,
        ) from error
    value = module if name == "strategies" else getattr(module, name)
    globals()[name] = value
    return value


def _explain_failures_of(module: str) -> None:
    """Let pytest show the values of a failed assertion, as it does in a test file."""
    import pytest

    pytest.register_assert_rewrite(module)
